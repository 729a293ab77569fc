"""`brigade bench --failover`: the last worker is lost in the middle of an answer, and what the reader sees of it."""

import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from dataclasses import dataclass, replace

from coordinator.cluster.local import LocalWorker
from coordinator.cluster.open import read_model, start_local, supervised
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.cluster.progress import say, show_steps
from coordinator.cluster.roster import Roster
from coordinator.cluster.runner import Runner
from coordinator.cluster.supervisor import Supervisor
from coordinator.measure.failover_results import (
    CASES,
    RESTARTED,
    SPARE,
    STOPPED,
    Case,
    Failover,
    Moments,
    Row,
    Times,
    middle,
    times_of,
)
from coordinator.planning.plan import check_split
from coordinator.planning.recovery import USUAL, Limits
from coordinator.sessions.answer import Answer
from coordinator.sessions.request import Request
from worker.errors import BrigadeError, InputError
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec
from worker.node.network import Network
from worker.process.machine import machine_name
from worker.process.mlx_thread import MlxThread

CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
_BEFORE, _AFTER = 8, 8  # tokens of the answer, before and after the loss
_MOST_WARMING = 512  # tokens of a prompt before, from which the chain learns what chunks cost
_AT_ONCE = Limits(rejoin_s=0.0, recovery_s=USUAL.recovery_s)  # whoever is there takes the layers


@dataclass(frozen=True)
class Losses:
    """What is measured: with so many tokens known when the worker is lost, each case so many times."""

    contexts: Sequence[int]
    num_trials: int


async def measure_failover(options: ClusterOptions, losses: Losses) -> Failover:
    """A row per case and context; contexts that are longer than the model's are left out, and said to be.

    Raises:
        InputError: the model has room for none of them. ConfigError: it cannot be split so, or does not fit.
        BrigadeError: a chain was not opened again.
    """
    checkpoint, spec = await read_model(options.model)
    check_split(spec, 1 + options.num_workers, None)
    contexts = _fitting(losses.contexts, spec)
    rows = []
    with closing(MlxThread()) as thread, show_steps(len(contexts) * len(CASES) * losses.num_trials) as begin:
        place = _Place(options, checkpoint, spec, thread)
        for context in contexts:
            for case in CASES:
                trials = []
                for number in range(losses.num_trials):
                    begin(f"{context} tokens, {case.loss}, {case.place}, trial {number + 1}")
                    trials.append(await place.lose(case, context, seed=number))
                is_equal = all(equal for _, equal in trials)
                rows.append(Row(case.loss, case.place, context, middle([times for times, _ in trials]), is_equal))
    return Failover(machine_name(), spec.name, place.layers, rows)


def _fitting(contexts: Sequence[int], spec: ModelSpec) -> list[int]:
    fitting = [context for context in contexts if _BEFORE < context <= spec.context - _AFTER]
    if not fitting:
        most, found = spec.context - _AFTER, ", ".join(map(str, contexts))
        raise InputError("num_prompt", f"expected {_BEFORE + 1} to {most} tokens for {spec.name}, got {found}")
    if left := [str(context) for context in contexts if context not in fitting]:
        say(f"{', '.join(left)} tokens left out: {spec.name} has room for {spec.context}")
    return fitting


@dataclass
class _Cluster:
    """A chain, its last worker, and the roster that it is from."""

    supervisor: Supervisor
    roster: Roster
    last: LocalWorker

    @property
    def start_s(self) -> float | None:
        """How long the process took to start that runs in the last worker's place; None if none was started."""
        keeper = self.roster.members[self.last.name].keeper
        return keeper.worker.started_s if keeper and keeper.worker else None


class _Place:
    """Where workers are lost: a new cluster for each of them, of processes of our own."""

    def __init__(self, options: ClusterOptions, checkpoint: Checkpoint, spec: ModelSpec, thread: MlxThread) -> None:
        self.layers: list[int] = []
        self._thread = thread
        self._options = options
        self._checkpoint = checkpoint
        self._spec = spec

    async def lose(self, case: Case, context: int, seed: int) -> tuple[Times, bool]:
        """Lose the last worker once so many tokens are known: the times, and whether the tokens were right."""
        request = self._request(context, f"{seed}")
        warming = self._request(min(context, _MOST_WARMING), f"{seed}, warming")
        async with self._open(case, context + _AFTER) as cluster:
            supervisor = cluster.supervisor
            async with Runner(supervisor.chain, when_lost=supervisor.reopen) as runner:
                await runner.answer(warming)
                unfailed = await runner.answer(request)
                struck, answer = await _strike(runner, request, cluster.last, case)
            reached = supervisor.timeline
            tokens = [at / 1e9 for at in answer.token_times]
            moments = Moments(struck, reached.lost_at, reached.found_at, reached.loaded_at, reached.opened_at, tokens)
            times = times_of(moments, cluster.start_s, unfailed.ttft_s)
        return times, answer.tokens == unfailed.tokens

    def _request(self, context: int, seed: str) -> Request:
        """One with so many known tokens when the worker is lost; no two prompts begin alike."""
        tokens = random.Random(f"{context} {seed}").choices(range(self._spec.vocab_size), k=context - _BEFORE)
        return Request(tuple(tokens), _BEFORE + _AFTER)

    @asynccontextmanager
    async def _open(self, case: Case, context: int) -> AsyncIterator[_Cluster]:
        has_spare = case.place == SPARE
        options = replace(self._options, limits=_AT_ONCE if has_spare else USUAL)
        async with AsyncExitStack() as stack:
            workers = await start_local(options.num_workers + has_spare, options.model, stack)
            chained = workers[: options.num_workers]
            stack.callback(chained[-1].kill)  # a stopped one cannot be asked to end
            network = Network()
            peers = [Peer(worker.name, [worker.address], network) for worker in workers]
            roster = await stack.enter_async_context(Roster(peers, options.cluster))
            if case.place == RESTARTED:
                roster.keep(workers, network, _say_nothing)
            opening = supervised(
                *(options, self._checkpoint, self._spec, context, roster, peers[: len(chained)]),
                say=_say_nothing,
                thread=self._thread,
            )
            supervisor = await stack.enter_async_context(opening)
            self.layers = supervisor.chain.plan.layers
            yield _Cluster(supervisor, roster, chained[-1])


async def _strike(runner: Runner, request: Request, worker: LocalWorker, case: Case) -> tuple[float, Answer]:
    """Answer the request, and hit the worker in the middle: when that was, and the answer."""
    answer = Answer()
    struck: float | None = None
    async with aclosing(runner.stream(request)) as pieces:
        async for piece in pieces:
            answer.add(piece)
            if struck is None and len(answer.tokens) >= _BEFORE:
                worker.send_signal(signal.SIGSTOP if case.loss == STOPPED else signal.SIGKILL)
                struck = time.monotonic()
    if struck is None:
        raise BrigadeError(f"expected an answer of {request.max_tokens} tokens, it ended after {len(answer.tokens)}")
    return struck, answer


def _say_nothing(line: str) -> None:
    """What is lost, and found again, is in the table."""
