"""ResidentModel: a model that stays loaded over an open chain and answers whoever asks, as many at once as fit."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum

from coordinator.cluster.open import open_cluster
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.runner import Runner
from coordinator.cluster.supervisor import Supervisor
from coordinator.planning.contexts import Contexts
from coordinator.resident.ask import Ask
from coordinator.resident.channels import Delta
from coordinator.resident.frontend import Frontend, Task
from coordinator.resident.tally import Tally
from coordinator.sessions.request import most_rows, room_for_answer
from coordinator.sessions.slots import CacheCosts, cache_costs
from protos.brigade_pb2 import Cache, Sampling
from worker.errors import InputError, NodeBusy
from worker.process.use import Use


class State(Enum):
    """How the model stands to whoever asks."""

    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"  # it answers, with fewer nodes than it was to have
    RECOVERING = "recovering"  # a chain was lost, and the next one is not open yet
    DRAINING = "draining"  # it answers what it has begun, and nothing new
    FAILED = "failed"  # no chain could be opened
    ASLEEP = "asleep"  # it was let go for want of requests; the next one has it read again, and waits
    WAKING = "waking"  # it is read again, and whoever asks waits; clients are told that it is loading

    @property
    def word(self) -> str:
        """What clients are told."""
        return State.LOADING.value if self is State.WAKING else self.value


@dataclass(frozen=True)
class Standing:
    """A state, and why it is not READY."""

    state: State
    why: str = ""

    @property
    def takes_requests(self) -> bool:
        return self.state in (State.READY, State.DEGRADED, State.ASLEEP)


class ResidentModel:
    """What all doors share. Made by `open_resident`."""

    def __init__(self, frontend: Frontend, cluster: Supervisor, runner: Runner, tally: Tally | None = None) -> None:
        """`tally` takes note of what is answered."""
        self.frontend = frontend
        self.cluster = cluster
        self.runner = runner
        self.tally = tally or Tally()
        cluster.on_recovered = self.tally.recover
        runner.on_passage = self.tally.flow.take
        self.use = Use()  # by whoever asks; a look whether it answers is none
        self._is_draining = False
        self._num_answering = 0
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    @property
    def name(self) -> str:
        return self.frontend.checkpoint.name

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer that the model has room for, and the nodes have memory."""
        return self._costs.most_rows(Cache(), self.frontend.spec.context)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for memory."""
        return self.runner.scheduler.num_waiting

    @property
    def standing(self) -> Standing:
        if self.runner.failure is not None:
            return Standing(State.FAILED, str(self.runner.failure))
        if self._is_draining:
            return Standing(State.DRAINING, "shutting down")
        if self.cluster.trouble:
            return Standing(State.RECOVERING, self.cluster.trouble)
        if draining := self.runner.chain.draining:
            return Standing(State.DRAINING, str(draining))
        if missing := self.cluster.missing:
            return Standing(State.DEGRADED, f"without {' and '.join(missing)}")
        return Standing(State.READY)

    async def prepare(self, ask: Ask) -> Task:
        """Check what is asked, as `Frontend.prepare`. Raises NodeBusy once draining has begun."""
        with self.use.using():
            return await self._prepare(ask)

    async def _prepare(self, ask: Ask) -> Task:
        self._require_open()
        task = await self.frontend.prepare(ask)
        return self._within_memory(task) if ask.max_tokens is None else task

    async def look(self) -> None:
        """Let one token go through all stages, which no tally counts: no client has asked for it.

        Raises:
            What `prepare` and `stream` raise.
        """
        task = await self._prepare(Ask((0,), max_tokens=1, ignore_eos=True))
        if not self.tally.under_way:
            self.tally.flow.rest(time.monotonic_ns())  # the time without any request is no part of it
        async with contextlib.aclosing(self._stream(task, Tally())) as deltas:
            async for _ in deltas:
                pass

    async def stream(self, task: Task, *, traced: bool = False) -> AsyncGenerator[Delta, None]:
        """Answer, step by step. Closing the iterator frees what the answer took on every node.

        Raises:
            NodeBusy: it is draining. And what `Runner.stream` raises.
        """
        with self.use.using():
            async with contextlib.aclosing(self._stream(task, self.tally, traced=traced)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _stream(self, task: Task, tally: Tally, *, traced: bool = False) -> AsyncGenerator[Delta, None]:
        self._require_open()
        with self._answering():
            await self._compile(task.request.sampling)
            channels = task.channels()
            pieces = self.runner.stream(task.request, text=task.stream(), traced=traced)
            async with contextlib.aclosing(pieces):
                with tally.watch(task) as watched:
                    async for piece in pieces:
                        watched.take(piece)
                        yield channels.push(piece)

    async def expect_grammars(self) -> None:
        """Read the vocabulary as grammars need it, here and on the last stage.

        For a large one that takes seconds, in which a process does nothing else: streams would wait.
        """
        with contextlib.suppress(InputError):  # no grammar can be kept to
            await self._compile(Sampling(grammar=await self.frontend.any_grammar()))

    async def _compile(self, sampling: Sampling) -> None:
        """Beside the steps of others, which the grammar of a session that is opened would hold up."""
        if sampling.HasField("grammar"):
            # what goes wrong, the session is told as it is opened, or it is recovered
            await asyncio.gather(self.runner.chain.compile(sampling.grammar), return_exceptions=True)

    async def wait_failed(self) -> None:
        """Return never; raise what made it impossible to answer once it is so."""
        await self.runner.wait_failed()

    async def drain(self, within_s: float) -> bool:
        """Take nothing new; whether all that is under way has ended in time."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._all_answered.wait()
        return self._num_answering == 0

    @property
    def _costs(self) -> CacheCosts:
        return cache_costs(self.runner.chain.plan, self.frontend.spec)

    def _within_memory(self, task: Task) -> Task:
        """With fewer tokens where the nodes have no memory for as many as the model has room for."""
        request, context = task.request, self.frontend.spec.context
        rows = most_rows(request, context)
        if not (missing := rows - self._costs.most_rows(request.cache, rows)):
            return task
        most = max(1, room_for_answer(request, context) - missing)
        return replace(task, request=replace(request, max_tokens=most))

    def _require_open(self) -> None:
        if self._is_draining:
            raise NodeBusy("this server is shutting down and takes no new request")

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        self._num_answering += 1
        self._all_answered.clear()
        try:
            yield
        finally:
            self._num_answering -= 1
            if not self._num_answering:
                self._all_answered.set()


@asynccontextmanager
async def open_resident(
    frontend: Frontend,
    options: ClusterOptions,
    context: int | Contexts,
    *,
    max_waiting: int,
    max_wait_s: float,
    tally: Tally | None = None,
) -> AsyncIterator[ResidentModel]:
    """Load the model over the cluster and keep it.

    Args:
        context: tokens per request that the plan keeps memory for, or as many as fit.
        max_waiting: requests that may wait for memory; each of them for `max_wait_s`.
        tally: what goes on counting, from a model that was loaded before.
    Raises:
        BrigadeError: what the first node that cannot take part says.
    """
    async with open_cluster(options, frontend.checkpoint, frontend.spec, context) as cluster:
        runner = Runner(cluster.chain, when_lost=cluster.reopen, max_waiting=max_waiting, max_wait_s=max_wait_s)
        async with runner:
            yield ResidentModel(frontend, cluster, runner, tally)
