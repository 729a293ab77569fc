"""`brigade bench --failover`: measures the recovery from the loss of the last worker in the middle of an answer."""

import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from coordinator.cluster.cluster import Cluster
from coordinator.cluster.local import LocalWorker
from coordinator.cluster.nodes import Nodes
from coordinator.cluster.open import cluster_over, read_model, start_local
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.cluster.progress import say, show_steps
from coordinator.cluster.recovery_record import Recovery
from coordinator.engine.engine import Engine
from coordinator.planning.plan import check_split
from coordinator.planning.recovery import USUAL, Limits
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from worker.errors import BrigadeError, InputError
from worker.model.checkpoint import Checkpoint
from worker.model.model_spec import ModelSpec
from worker.node.network import Network
from worker.platform.machine import machine_name
from worker.platform.threads import MlxThread

KILLED, STOPPED = "killed", "stopped"  # by SIGKILL, by SIGSTOP
RESTARTED, SPARE = "restarted", "spare"  # the lost worker's replacement

_DETECT_S = {KILLED: 0.05, STOPPED: 2.5}  # wanted on loopback
_PREFILL = 1.2  # wanted: the replay takes at most so many times as long as the tokens took as a prompt


@dataclass(frozen=True)
class Case:
    """The loss of the last worker, and its replacement."""

    loss: str
    place: str


CASES = [Case(loss, place) for loss in (KILLED, STOPPED) for place in (RESTARTED, SPARE)]


@dataclass(frozen=True)
class LossTimes:
    """The parts of one loss, or medians of several. Seconds; None where there is nothing to measure."""

    detect_s: float
    reopen_s: float  # from then to an open chain: find_s + load_s + join_s
    find_s: float  # until there were enough nodes, start_s included
    start_s: float | None  # of another process
    load_s: float
    join_s: float
    replay_s: float | None  # from the open chain to the next token
    gap_s: float | None  # between two tokens
    prefill_s: float  # of as many tokens as a prompt, before the loss


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
    def wanted_gap_s(self) -> float:
        """The sum of detection, start of a process if there was one, load, and 1.2 times the prefill."""
        times = self.times
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


def times_of(
    struck: float, reached: Recovery, tokens: Sequence[float], start_s: float | None, prefill_s: float
) -> LossTimes:
    """Return the parts of one loss.

    Args:
        struck: when the worker was lost, seconds on one clock, as of all moments.
        reached: the moments of the recovery.
        tokens: when each token came.
    """
    return LossTimes(
        detect_s=reached.lost_at - struck,
        reopen_s=reached.opened_at - reached.lost_at,
        find_s=reached.found_at - reached.lost_at,
        start_s=start_s,
        load_s=reached.loaded_at - reached.found_at,
        join_s=reached.opened_at - reached.loaded_at,
        replay_s=next((at - reached.opened_at for at in tokens if at > reached.opened_at), None),
        gap_s=max((after - before for before, after in pairwise(tokens)), default=None),
        prefill_s=prefill_s,
    )


def middle(trials: Sequence[LossTimes]) -> LossTimes:
    """Return the median of each part, over the trials that have it."""
    columns = zip(*(astuple(each) for each in trials), strict=True)
    known = ([value for value in column if value is not None] for column in columns)
    medians: list[Any] = [median(column) if column else None for column in known]
    return LossTimes(*medians)


CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
_BEFORE, _AFTER = 8, 8  # tokens of the answer, before and after the loss
_MOST_WARMING = 512  # tokens of a prompt by which the chain measures the costs of chunks
_AT_ONCE = Limits(rejoin_s=0.0, recovery_s=USUAL.recovery_s)  # a spare worker takes the layers at once


async def measure_failover(options: ClusterOptions, contexts: Sequence[int], num_trials: int) -> FailoverReport:
    """Measure every case, with each number of tokens that are known at the loss; says which do not fit the model.

    Raises:
        InputError: the model has room for none of them. ConfigError: it cannot be split so, or does not fit.
        BrigadeError: a chain was not opened again.
    """
    checkpoint, spec = await read_model(options.model, options.draft_model)
    check_split(spec, 1 + options.num_workers, None)
    contexts = _fitting(contexts, spec)
    rows: list[FailoverRow] = []
    layers: list[int] = []
    with closing(MlxThread()) as thread, show_steps(len(contexts) * len(CASES) * num_trials) as begin:
        place = _Place(options, checkpoint, spec, thread)
        for context in contexts:
            for case in CASES:
                times, equal = [], []
                for number in range(num_trials):
                    begin(f"{context} tokens, {case.loss}, {case.place}, trial {number + 1}")
                    found, is_equal, layers = await place.lose(case, context, seed=number)
                    times.append(found)
                    equal.append(is_equal)
                rows.append(FailoverRow(case.loss, case.place, context, middle(times), all(equal)))
    return FailoverReport(machine_name(), spec.name, layers, rows)


def _fitting(contexts: Sequence[int], spec: ModelSpec) -> list[int]:
    fitting = [context for context in contexts if _BEFORE < context <= spec.context - _AFTER]
    if not fitting:
        most, found = spec.context - _AFTER, ", ".join(map(str, contexts))
        raise InputError("num_prompt", f"expected {_BEFORE + 1} to {most} tokens for {spec.name}, got {found}")
    if left := [str(context) for context in contexts if context not in fitting]:
        say(f"{', '.join(left)} tokens left out: {spec.name} has room for {spec.context}")
    return fitting


@dataclass(frozen=True)
class _Place:
    """Loses workers: opens a new cluster of local processes for each loss."""

    options: ClusterOptions
    checkpoint: Checkpoint
    spec: ModelSpec
    thread: MlxThread

    async def lose(self, case: Case, context: int, seed: int) -> tuple[LossTimes, bool, list[int]]:
        """Lose the last worker once `context` tokens are known.

        Returns:
            The times, whether the tokens were those of an unfailed run, and the layers per node.
        """
        request = self._request(context, f"{seed}")
        warming = self._request(min(context, _MOST_WARMING), f"{seed}, warming")
        async with self._open(case, context + _AFTER) as (cluster, last):
            layers = cluster.chain.plan.layers
            async with Engine(cluster.chain, when_lost=cluster.reopen) as engine:
                await engine.answer(warming)
                unfailed = await engine.answer(request)
                struck, answer = await strike(engine, request, last, case)
            local = cluster.nodes.workers[last.name].local
            start_s = local.started_s if local else None  # None: no process was started
            tokens = [at / 1e9 for at in answer.token_times]
            times = times_of(struck, cluster.recovery, tokens, start_s, unfailed.ttft_s)
        return times, answer.tokens == unfailed.tokens, layers

    def _request(self, context: int, seed: str) -> Request:
        """Return a request with `context` known tokens when the worker is lost; prompts have no common prefix."""
        tokens = random.Random(f"{context} {seed}").choices(range(self.spec.vocab_size), k=context - _BEFORE)
        return Request(tuple(tokens), _BEFORE + _AFTER)

    @asynccontextmanager
    async def _open(self, case: Case, context: int) -> AsyncIterator[tuple[Cluster, LocalWorker]]:
        """Open a cluster; yield it with its last worker."""
        has_spare, tell_nobody = case.place == SPARE, lambda line: None  # the table lists all losses
        options = replace(self.options, limits=_AT_ONCE if has_spare else USUAL, context=context)
        async with AsyncExitStack() as stack:
            names = [f"worker-{i + 1}" for i in range(options.num_workers + has_spare)]
            workers = await start_local(names, options.model, stack)
            chained = workers[: options.num_workers]
            stack.callback(chained[-1].kill)  # a stopped process does not end otherwise
            network = Network()
            peers = [Peer(worker.name, [worker.address], network) for worker in workers]
            nodes = await stack.enter_async_context(Nodes(peers, options.cluster))
            if case.place == RESTARTED:
                nodes.keep(workers, network, tell_nobody)
            opening = cluster_over(
                *(nodes, peers[: len(chained)], options, self.checkpoint), say=tell_nobody, thread=self.thread
            )
            yield await stack.enter_async_context(opening), chained[-1]


async def strike(engine: Engine, request: Request, worker: LocalWorker, case: Case) -> tuple[float, Answer]:
    """Answer the request and signal the worker in the middle; return the moment of the signal and the answer."""
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
