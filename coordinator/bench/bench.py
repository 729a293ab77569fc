"""`brigade bench`: the cluster against one process, this code's and mlx_lm's, on the same requests in the same run."""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace

from coordinator.bench.results import (
    CLUSTER,
    MLX_LM,
    ONE_PROCESS,
    Bench,
    BenchRow,
    BenchTrial,
    FrameCosts,
    frame_costs,
    summarise,
    system_name,
    with_overheads,
    with_plan,
    with_predictions,
)
from coordinator.bench.systems import MlxLmModel, OnChain, OnMlxLm, System, most_at_once
from coordinator.cluster.open import choose_plan, open_chain, open_peers, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import greet
from coordinator.cluster.progress import Begin, say, show_steps
from coordinator.cluster.survey import known_speeds
from coordinator.decoding.decode import Decode, suit
from coordinator.planning.plan import check_split
from coordinator.planning.prediction import Prediction
from coordinator.planning.speeds import NOTHING_KNOWN, Survey
from coordinator.sessions.request import Request, check_request
from protos.brigade_pb2 import Cache
from worker.errors import BrigadeError, ConfigError, InputError
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec
from worker.platform.machine import machine_name, memory_budget
from worker.platform.text import format_bytes
from worker.platform.threads import MlxThread, run_in_thread

_WARM_UP_TOKENS = 3
_ROWS_TRIED = (1, 4, 8)  # of a lane, for what frames cost
_TOKENS_TRIED = 16  # while all requests decode

LayerSplit = tuple[int, ...] | None  # layers per node; None: as planned


@dataclass(frozen=True)
class Workload:
    """The requests of a benchmark: so many at once, of so many tokens each, by these decoders, over these splits."""

    concurrency: tuple[int, ...]
    num_prompt: int
    num_tokens: int
    decodes: tuple[Decode, ...]
    splits: tuple[LayerSplit, ...]
    num_trials: int

    @property
    def context(self) -> int:
        """Return the tokens of one request."""
        return self.num_prompt + self.num_tokens

    @property
    def cases(self) -> list[tuple[Decode, int]]:
        """The decoders and numbers of requests, in the order in which they are measured."""
        return [(decode, count) for decode in self.decodes for count in self.concurrency]

    def requests(self, count: int, decode: Decode, spec: ModelSpec, seed: int) -> list[Request]:
        """Return requests of random prompts, no two alike; answers go on past the end-of-sequence token."""
        numbers = random.Random(f"{count} {seed}")
        prompts = [tuple(numbers.randrange(spec.vocab_size) for _ in range(self.num_prompt)) for _ in range(count)]
        return [Request(prompt, self.num_tokens, decode=decode) for prompt in prompts]


async def measure(options: ClusterOptions, workload: Workload) -> Bench:
    """Measure every case that can be, and say in one line which cannot; the trials of all systems take turns.

    A cluster that fails ends the run; what was measured until then is returned with its failure.

    Raises:
        ConfigError: the model cannot be split so, or does not fit and nothing else is left to measure.
        InputError: it cannot serve such requests, or there is memory for no case.
        BrigadeError: the cluster failed before anything was measured.
    """
    checkpoint, spec = await read_model(options.model)
    for split in workload.splits:
        check_split(spec, 1 + options.num_workers, split)
    workload = _suited(workload, spec)
    known = await _known_speeds(options, checkpoint, spec)
    most = max(workload.concurrency)
    bench = Bench(machine_name(), spec.name, workload.num_prompt, workload.num_tokens, most, rows=[])
    async with AsyncExitStack() as stack:
        thread = stack.enter_context(closing(MlxThread()))
        alone = await _open_alone(options, checkpoint, spec, workload, thread, stack)
        try:
            for split in workload.splits:
                async with _open_cluster(options, split, checkpoint, spec, workload, thread, alone) as cluster:
                    if cluster or len(workload.splits) == 1:
                        await _measure([*alone, *cluster], spec, workload, bench, known)
        except BrigadeError as error:
            if not bench.rows:
                raise
            bench = replace(bench, failure=error)
    if not bench.rows:
        raise InputError("concurrency", "expected a case that fits in memory; what fits stands above")
    rows = await run_in_thread(lambda: with_predictions(bench.rows, workload.num_prompt, workload.num_tokens))
    return replace(bench, rows=rows)


async def _known_speeds(options: ClusterOptions, checkpoint: Checkpoint, spec: ModelSpec) -> Survey:
    """Return the speeds that the nodes measure, while they hold nothing, where plans need them."""
    if options.local is not None:
        return NOTHING_KNOWN
    async with open_peers(options, spec) as peers:
        await greet(peers)  # a node that does not answer fails here, before the others measure
        return await known_speeds(options, checkpoint, peers)


def _suited(workload: Workload, spec: ModelSpec) -> Workload:
    """Return the workload with those of its decoders that this model has, each once: `auto` may be another one."""
    if workload.context > spec.context:
        raise InputError(
            "num_prompt",
            f"expected at most {spec.context} tokens with --num-tokens, {spec.name}'s context, got {workload.context}",
        )
    suited: list[Decode] = []
    for number, decode in enumerate(workload.decodes, start=1):
        try:
            own = suit(decode, Cache(), spec)
            check_request(workload.requests(1, own, spec, seed=0)[0], spec)
        except InputError as error:
            if number == len(workload.decodes) and not suited:
                raise
            _leave_out(f"--decode {decode.kind}", error)
        else:
            suited.append(own)
    return replace(workload, decodes=tuple(dict.fromkeys(suited)))


async def _open_alone(
    options: ClusterOptions,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    workload: Workload,
    thread: MlxThread,
    stack: AsyncExitStack,
) -> list[System]:
    """Open one process by this code and by mlx_lm, if both fit beside this node's part of the cluster."""
    own = replace(options.with_layers(None), local=0)
    plan, _, _ = await choose_plan(own, checkpoint, spec, [], workload.context, by_speed=False)
    [whole] = plan.assignments
    if not whole.fits:
        needed, budget = format_bytes(whole.needed_bytes), format_bytes(whole.memory_bytes)
        say(f"no comparison with one process: {whole.name} has {budget} for it, the model takes {needed}")
        return []
    if 3 * whole.weight_bytes > memory_budget():
        say(
            "no comparison with one process: this machine does not hold the model for this code, for mlx_lm and its "
            "part of the cluster at once"
        )
        return []
    chain = await stack.enter_async_context(open_chain(own, checkpoint, spec, workload.context, thread))
    model = await chain.thread.run(lambda: MlxLmModel(checkpoint.folder))
    return [OnChain(ONE_PROCESS, chain), OnMlxLm(model, chain)]


@asynccontextmanager
async def _open_cluster(
    options: ClusterOptions,
    split: LayerSplit,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    workload: Workload,
    thread: MlxThread,
    alone: Sequence[System],
) -> AsyncIterator[list[OnChain]]:
    """Open the cluster, if it fits; without workers it is the one process, which may be measured already."""
    if alone and not options.num_workers:
        yield []
        return
    name = CLUSTER if options.num_workers else ONE_PROCESS
    async with AsyncExitStack() as stack:
        opening = open_chain(options.with_layers(split), checkpoint, spec, workload.context, thread)
        try:
            opened = [OnChain(name, await stack.enter_async_context(opening))]
        except ConfigError as error:
            if not alone and len(workload.splits) == 1:
                raise  # there is nothing else to measure
            _leave_out(system_name(name, split), error)
            opened = []
        yield opened


async def _measure(systems: Sequence[System], spec: ModelSpec, workload: Workload, bench: Bench, known: Survey) -> None:
    """Add to `bench` a row per system and case, and the costs of frames on the cluster."""
    able = {case: [system for system in systems if _is_able(system, *case, spec, workload)] for case in workload.cases}
    by_ar = {system for (decode, _), own in able.items() if decode.kind == "ar" for system in own}
    priced = [s for s in systems if s in by_ar and isinstance(s, OnChain) and s.name == CLUSTER]
    num_runs = (1 + workload.num_trials) * sum(map(len, able.values())) + len(priced)
    rows: list[BenchRow] = []
    with show_steps(num_runs) as begin:
        try:
            for (decode, num_requests), own in able.items():
                taken = await _take_turns(own, num_requests, decode, spec, workload, begin)
                found = {s: summarise(s.name, s.layers, decode.kind, trials) for s, trials in taken.items()}
                rows += [with_plan(row, Prediction(spec, s.chain.plan, known)) for s, row in found.items()]
            for system in priced:
                begin(f"{system_name(system.name, system.layers)}, what frames of several sizes take")
                bench.frame_costs.append(await measure_frame_costs(system, spec, workload))
        finally:
            bench.rows.extend(with_overheads(rows))


def _is_able(system: System, decode: Decode, num_requests: int, spec: ModelSpec, workload: Workload) -> bool:
    """Whether a system decodes so and has memory for so many such requests at once; says so if it has not."""
    if system.name == MLX_LM and decode.kind != "ar":
        return False
    [request] = workload.requests(1, decode, spec, seed=0)
    if num_requests > (most := most_at_once(system.chain, request)):
        name = system_name(system.name, system.layers)
        say(f"{name}: {num_requests} at once left out, there is memory for {most}")
    return num_requests <= most


async def _take_turns(
    systems: Sequence[System],
    num_requests: int,
    decode: Decode,
    spec: ModelSpec,
    workload: Workload,
    begin: Begin,
) -> dict[System, list[BenchTrial]]:
    """Return the trials of each system. The first round only warms up: it compiles, and pages weights in."""
    trials: dict[System, list[BenchTrial]] = {system: [] for system in systems}
    for number in range(1 + workload.num_trials):
        requests = workload.requests(num_requests, decode, spec, seed=number)
        if number == 0:
            requests = [replace(request, max_tokens=_WARM_UP_TOKENS) for request in requests]
        for system in list(trials):
            case = f"{system_name(system.name, system.layers)}, {decode.kind}, {num_requests} at once"
            begin(f"{case}, {f'trial {number}' if number else 'warming up'}")
            try:
                trial = await system.run(requests)
            except InputError as error:
                _leave_out(case, error)
                del trials[system]
            else:
                trials[system] += [trial] if number else []
    return trials


async def measure_frame_costs(system: OnChain, spec: ModelSpec, workload: Workload) -> FrameCosts:
    """Return the times of frames of several sizes while all stages are at work.

    One request alone tells the cost of a row while all other stages are idle: too little where nodes share a machine,
    and nothing of the cost of further rows. More and more requests continue one prompt, which is fed once.
    """
    [asked] = workload.requests(1, Decode("ar"), spec, seed=0)
    most = max(1, most_at_once(system.chain, asked) - 1)  # the prompt itself stays, too
    trials = []
    for count in sorted({min(most, rows * system.chain.num_stages) for rows in _ROWS_TRIED}):
        num_tokens = min(workload.num_tokens, count + _TOKENS_TRIED)  # they begin one after another
        requests, first = [replace(asked, max_tokens=num_tokens)] * count, replace(asked, max_tokens=1)
        await system.run(requests, first)  # warms up
        trials.append(await system.run(requests, first))
    return frame_costs(system.chain.plan.layers, trials)


def _leave_out(what: str, error: BrigadeError) -> None:
    first, *_ = error.message.splitlines()  # of a plan that does not fit the rest is its table
    say(f"{what} left out: {first}")
