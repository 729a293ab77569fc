"""`brigade bench --failover`: the last worker is lost in the middle of an answer, and the times that this takes."""

import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Console

from coordinator.cluster.cluster import Cluster
from coordinator.cluster.local import LocalWorker
from coordinator.cluster.nodes import Nodes
from coordinator.cluster.open import cluster_over, read_model, start_local
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.cluster.progress import say, show_steps
from coordinator.cluster.tables import fitting
from coordinator.engine.engine import Engine
from coordinator.planning.plan import check_split
from coordinator.planning.recovery import USUAL, Limits
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from worker.errors import BrigadeError, InputError
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec
from worker.node.network import Network
from worker.platform.machine import machine_name
from worker.platform.threads import MlxThread

KILLED, STOPPED = "killed", "stopped"  # by SIGKILL, by SIGSTOP
RESTARTED, SPARE = "restarted", "spare"  # the lost worker's replacement

_DETECT_S = {KILLED: 0.05, STOPPED: 2.5}  # wanted on loopback, by what happened
_PREFILL = 1.2  # wanted: how much longer than as a prompt the tokens may take to be fed again


@dataclass(frozen=True)
class Case:
    """The loss of the last worker, and its replacement."""

    loss: str
    place: str


CASES = [Case(loss, place) for loss in (KILLED, STOPPED) for place in (RESTARTED, SPARE)]


@dataclass(frozen=True)
class LossMoments:
    """The moments of one loss, seconds on one clock."""

    struck: float
    lost: float  # noticed
    found: float  # there were enough nodes again
    loaded: float
    opened: float  # the chain
    tokens: Sequence[float]  # when each token came


@dataclass(frozen=True)
class LossTimes:
    """The parts of one loss, or medians of several. Seconds; None where there is nothing to measure."""

    detect_s: float | None
    reopen_s: float | None  # from there to an open chain; of it
    find_s: float | None  # until there were enough nodes; of it
    start_s: float | None  # for another process to start
    load_s: float | None
    join_s: float | None
    replay_s: float | None  # from the open chain to the next token
    gap_s: float | None  # between two tokens
    prefill_s: float | None  # of as many tokens as a prompt, right before


@dataclass(frozen=True)
class FailoverRow:
    """The result of a case with so many known tokens."""

    loss: str
    place: str
    context: int
    times: LossTimes
    is_equal: bool  # whether the tokens were those of the unfailed run

    @property
    def wanted_detect_s(self) -> float:
        return _DETECT_S[self.loss]

    @property
    def wanted_gap_s(self) -> float | None:
        """Detection, a process's start where one had to be started, the load, and 1.2 times the prompt."""
        times = self.times
        if times.detect_s is None or times.load_s is None or times.prefill_s is None:
            return None
        return times.detect_s + (times.start_s or 0.0) + times.load_s + _PREFILL * times.prefill_s

    def as_json(self) -> dict[str, Any]:
        wanted = {"wanted_detect_s": self.wanted_detect_s, "wanted_gap_s": self.wanted_gap_s}
        named = {"loss": self.loss, "place": self.place, "context": self.context}
        return named | asdict(self.times) | wanted | {"tokens_equal": self.is_equal}


@dataclass(frozen=True)
class FailoverReport:
    """The results of all cases on one model."""

    machine: str
    model: str
    layers: list[int]
    rows: list[FailoverRow]

    @property
    def is_equal(self) -> bool:
        """Whether all answers had the tokens of the unfailed run."""
        return all(row.is_equal for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        rows = [row.as_json() for row in self.rows]
        return {"machine": self.machine, "model": self.model, "layers": self.layers, "rows": rows}


def times_of(moments: LossMoments, start_s: float | None, prefill_s: float) -> LossTimes:
    """Return the parts of a loss."""
    return LossTimes(
        detect_s=moments.lost - moments.struck,
        reopen_s=moments.opened - moments.lost,
        find_s=moments.found - moments.lost,
        start_s=start_s,
        load_s=moments.loaded - moments.found,
        join_s=moments.opened - moments.loaded,
        replay_s=next((at - moments.opened for at in moments.tokens if at > moments.opened), None),
        gap_s=max((after - before for before, after in pairwise(moments.tokens)), default=None),
        prefill_s=prefill_s,
    )


def middle(trials: Sequence[LossTimes]) -> LossTimes:
    """Return the median of each figure, over the trials that have it."""
    columns = {name: [value for each in trials if (value := getattr(each, name)) is not None] for name in _NAMES}
    return LossTimes(**{name: median(column) if column else None for name, column in columns.items()})


_NAMES = tuple(LossTimes.__dataclass_fields__)


CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
_BEFORE, _AFTER = 8, 8  # tokens of the answer, before and after the loss
_MOST_WARMING = 512  # tokens of a prompt before, from which the chain learns what chunks cost
_AT_ONCE = Limits(rejoin_s=0.0, recovery_s=USUAL.recovery_s)  # whoever is there takes the layers


async def measure_failover(options: ClusterOptions, contexts: Sequence[int], num_trials: int) -> FailoverReport:
    """Measure every case, with each number of tokens that are known at the loss; says which do not fit the model.

    Raises:
        InputError: the model has room for none of them. ConfigError: it cannot be split so, or does not fit.
        BrigadeError: a chain was not opened again.
    """
    checkpoint, spec = await read_model(options.model)
    check_split(spec, 1 + options.num_workers, None)
    contexts = _fitting(contexts, spec)
    rows = []
    with closing(MlxThread()) as thread, show_steps(len(contexts) * len(CASES) * num_trials) as begin:
        place = _Place(options, checkpoint, spec, thread)
        for context in contexts:
            for case in CASES:
                trials = []
                for number in range(num_trials):
                    begin(f"{context} tokens, {case.loss}, {case.place}, trial {number + 1}")
                    trials.append(await place.lose(case, context, seed=number))
                is_equal = all(equal for _, equal in trials)
                rows.append(
                    FailoverRow(case.loss, case.place, context, middle([times for times, _ in trials]), is_equal)
                )
    return FailoverReport(machine_name(), spec.name, place.layers, rows)


def _fitting(contexts: Sequence[int], spec: ModelSpec) -> list[int]:
    fitting = [context for context in contexts if _BEFORE < context <= spec.context - _AFTER]
    if not fitting:
        most, found = spec.context - _AFTER, ", ".join(map(str, contexts))
        raise InputError("num_prompt", f"expected {_BEFORE + 1} to {most} tokens for {spec.name}, got {found}")
    if left := [str(context) for context in contexts if context not in fitting]:
        say(f"{', '.join(left)} tokens left out: {spec.name} has room for {spec.context}")
    return fitting


@dataclass
class _Victim:
    """A cluster, and its last worker."""

    cluster: Cluster
    last: LocalWorker

    @property
    def start_s(self) -> float | None:
        """How long the process took to start that runs in the last worker's place; None if none was started."""
        local = self.cluster.nodes.workers[self.last.name].local
        return local.started_s if local else None


class _Place:
    """Loses workers: opens a new cluster of local processes for each loss."""

    def __init__(self, options: ClusterOptions, checkpoint: Checkpoint, spec: ModelSpec, thread: MlxThread) -> None:
        self.layers: list[int] = []
        self._thread = thread
        self._options = options
        self._checkpoint = checkpoint
        self._spec = spec

    async def lose(self, case: Case, context: int, seed: int) -> tuple[LossTimes, bool]:
        """Lose the last worker once so many tokens are known; return the times, and whether the tokens were right."""
        request = self._request(context, f"{seed}")
        warming = self._request(min(context, _MOST_WARMING), f"{seed}, warming")
        async with self._open(case, context + _AFTER) as victim:
            cluster = victim.cluster
            async with Engine(cluster.chain, when_lost=cluster.reopen) as engine:
                await engine.answer(warming)
                unfailed = await engine.answer(request)
                struck, answer = await _strike(engine, request, victim.last, case)
            reached = cluster.outage
            tokens = [at / 1e9 for at in answer.token_times]
            moments = LossMoments(
                struck, reached.lost_at, reached.found_at, reached.loaded_at, reached.opened_at, tokens
            )
            times = times_of(moments, victim.start_s, unfailed.ttft_s)
        return times, answer.tokens == unfailed.tokens

    def _request(self, context: int, seed: str) -> Request:
        """Return a request with so many known tokens when the worker is lost; no two prompts begin alike."""
        tokens = random.Random(f"{context} {seed}").choices(range(self._spec.vocab_size), k=context - _BEFORE)
        return Request(tuple(tokens), _BEFORE + _AFTER)

    @asynccontextmanager
    async def _open(self, case: Case, context: int) -> AsyncIterator[_Victim]:
        has_spare = case.place == SPARE
        options = replace(self._options, limits=_AT_ONCE if has_spare else USUAL)
        async with AsyncExitStack() as stack:
            names = [f"worker-{i + 1}" for i in range(options.num_workers + has_spare)]
            workers = await start_local(names, options.model, stack)
            chained = workers[: options.num_workers]
            stack.callback(chained[-1].kill)  # a stopped one cannot be asked to end
            network = Network()
            peers = [Peer(worker.name, [worker.address], network) for worker in workers]
            nodes = await stack.enter_async_context(Nodes(peers, options.cluster))
            if case.place == RESTARTED:
                nodes.keep(workers, network, _say_nothing)
            opening = cluster_over(
                *(nodes, peers[: len(chained)], options, self._checkpoint, self._spec, context),
                say=_say_nothing,
                thread=self._thread,
            )
            cluster = await stack.enter_async_context(opening)
            self.layers = cluster.chain.plan.layers
            yield _Victim(cluster, chained[-1])


async def _strike(engine: Engine, request: Request, worker: LocalWorker, case: Case) -> tuple[float, Answer]:
    """Answer the request, and signal the worker in the middle; return the moment and the answer."""
    answer = Answer()
    struck: float | None = None
    async with aclosing(engine.generate(request)) as pieces:
        async for piece in pieces:
            answer.add(piece)
            if struck is None and len(answer.tokens) >= _BEFORE:
                worker.send_signal(signal.SIGSTOP if case.loss == STOPPED else signal.SIGKILL)
                struck = time.monotonic()
    if struck is None:
        raise BrigadeError(f"expected an answer of {request.max_tokens} tokens, it ended after {len(answer.tokens)}")
    return struck, answer


def _say_nothing(line: str) -> None:
    """Take the place of `say`: the table has all losses."""


_COLUMNS = 110
_HEADS = (
    "tokens", "worker", "detect ms", "wanted", "start s", "load s", "reopen s", "replay s", "prompt s", "gap s",
    "wanted",
)  # fmt: skip
_LEGEND = (
    "tokens: known when the worker is lost; it is started again, or a spare one takes its place. detect: until the",
    "loss is noticed. reopen: from there to an open chain, process start and load included. replay: from there to",
    "the next token. prompt: as many tokens as a prompt, right before. gap: between two tokens, as the reader sees",
    "it; wanted: detect + start + load + 1.2 x prompt at most. ! is more than wanted. Medians over the trials.",
)


def print_failover(failover: FailoverReport) -> None:
    """Print a row per case, in 110 columns or as many as the terminal has."""
    console = Console(highlight=False, markup=False)
    console.width = min(_COLUMNS, console.width) if console.is_terminal else _COLUMNS
    table = fitting(_HEADS, list(map(_cells, failover.rows)), console.width, num_keys=2)
    legend = _LEGEND if console.width == _COLUMNS else [" ".join(_LEGEND)]
    console.print(f"{failover.model}, layers {failover.layers}, on {failover.machine}", "", table, "", sep="\n")
    console.print(*_equality(failover), *legend, sep="\n")


def _cells(row: FailoverRow) -> list[str]:
    times = row.times
    return [
        str(row.context),
        f"{row.loss}, {row.place}",
        _text(times.detect_s, row.wanted_detect_s, unit=1e-3),
        f"{row.wanted_detect_s * 1e3:.0f}",
        *(_text(seconds) for seconds in (times.start_s, times.load_s, times.reopen_s, times.replay_s, times.prefill_s)),
        _text(times.gap_s, row.wanted_gap_s),
        _text(row.wanted_gap_s),
    ]


def _text(seconds: float | None, wanted_s: float | None = None, unit: float = 1.0) -> str:
    """Return the figure, marked where it is more than wanted; nothing for None."""
    if seconds is None:
        return ""
    is_more = wanted_s is not None and seconds > wanted_s
    return f"{'!' if is_more else ''}{seconds / unit:.{0 if unit < 1 else 2}f}"


def _equality(failover: FailoverReport) -> list[str]:
    wrong = [row for row in failover.rows if not row.is_equal]
    if not wrong:
        return ["Every answer had the tokens of the unfailed run.", ""]
    cases = ", ".join(f"{row.context} tokens, {row.loss}, {row.place}" for row in wrong)
    return [f"OTHER TOKENS than in the unfailed run: {cases}", ""]
