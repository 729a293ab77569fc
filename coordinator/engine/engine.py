"""Engine: answers the requests of every front end; its core runs them on the cluster."""

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from enum import Enum

from coordinator.cluster.chain import Chain
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.open import open_cluster
from coordinator.cluster.options import ClusterOptions
from coordinator.engine.core import EngineCore, NextChain, OutputQueue
from coordinator.engine.inputs import InputProcessor
from coordinator.engine.stats import RequestStats, Stats
from coordinator.sessions.admission import MOST_WAITING
from coordinator.sessions.output import Answer, Output
from coordinator.sessions.request import Request, RequestSpec
from coordinator.sessions.scheduler import Scheduler
from coordinator.sessions.session import MOST_UNREAD, Group, Session, SessionState
from coordinator.sessions.text import TextParser
from protos.brigade_pb2 import Cache, Sampling
from worker.errors import InputError, NodeBusy
from worker.platform.tasks import Use

MAX_WAIT_S = 600.0  # default limit of the wait for memory


class ServerState(Enum):
    """The state of a model, as clients see it."""

    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"  # it answers, with fewer nodes than planned
    RECOVERING = "recovering"  # a chain was lost, and the next one is not open yet
    DRAINING = "draining"  # it finishes what it has begun and accepts nothing new
    ASLEEP = "asleep"  # it was unloaded for lack of requests; the next one loads it again
    WAKING = "waking"  # it is loaded again while requests wait; clients see "loading"

    @property
    def word(self) -> str:
        """The word for this state in answers to clients."""
        return ServerState.LOADING.value if self is ServerState.WAKING else self.value


@dataclass(frozen=True)
class ServerStatus:
    """A state, and why it is not READY."""

    state: ServerState
    why: str = ""
    failures: str = ""  # of nodes that are left out; they may name files, so they are for those with a key


_READY = ServerStatus(ServerState.READY)


@dataclass(frozen=True)
class _Reading:
    """A session whose outputs are being read."""

    number: int  # of its request among those of the call
    parser: TextParser
    stats: RequestStats | None  # None if it is not counted


class Engine:
    """Answers requests on one chain after another. Use as an async context manager."""

    def __init__(
        self,
        chain: Chain,
        *,
        inputs: InputProcessor | None = None,
        cluster: Cluster | None = None,
        stats: Stats | None = None,
        when_lost: NextChain | None = None,
        max_waiting: int = MOST_WAITING,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        """
        Args:
            inputs: makes requests and text; without it prompts are token ids, and so is text.
            cluster: what `chain` was opened by, for its state.
            stats: counts all requests and frames.
            when_lost: opens the chain on which requests continue after a failure; None: they fail, too.
            max_waiting: most requests that wait for memory.
            max_wait_s: how long one may wait for it before any request of its call has begun.
        """
        stats = stats or (Stats() if inputs is not None else None)
        self.core = EngineCore(chain, when_lost=when_lost, stats=stats, max_waiting=max_waiting, max_wait_s=max_wait_s)
        self.stats = stats or Stats()
        self.use = Use()  # by clients, not by health checks
        self._inputs = inputs
        self._cluster = cluster
        self._is_draining = False
        self._readers = Use()  # clients and health checks

    async def __aenter__(self) -> "Engine":
        await self.core.__aenter__()
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        await self.core.__aexit__(kind, *exc)
        self.stats.stages.end_chain()

    @property
    def inputs(self) -> InputProcessor:
        assert self._inputs is not None, "this engine takes token ids only"
        return self._inputs

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None, "this engine was given a chain only"
        return self._cluster

    @property
    def name(self) -> str:
        """The model's name, as the user gave it."""
        return self.inputs.checkpoint.name

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer that fit the model's context and the nodes' memory."""
        return self.core.costs.most_rows(Cache(), self.chain.spec.context)

    @property
    def chain(self) -> Chain:
        """The present chain."""
        return self.core.chain

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the present chain."""
        return self.core.scheduler

    @property
    def sessions(self) -> Collection[Session]:
        """The sessions that have not ended: a copy of what the MLX thread changes."""
        return list(self.core.sessions)

    @property
    def failure(self) -> BaseException | None:
        """Why no more requests can be answered."""
        return self.core.failure

    @property
    def num_waiting(self) -> int:
        """Requests that wait for memory."""
        return self.scheduler.slots.num_waiting

    def has_begun(self, requests: Collection[Request]) -> bool:
        """Return whether one of these requests has had memory: none of them is refused any more for lack of it."""
        begun = [session for session in self.sessions if session.state is not SessionState.WAITING]
        return any(session.request is request for session in begun for request in requests)

    @property
    def status(self) -> ServerStatus:
        if self.failure is not None:
            return ServerStatus(ServerState.RECOVERING, str(self.failure))  # another engine takes the place of this one
        if self._is_draining:
            return ServerStatus(ServerState.DRAINING, "shutting down")
        if trouble := self.cluster.trouble:
            is_brief = self.cluster.recovery.is_brief
            return ServerStatus(ServerState.DEGRADED if is_brief else ServerState.RECOVERING, trouble)
        if draining := self.chain.draining:
            return ServerStatus(ServerState.DRAINING, str(draining))
        if missing := self.cluster.missing:
            waiting = f"; {self.cluster.waiting}" if self.cluster.waiting else ""
            why = f"without {' and '.join(missing)}{waiting}"
            return ServerStatus(ServerState.DEGRADED, why, self.cluster.why_missing)
        return _READY

    async def prepare(self, spec: RequestSpec) -> Request:
        """Return the checked request. Raises what `InputProcessor.make_request` raises, and NodeBusy while draining."""
        self._require_open()
        with self.use.using(), self.stats.preparing():
            return await self.inputs.make_request(spec)

    async def generate(
        self, request: Request, *, parser: TextParser | None = None, chunk: int | None = None, traced: bool = False
    ) -> AsyncGenerator[Output, None]:
        """Answer a checked request, step by step. Closing the iterator frees its slot on every stage within a step.

        Tokens become text here, in the reader's own task. A session pauses while 256 outputs are unread, and is given
        up if that lasts for 30 s. `max_tokens` is cut to what the nodes have memory for.

        Args:
            parser: turns tokens into text and watches for stop strings, in the place of the request's own.
            chunk: rows per prompt chunk; None chooses by `chunk_size`.
            traced: keep the timing records of every frame, for a waterfall or a trace.
        Raises:
            InputError: no node has memory for the prompt. QueueFull: too many requests wait. WaitedTooLong: it did.
            ReaderLost: it was not read. NodeBusy: a node is about to end, and the request had not begun.
            BrigadeError: a stage failed, or the engine has been left.
        """
        async with aclosing(self._generate([request], parser, chunk, traced=traced, counted=True)) as outputs:
            async for _, output in outputs:
                yield output

    async def generate_all(
        self, requests: Sequence[Request], *, traced: bool = False, at_once: int = sys.maxsize
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """Every answer's outputs as they come, with the request's number.

        Of requests that share a prompt the first one feeds it; the others begin once it has.

        Args:
            at_once: the most requests that are answered, or wait for memory, at the same time.
        Raises:
            What the first answer that fails raises; the others end with it, as they do when the iterator is closed.
        """
        answers = self._generate(requests, None, None, traced=traced, counted=True, at_once=at_once)
        async with aclosing(answers) as outputs:
            async for number, output in outputs:
                yield number, output

    async def answer(
        self, request: Request, *, parser: TextParser | None = None, chunk: int | None = None, traced: bool = False
    ) -> Answer:
        """Return all outputs of `generate` as one answer."""
        answer = Answer()
        async with aclosing(self.generate(request, parser=parser, chunk=chunk, traced=traced)) as outputs:
            async for output in outputs:
                answer.add(output)
        return answer

    async def probe(self) -> None:
        """Send one token through all stages as a health check. Statistics do not count it.

        Raises:
            What `prepare` and `generate` raise.
        """
        self._require_open()
        request = await self.inputs.make_request(RequestSpec((0,), max_tokens=1, ignore_eos=True))
        if not self.stats.under_way:
            self.stats.stages.rest(time.monotonic_ns())  # leave out the time without requests
        async with aclosing(self._generate([request], None, None, traced=False, counted=False)) as outputs:
            async for _ in outputs:
                pass

    async def expect_grammars(self) -> None:
        """Load the vocabulary for grammars in the process that checks them and on the last stage.

        A large one takes seconds, for which the first request with a grammar would hold up other streams.
        """
        with contextlib.suppress(InputError):  # this model supports no grammars
            await self._compile(Sampling(grammar=await self.inputs.any_grammar()))

    async def wait_failed(self) -> None:
        """Do as `EngineCore.wait_failed`."""
        await self.core.wait_failed()

    async def drain(self, within_s: float) -> bool:
        """Accept no new requests; return whether all running ones have ended in time."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._readers.wait_unused(0)
        return not self._readers.is_used

    # --- a reader's side --------------------------------------------------------------------------------------------

    async def _generate(
        self,
        requests: Sequence[Request],
        parser: TextParser | None,
        chunk: int | None,
        *,
        traced: bool,
        counted: bool,
        at_once: int = sys.maxsize,
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """Yield the outputs of all sessions of one call, which share one queue."""
        self._require_open()
        queue, group = OutputQueue(), Group()
        readings: dict[Session, _Reading] = {}
        later = _by_prompt(requests)
        ready = deque(later)
        present = -1  # the number of the request whose session is begun or read

        async def submit_ready() -> None:
            nonlocal present
            while ready and len(readings) < at_once:
                present = number = ready.popleft()
                request = requests[number]
                session = self.core.session(request, queue, group, chunk, traced=traced)
                readings[session] = _Reading(  # before it starts: an abort closes it
                    number, parser or self.parser(request), self.stats.begin(request) if counted else None
                )
                await self.core.submit(session)

        with self._readers.using(), self.use.using() if counted else contextlib.nullcontext():
            try:
                for grammar in {request.sampling.grammar.text: request.sampling for request in requests}.values():
                    await self._compile(grammar)
                await submit_ready()
                while readings or ready:
                    session, output = await queue.get()
                    if (reading := readings.get(session)) is None:
                        continue  # a stop string has ended it, and steps were under way
                    present = reading.number
                    if isinstance(output, BaseException):
                        raise output
                    session.read(output, reading.parser)
                    if session.is_paused and session.num_unread <= MOST_UNREAD // 2:
                        self.core.resume(session)
                    if reading.stats:
                        reading.stats.take(output)
                    if output.finish_reason is not None:
                        del readings[session]
                        self.core.close(session)
                        if reading.stats:
                            reading.stats.end()
                    ready.extendleft(reversed(later.pop(reading.number, ())))  # while their prompt's slot is kept
                    await submit_ready()
                    yield reading.number, output
            finally:
                for session, unfinished in readings.items():
                    self.core.close(session)
                    if unfinished.stats:  # an answer that ends with another's error is aborted
                        error = sys.exc_info()[1] if unfinished.number == present else None
                        unfinished.stats.end(error, session.usage())

    def parser(self, request: Request) -> TextParser:
        """Return what makes text of the request's tokens."""
        if self._inputs is not None:
            return self._inputs.parser(request)
        parser = TextParser()
        parser.recall(request.known, request.eos)
        return parser

    async def _compile(self, sampling: Sampling) -> None:
        """Compile the grammar ahead of time: opening a session with a new one would delay other sessions' steps."""
        if sampling.HasField("grammar"):
            # failures show again when the session is opened
            await asyncio.gather(self.chain.compile(sampling.grammar), return_exceptions=True)

    def _require_open(self) -> None:
        if self._is_draining:
            raise NodeBusy("this server is shutting down and takes no new request")


async def collect(engine: Engine, requests: Sequence[Request], *, at_once: int = sys.maxsize) -> list[list[Output]]:
    """Return all outputs of each answer; the arguments are those of `Engine.generate_all`."""
    answers: list[list[Output]] = [[] for _ in requests]
    async with aclosing(engine.generate_all(requests, at_once=at_once)) as outputs:
        async for number, output in outputs:
            answers[number].append(output)
    return answers


def _by_prompt(requests: Sequence[Request]) -> dict[int, list[int]]:
    """Group requests by prompt: the number of the first one, and those of the others."""
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        numbers.setdefault(request.prompt, []).append(number)
    return {first: others for first, *others in numbers.values()}


async def generate_once(
    chain: Chain, request: Request, *, parser: TextParser | None = None, chunk: int | None = None, traced: bool = False
) -> Answer:
    """Run one checked request through an otherwise idle chain; as `Engine.answer`, with the stages' statuses."""
    async with Engine(chain) as engine:
        answer = await engine.answer(request, parser=parser, chunk=chunk, traced=traced)
        answer.statuses = await engine.chain.statuses()  # while the caches are still there
    return answer


@asynccontextmanager
async def open_engine(
    inputs: InputProcessor,
    options: ClusterOptions,
    *,
    max_waiting: int,
    max_wait_s: float = MAX_WAIT_S,
    stats: Stats | None = None,
) -> AsyncIterator[Engine]:
    """Load the model over the cluster and keep it; see `open_cluster` and `Engine` for the arguments and errors."""
    stats = stats or Stats()
    async with (
        open_cluster(options, inputs.checkpoint, on_recovered=stats.recover) as cluster,
        Engine(
            cluster.chain,
            inputs=inputs,
            cluster=cluster,
            stats=stats,
            when_lost=cluster.reopen,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
        ) as engine,
    ):
        yield engine
