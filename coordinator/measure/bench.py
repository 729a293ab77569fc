"""`brigade bench`: the cluster against one process, this code's and mlx_lm's, on the same requests in the same run."""

import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from coordinator.cluster.chain import Chain
from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import show_count
from coordinator.cluster.runner import Runner
from coordinator.cluster.together import together
from coordinator.decoding.decode import Decode, suit
from coordinator.measure.bench_results import (
    CLUSTER,
    MLX_LM,
    ONE_PROCESS,
    Bench,
    Row,
    Trial,
    sent_between,
    summarise,
    with_overheads,
    with_predictions,
)
from coordinator.measure.reference import Reference
from coordinator.planning.plan import check_split
from coordinator.sessions.request import Request, check_request
from coordinator.sessions.session import Session
from coordinator.sessions.slots import cache_costs
from protos.brigade_pb2 import Cache
from worker.errors import InputError
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec
from worker.process.call_thread import run_aside
from worker.process.machine import machine_name, memory_budget

_WARM_UP_TOKENS = 3

Split = tuple[int, ...] | None  # layers per node; None: as planned


@dataclass(frozen=True)
class Workload:
    """What is asked: so many requests at once, of so many tokens each, by these decoders, over these splits."""

    concurrency: tuple[int, ...]
    num_prompt: int
    num_tokens: int
    decodes: tuple[Decode, ...]
    splits: tuple[Split, ...]
    num_trials: int

    @property
    def context(self) -> int:
        """Tokens of one request."""
        return self.num_prompt + self.num_tokens

    def requests(self, count: int, decode: Decode, spec: ModelSpec, seed: int) -> list[Request]:
        """Prompts of random tokens, no two alike; answers go on past the end-of-sequence token."""
        numbers = random.Random(f"{count} {seed}")
        prompts = [tuple(numbers.randrange(spec.vocab_size) for _ in range(self.num_prompt)) for _ in range(count)]
        return [Request(prompt, self.num_tokens, decode=decode) for prompt in prompts]


class System(Protocol):
    """Something that answers requests, all of them at once."""

    name: str
    layers: list[int] | None
    chain: Chain  # whose nodes' memory it takes

    async def run(self, requests: Sequence[Request]) -> Trial: ...


class OnChain:
    """This code: in one process, or on the cluster."""

    def __init__(self, name: str, chain: Chain) -> None:
        self.name = name
        self.layers: list[int] | None = chain.plan.layers
        self.chain = chain

    async def run(self, requests: Sequence[Request]) -> Trial:
        before = await self.chain.statuses()
        async with Runner(self.chain) as runner:
            started, thread_s = time.monotonic(), time.thread_time()
            answers = await together(*(runner.answer(request, traced=True) for request in requests))
            loop_share = (time.thread_time() - thread_s) / (time.monotonic() - started)
        after = await self.chain.statuses()
        passages = {id(passage): passage for answer in answers for passage in answer.passages}
        return Trial(
            num_prompt=sum(len(request.prompt) for request in requests),
            started=started,
            token_times=[[at / 1e9 for at in answer.token_times] for answer in answers],
            passages=list(passages.values()),
            offsets=self.chain.clock_offsets,
            sent_bytes=sent_between(before, after),
            loop_share=loop_share,
        )


class OnMlxLm:
    """mlx_lm in this process, on the thread of that chain: its batch generator, or its stream for a single request."""

    name = MLX_LM
    layers: list[int] | None = None

    def __init__(self, reference: Reference, chain: Chain) -> None:
        self.chain = chain
        self._reference = reference

    async def run(self, requests: Sequence[Request]) -> Trial:
        prompts, num_tokens = [request.prompt for request in requests], requests[0].max_tokens
        stop = threading.Event()
        started = time.monotonic()
        try:
            times = await self.chain.thread.run(
                lambda: self._reference.time_batch(prompts, num_tokens, lambda: not stop.is_set())
            )
        finally:
            stop.set()  # if the user has had enough, the thread must end with this process
        return Trial(sum(map(len, prompts)), started, times)


async def measure(options: ClusterOptions, workload: Workload) -> Bench:
    """Measure every case that there is memory for; the trials of all systems take turns.

    Raises:
        ConfigError: the model cannot be split so. InputError: it cannot serve such requests, or there is memory for
            no case. BrigadeError: the cluster failed.
    """
    checkpoint, spec = await read_model(options.model)
    for split in workload.splits:
        check_split(spec, 1 + options.num_workers, split)
    # each once: `auto` may be one of the others
    suited = dict.fromkeys(suit(decode, Cache(), spec) for decode in workload.decodes)
    workload = replace(workload, decodes=tuple(suited))
    if workload.context > spec.context:
        raise InputError(
            "num_prompt",
            f"expected at most {spec.context} tokens with --num-tokens, {spec.name}'s context, got {workload.context}",
        )
    for decode in workload.decodes:
        check_request(workload.requests(1, decode, spec, seed=0)[0], spec)
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        alone = await _open_alone(options, checkpoint, spec, workload, stack)
        for split in workload.splits:
            async with _open_cluster(options, split, checkpoint, spec, workload, alone) as cluster:
                rows += with_overheads(await _measure([*alone, *cluster], spec, workload))
    if not rows:
        raise InputError("concurrency", "expected a case that fits in memory; what fits stands above")
    rows = await run_aside(lambda: with_predictions(rows, workload.num_prompt, workload.num_tokens))
    return Bench(machine_name(), spec.name, workload.num_prompt, workload.num_tokens, rows)


async def _open_alone(
    options: ClusterOptions, checkpoint: Checkpoint, spec: ModelSpec, workload: Workload, stack: AsyncExitStack
) -> list[System]:
    """One process by this code and by mlx_lm, if both fit beside this node's part of the cluster."""
    if 3 * spec.shard_bytes(0, spec.num_layers) > memory_budget():
        print(
            "no comparison with one process: this machine does not hold the model for this code, for mlx_lm and its "
            "part of the cluster at once",
            file=sys.stderr,
        )
        return []
    own = replace(options.with_layers(None), local=0)
    chain = await stack.enter_async_context(open_chain(own, checkpoint, spec, workload.context))
    reference = await chain.thread.run(lambda: Reference(checkpoint.folder))
    return [OnChain(ONE_PROCESS, chain), OnMlxLm(reference, chain)]


@asynccontextmanager
async def _open_cluster(
    options: ClusterOptions,
    split: Split,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    workload: Workload,
    alone: Sequence[System],
) -> AsyncIterator[list[System]]:
    """The cluster; without workers it is the one process, which may be measured already."""
    if alone and not options.num_workers:
        yield []
        return
    async with open_chain(options.with_layers(split), checkpoint, spec, workload.context) as chain:
        yield [OnChain(CLUSTER if options.num_workers else ONE_PROCESS, chain)]


async def _measure(systems: Sequence[System], spec: ModelSpec, workload: Workload) -> list[Row]:
    rows = []
    cases = [(decode, count) for decode in workload.decodes for count in workload.concurrency]
    with show_count("trials", len(cases) * (1 + workload.num_trials)) as advance:
        for decode, count in cases:
            [request] = workload.requests(1, decode, spec, seed=0)
            able = [system for system in systems if _is_able(system, count, request)]
            trials = await _take_turns(able, count, decode, spec, workload, advance)
            rows += [summarise(s.name, s.layers, decode.kind, taken) for s, taken in zip(able, trials, strict=True)]
    return rows


def _is_able(system: System, count: int, request: Request) -> bool:
    """Whether it decodes so, and has memory for so many such requests at once; says so if it has not."""
    if system.name == MLX_LM and request.decode.kind != "ar":
        return False
    if count > (most := most_at_once(system.chain, request)):
        print(f"{system.name}: {count} requests at once left out, there is memory for {most}", file=sys.stderr)
    return count <= most


def most_at_once(chain: Chain, request: Request) -> int:
    """How many such requests the chain's nodes have memory for; any more would wait, and be measured waiting."""
    decoder = request.decode.make_decoder(request.eos, chain.costs.steps)
    rows = Session(request.prompt, request.max_tokens, decoder=decoder).most_rows
    costs = cache_costs(chain.plan, chain.spec)
    needed = costs.bytes_of(request.cache, rows)
    return min(budget // max(1, need) for budget, need in zip(costs.budgets, needed, strict=True))


async def _take_turns(
    systems: Sequence[System],
    count: int,
    decode: Decode,
    spec: ModelSpec,
    workload: Workload,
    advance: Callable[[], None],
) -> list[list[Trial]]:
    """By system: its trials. The first round only warms up: it compiles, and pages weights in."""
    trials: list[list[Trial]] = [[] for _ in systems]
    for number in range(1 + workload.num_trials):
        requests = workload.requests(count, decode, spec, seed=number)
        if number == 0:
            requests = [replace(request, max_tokens=_WARM_UP_TOKENS) for request in requests]
        for system, taken in zip(systems, trials, strict=True):
            trial = await system.run(requests)
            taken += [trial] if number else []
        advance()
    return trials
