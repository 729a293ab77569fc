"""`brigade bench`: measures the cluster against one process of this code and of mlx_lm, on the same requests."""

import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import load_model

from coordinator.bench.results import (
    CLUSTER,
    MLX_LM,
    ONE_PROCESS,
    Bench,
    BenchRow,
    BenchTrial,
    FrameCosts,
    PromptRow,
    frame_costs,
    sent_between,
    summarise,
    system_name,
    with_overheads,
    with_plan,
    with_predictions,
)
from coordinator.cluster.chain import Chain
from coordinator.cluster.open import choose_plan, open_chain, open_peers, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import greet
from coordinator.cluster.progress import Begin, say, show_steps
from coordinator.cluster.survey import known_speeds
from coordinator.decoding.decode_options import Decode, suit
from coordinator.engine.engine import Engine
from coordinator.planning.plan import check_split
from coordinator.planning.prediction import Prediction
from coordinator.planning.speeds import NO_SPEEDS, Survey
from coordinator.sessions.cache_costs import cache_costs
from coordinator.sessions.request import Request, check_request, most_rows
from protos.brigade_pb2 import Cache
from worker.errors import BrigadeError, ConfigError, InputError
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.families import module_of
from worker.model.model_spec import ModelSpec
from worker.platform.machine import machine_name, memory_budget
from worker.platform.tasks import together
from worker.platform.text import format_bytes
from worker.platform.threads import MlxThread, run_in_thread

_WARM_UP_TOKENS = 3
_ROWS_TRIED = (1, 4, 8)  # rows of a lane for which frame times are measured
_TOKENS_TRIED = 16  # tokens per request while all requests decode

LayerSplit = tuple[int, ...] | None  # layers per node; None: as planned


@dataclass(frozen=True)
class Workload:
    """The requests of a benchmark: how many at once, of how many tokens, by which decoders, over which splits.

    `prompts` are lengths of further prompts, which are timed one at a time.
    """

    concurrency: tuple[int, ...]
    num_prompt: int
    num_tokens: int
    decodes: tuple[Decode, ...]
    splits: tuple[LayerSplit, ...]
    num_trials: int
    prompts: tuple[int, ...] = ()

    @property
    def context(self) -> int:
        """The tokens of the longest request."""
        return max([self.num_prompt + self.num_tokens, *(num_prompt + 1 for num_prompt in self.prompts)])

    def requests(self, count: int, decode: Decode, spec: ModelSpec, seed: int) -> list[Request]:
        """Return requests of different random prompts, whose answers continue past the end-of-sequence token."""
        prompts = _random_prompts([self.num_prompt] * count, spec, f"{count} {seed}")
        return [Request(prompt, self.num_tokens, decode=decode) for prompt in prompts]


def _prompt_alone(num_prompt: int, spec: ModelSpec, seed: int) -> list[Request]:
    """Return one request of a random prompt of this length, for a single token."""
    return [Request(prompt, 1) for prompt in _random_prompts([num_prompt], spec, f"{num_prompt} {seed}")]


def _random_prompts(lengths: Sequence[int], spec: ModelSpec, seed: str) -> list[tuple[int, ...]]:
    numbers = random.Random(seed)
    drawn = filter(spec.is_text, (numbers.randrange(spec.vocab_size) for _ in itertools.count()))
    return [tuple(itertools.islice(drawn, length)) for length in lengths]


async def measure(options: ClusterOptions, workload: Workload) -> Bench:
    """Measure every case that is possible, in turns between the systems; say in one line which cases are left out.

    If the cluster fails, the results so far are returned with the failure.

    Raises:
        ConfigError: the model cannot be split so, or does not fit and nothing else is left to measure.
        InputError: the model cannot serve such requests, or no case fits in memory.
        BrigadeError: the cluster failed before anything was measured.
    """
    checkpoint, spec = await read_model(options.model, options.draft_model)
    for split in workload.splits:
        check_split(spec, 1 + options.num_workers, split)
    workload = _suited(workload, spec)
    options = replace(options, context=workload.context)
    known = NO_SPEEDS
    if options.local is None:
        async with open_peers(options, spec) as peers:
            await greet(peers)  # a node that does not answer fails here, before the others measure their speeds
            known = await known_speeds(options, checkpoint, peers)
    most = max(workload.concurrency)
    bench = Bench(machine_name(), spec.name, workload.num_prompt, workload.num_tokens, most, rows=[])
    async with AsyncExitStack() as stack:
        run = _Run(options, workload, checkpoint, spec, known, stack.enter_context(closing(MlxThread())), bench)
        alone = await run.open_alone(stack)
        try:
            for split in workload.splits:
                async with run.open_cluster(split, is_only=not alone) as cluster:
                    if cluster or len(workload.splits) == 1:
                        await run.measure([*alone, *cluster])
        except BrigadeError as error:
            if not bench.rows:
                raise
            bench = replace(bench, failure=error)
    if not bench.rows:
        raise InputError("concurrency", "expected a case that fits in memory; what fits stands above")
    rows = await run_in_thread(lambda: with_predictions(bench.rows, workload.num_prompt, workload.num_tokens))
    return replace(bench, rows=rows)


def _suited(workload: Workload, spec: ModelSpec) -> Workload:
    """Return the workload with the decoders that this model has, each once: `auto` may stand for another one."""
    if workload.context > spec.context:
        field = "prompts" if workload.context == max(workload.prompts, default=0) + 1 else "num_prompt"
        found = f"{spec.name}'s context, got {workload.context}"
        raise InputError(field, f"expected at most {spec.context} tokens with those of the answer, {found}")
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


class OnChain:
    """This code: in one process, or on the cluster."""

    def __init__(self, name: str, chain: Chain) -> None:
        self.name = name
        self.layers: list[int] | None = chain.plan.layers
        self.chain = chain

    async def run(self, requests: Sequence[Request], first: Request | None = None) -> BenchTrial:
        """Answer the requests; `first` is answered before, so that its prompt is in the caches."""
        before = await self.chain.statuses()
        async with Engine(self.chain) as engine:
            if first is not None:
                await engine.answer(first, traced=True)
            started, thread_s = time.monotonic(), time.thread_time()
            answers = await together(*(engine.answer(request, traced=True) for request in requests))
            loop_share = (time.thread_time() - thread_s) / (time.monotonic() - started)
        after = await self.chain.statuses()
        passages = {id(passage): passage for answer in answers for passage in answer.passages}
        return BenchTrial(
            num_prompt=sum(len(request.prompt) for request in requests),
            started=started,
            token_times=[[at / 1e9 for at in answer.token_times] for answer in answers],
            passages=list(passages.values()),
            offsets=self.chain.clock_offsets,
            sent_bytes=sent_between(before, after),
            loop_share=loop_share,
            first_steps=max(answer.first_steps for answer in answers),
        )


class OnMlxLm:
    """mlx_lm alone, with the unsharded model: its batch generator, or its stream for a single request."""

    name = MLX_LM
    layers: list[int] | None = None

    def __init__(self, folder: Path, chain: Chain) -> None:
        """Load the model of a folder. Made and run on the chain's thread."""
        self.chain = chain
        self._model, _ = load_model(folder, model_config={"model_type": module_of(open_folder(folder).config)})

    async def run(self, requests: Sequence[Request]) -> BenchTrial:
        """Raises InputError for caches that mlx_lm cannot batch."""
        prompts, num_tokens = [list(request.prompt) for request in requests], requests[0].max_tokens
        stop = threading.Event()
        started = time.monotonic()
        try:
            times = await self.chain.thread.run(lambda: self.time_tokens(prompts, num_tokens, stop.is_set))
        except ValueError as error:
            raise InputError("", f"mlx_lm cannot: {error}") from error
        finally:
            stop.set()  # on an interrupt the thread must end with this process
        return BenchTrial(sum(map(len, prompts)), started, times)

    def time_tokens(
        self, prompts: Sequence[list[int]], num_tokens: int, is_stopped: Callable[[], bool]
    ) -> list[list[float]]:
        """Return when each token of each prompt came, seconds on the monotonic clock, by mlx_lm's own generators.

        One prompt runs in `generate_step`, several in the BatchGenerator of `batch_generate`. Answers end early only
        if `is_stopped`, which is asked between two steps. MLX thread only.
        """
        times: list[list[float]] = [[] for _ in prompts]
        if len(prompts) == 1:
            for _ in generate_step(mx.array(prompts[0]), self._model, max_tokens=num_tokens):
                times[0].append(time.monotonic())
                if is_stopped():
                    break
            return times
        batch = BatchGenerator(self._model, prefill_batch_size=len(prompts), completion_batch_size=len(prompts))
        places = dict(zip(batch.insert(list(prompts), [num_tokens] * len(prompts)), times, strict=True))
        while not is_stopped() and (responses := batch.next_generated()):
            now = time.monotonic()
            for response in responses:
                places[response.uid].append(now)
        batch.close()
        return times


System = OnChain | OnMlxLm  # answers several requests at once, with the memory of its chain's nodes


def most_at_once(chain: Chain, request: Request) -> int:
    """Return how many such requests the chain's nodes have memory for; more would wait, and distort the result."""
    costs = cache_costs(chain.plan, chain.spec)
    needed = costs.bytes_of(request.cache, most_rows(request, chain.spec.context))
    return min(budget // max(1, need) for budget, need in zip(costs.budgets, needed, strict=True))


@dataclass(frozen=True)
class _Run:
    """One run of a benchmark; its results are added to `bench`."""

    options: ClusterOptions
    workload: Workload
    checkpoint: Checkpoint
    spec: ModelSpec
    known: Survey  # speeds that the nodes measured of themselves
    thread: MlxThread
    bench: Bench

    async def open_alone(self, stack: AsyncExitStack) -> list[System]:
        """Open one process of this code and of mlx_lm, if both fit beside this node's part of the cluster."""
        own = replace(self.options.with_layers(None), local=0, by_speed=False, objective="latency")
        plan, _, _ = await choose_plan(own, self.checkpoint, [])
        [whole] = plan.assignments
        if not whole.fits:
            needed, budget = format_bytes(whole.needed_bytes), format_bytes(whole.memory_bytes)
            say(f"no comparison with one process: {whole.name} has {budget} for it, the model takes {needed}")
            return []
        if 3 * whole.weight_bytes > memory_budget():
            say(
                "no comparison with one process: this machine does not hold the model for this code, for mlx_lm and "
                "its part of the cluster at once"
            )
            return []
        chain = await stack.enter_async_context(open_chain(own, self.checkpoint, self.thread))
        systems: list[System] = [OnChain(ONE_PROCESS, chain)]
        if all(decode.kind != "ar" for decode in self.workload.decodes):  # mlx_lm has no other
            return systems
        return [*systems, await chain.thread.run(lambda: OnMlxLm(self.checkpoint.folder, chain))]

    @asynccontextmanager
    async def open_cluster(self, split: LayerSplit, *, is_only: bool) -> AsyncIterator[list[OnChain]]:
        """Open the cluster, if it fits; without workers it is the one process.

        Args:
            is_only: no other system is measured.
        """
        if not is_only and not self.options.num_workers:
            yield []
            return
        name = CLUSTER if self.options.num_workers else ONE_PROCESS
        async with AsyncExitStack() as stack:
            opened = []
            try:
                options = self.options.with_layers(split)
                chain = await stack.enter_async_context(open_chain(options, self.checkpoint, self.thread))
                opened = [OnChain(name, chain)]
            except ConfigError as error:
                if is_only and len(self.workload.splits) == 1:
                    raise
                _leave_out(system_name(name, split), error)
            yield opened

    async def measure(self, systems: Sequence[System]) -> None:
        """Add a row per system and case, and the costs of frames on the cluster."""
        cases = itertools.product(self.workload.decodes, self.workload.concurrency)
        able = {case: [system for system in systems if self._is_able(system, *case)] for case in cases}
        by_ar = {system for (decode, _), own in able.items() if decode.kind == "ar" for system in own}
        clusters = [
            system
            for system in systems
            if system in by_ar and isinstance(system, OnChain) and system.name == CLUSTER
            if not system.chain.answers_alone  # most frames take one node's time then, and no hop
        ]
        rows: list[BenchRow] = []
        num_turns = sum(map(len, able.values())) + len(systems) * len(self.workload.prompts)
        with show_steps((1 + self.workload.num_trials) * num_turns + len(clusters)) as begin:
            try:
                for (decode, num_requests), own in able.items():
                    requests = partial(self.workload.requests, num_requests, decode, self.spec)
                    taken = await self._take_turns(own, f"{decode.kind}, {num_requests} at once", requests, begin)
                    for system, trials in taken.items():
                        row = summarise(system.name, system.layers, decode.kind, trials)
                        rows.append(with_plan(row, Prediction(self.spec, system.chain.plan, self.known)))
                for num_prompt in self.workload.prompts:
                    requests = partial(_prompt_alone, num_prompt, self.spec)
                    taken = await self._take_turns(systems, f"a prompt of {num_prompt} tokens", requests, begin)
                    self.bench.prompts += [self._prompt_row(*each, num_prompt) for each in taken.items()]
                for system in clusters:
                    begin(f"{system_name(system.name, system.layers)}, what frames of several sizes take")
                    self.bench.frame_costs.append(await self._measure_frame_costs(system))
            finally:
                self.bench.rows.extend(with_overheads(rows))

    def _is_able(self, system: System, decode: Decode, num_requests: int) -> bool:
        """Return whether a system has this decoder and memory for so many requests at once; say if memory lacks."""
        if system.name == MLX_LM and decode.kind != "ar":
            return False
        [request] = self.workload.requests(1, decode, self.spec, seed=0)
        if num_requests > (most := most_at_once(system.chain, request)):
            name = system_name(system.name, system.layers)
            say(f"{name}: {num_requests} at once left out, there is memory for {most}")
        return num_requests <= most

    async def _take_turns(
        self, systems: Sequence[System], what: str, requests_of: Callable[[int], list[Request]], begin: Begin
    ) -> dict[System, list[BenchTrial]]:
        """Return the trials of each system; the number of a trial says which requests it answers.

        The first round only warms up: it compiles, and pages weights in.
        """
        trials: dict[System, list[BenchTrial]] = {system: [] for system in systems}
        for number in range(1 + self.workload.num_trials):
            requests = requests_of(number)
            if number == 0:
                requests = [replace(each, max_tokens=min(each.max_tokens, _WARM_UP_TOKENS)) for each in requests]
            for system in list(trials):
                case = f"{system_name(system.name, system.layers)}, {what}"
                begin(f"{case}, {f'trial {number}' if number else 'warming up'}")
                try:
                    trial = await system.run(requests)
                except InputError as error:
                    _leave_out(case, error)
                    del trials[system]
                else:
                    trials[system] += [trial] if number else []
        return trials

    def _prompt_row(self, system: System, trials: Sequence[BenchTrial], num_prompt: int) -> PromptRow:
        plan = system.chain.plan if system.name == CLUSTER else None
        planned_s = Prediction(self.spec, plan, self.known).prefill_s(num_prompt) if plan else None
        took_s = median(trial.prefill_s for trial in trials)
        return PromptRow(system.name, system.layers, num_prompt, took_s, num_prompt / took_s, planned_s)

    async def _measure_frame_costs(self, system: OnChain) -> FrameCosts:
        """Return the times of frames of several sizes while all stages are busy.

        A single request would measure a row while all other stages are idle: too little where nodes share a machine,
        and nothing about further rows. So growing numbers of requests continue one prompt, which is fed once.
        """
        [asked] = self.workload.requests(1, Decode("ar"), self.spec, seed=0)
        most = max(1, most_at_once(system.chain, asked) - 1)  # the prompt itself stays in the cache, too
        trials = []
        for count in sorted({min(most, rows * system.chain.num_stages) for rows in _ROWS_TRIED}):
            num_tokens = min(self.workload.num_tokens, count + _TOKENS_TRIED)  # they begin one after another
            requests, first = [replace(asked, max_tokens=num_tokens)] * count, replace(asked, max_tokens=1)
            await system.run(requests, first)  # warms up
            trials.append(await system.run(requests, first))
        return frame_costs(system.chain.plan.layers, trials)


def _leave_out(what: str, error: BrigadeError) -> None:
    first, *_ = error.message.splitlines()  # the other lines are the table of a plan that does not fit
    say(f"{what} left out: {first}")
