"""Runner: many requests through one chain. Schedules, sends, receives, commits; hands each request its own text."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from coordinator.cluster.chain import Arrival, Chain
from coordinator.planning.costs import LaneChooser, chunk_size
from coordinator.sessions.answer import Answer
from coordinator.sessions.request import Request, room_for_answer
from coordinator.sessions.scheduler import Scheduler
from coordinator.sessions.session import Session
from coordinator.sessions.slots import cache_costs
from coordinator.sessions.text import TextStream, TokenIds
from coordinator.sessions.waterfall import Passage
from protos.brigade_pb2 import Sample
from worker.errors import ModelError, StageLost

_LEAVE_S = 2.0  # for what is on its way when a runner is left by an exception


class _Ticket:
    """One request under way: what it has so far, and pieces of text on their way to whoever waits for them."""

    def __init__(self, session: Session, request: Request, stream: TextStream | TokenIds) -> None:
        self.session = session
        self.answer = Answer(session.num_prompt, time.monotonic_ns())
        self._eos = request.eos
        self._stream = stream
        self._pieces: asyncio.Queue[str | BaseException | None] = asyncio.Queue()

    def take(self, samples: list[Sample], passage: Passage) -> None:
        """Take what a step made known; stops the session where a stop string ends."""
        self.answer.passages.append(passage)
        for sample in samples:
            self.answer.samples.append(sample)
            self.answer.token_times.append(passage.returned)
            if sample.token not in self._eos:  # the end-of-sequence token has no text
                self._pieces.put_nowait(self._stream.push(sample.token))
            if self._stream.is_stopped:
                self.session.stop()
                break  # the rest of the step lies behind the stop string
        if self.session.finish_reason is not None:
            self._end(self.session.finish_reason)

    def fail(self, error: BaseException) -> None:
        self._pieces.put_nowait(error)

    async def pieces(self) -> AsyncIterator[str]:
        """Pieces of text as they become final. Raises what the request failed with."""
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def _end(self, finish_reason: str) -> None:
        self.answer.finish_reason = finish_reason
        self.answer.num_reused = self.session.num_reused
        self.answer.num_steps, self.answer.num_rows = self.session.num_steps, self.session.num_rows
        self._pieces.put_nowait(self._stream.finish())
        self._pieces.put_nowait(None)


class Runner:
    """Answers requests, as many at once as the stages have memory for. Use as an async context manager."""

    def __init__(self, chain: Chain) -> None:
        lanes = LaneChooser(chain.num_stages, chain.costs.stages_s, chain.costs.hops_s)
        costs = cache_costs(chain.plan, chain.spec)
        self.scheduler = Scheduler(chain.num_stages, costs, chain.epoch, lanes=lanes.choose, last_step=chain.last_step)
        self._chain = chain
        self._tickets: dict[Session, _Ticket] = {}
        self._idle = asyncio.Event()
        self._failure: BaseException | None = None  # of the chain: nothing can be sent any more
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Runner":
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        assert self._task is not None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if kind is None else _LEAVE_S):
                    await self._drain()
        finally:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def answer(
        self,
        request: Request,
        *,
        stream: TextStream | TokenIds | None = None,
        emit: Callable[[str], None] = lambda text: None,
        chunk: int | None = None,
    ) -> Answer:
        """Run a checked request; cancelling it frees its slot on every stage within a step.

        Args:
            stream: turns tokens into text and watches for stop strings; without one the ids are the text.
            emit: takes each piece of text as it becomes final.
            chunk: rows per prompt chunk; None chooses by `chunk_size`.
        Raises:
            InputError: no node has memory for it. QueueFull: too many requests wait.
            BrigadeError: a stage failed, or the runner has been left; nothing more will come.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise StageLost("the runner that was to answer this request has ended")
        ticket = _Ticket(self._make_session(request, chunk), request, stream or TokenIds())
        self.scheduler.submit(ticket.session)
        self._tickets[ticket.session] = ticket
        try:
            self._send_all()
            async for piece in ticket.pieces():
                emit(piece)
        finally:
            if ticket.session in self._tickets:
                self._close(ticket, keep=False)
                self._send_all()
        return ticket.answer

    def _make_session(self, request: Request, chunk: int | None) -> Session:
        chunk = chunk or chunk_size(len(request.prompt), self._chain.costs.stages_s)
        longest = replace(self._chain.spec, cache=request.cache).longest_chunk
        return Session(
            request.prompt,
            room_for_answer(request, self._chain.spec.context),
            request.eos,
            request.decode.make_decoder(request.eos, self._chain.costs.steps),
            request.repeat_guard,
            chunk=min(chunk, longest) if longest else chunk,
            sampling=request.sampling,
            cache=request.cache,
        )

    async def _run(self) -> None:
        while True:
            self._take(await self._chain.receive())
            self._send_all()

    def _take(self, arrival: Arrival) -> None:
        passage = Passage(arrival.result.timings, arrival.at, arrival.num_rows)
        for session, samples in self.scheduler.commit(arrival.result):
            ticket = self._tickets[session]
            try:
                ticket.take(samples, passage)
            except ModelError as error:  # no text for this token: its own request's affair
                self._close(ticket, keep=False)
                ticket.fail(error)
            else:
                if session.finish_reason is not None:
                    self._close(ticket, keep=True)

    def _send_all(self) -> None:
        if self._failure is not None:
            return
        while (frame := self.scheduler.schedule()) is not None:
            self._chain.send(frame)
        self._idle.set() if self.scheduler.is_idle else self._idle.clear()

    def _close(self, ticket: _Ticket, *, keep: bool) -> None:
        del self._tickets[ticket.session]
        self.scheduler.close(ticket.session, keep=keep)

    async def _drain(self) -> None:
        """End what still runs, free every slot on every stage, and take in what is still on its way."""
        self._is_closing = True
        for ticket in list(self._tickets.values()):
            self._close(ticket, keep=False)
            ticket.fail(StageLost("the request was given up: its runner has ended"))
        self.scheduler.slots.forget_kept()
        self._send_all()
        while not self._idle.is_set() and self._failure is None:
            await self._idle.wait()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """The chain failed: so does every request."""
        if task.cancelled():
            return
        self._failure = task.exception() or StageLost("the runner ended by itself")
        self._idle.set()
        for ticket in self._tickets.values():
            ticket.fail(self._failure)


async def generate(
    chain: Chain,
    request: Request,
    *,
    stream: TextStream | TokenIds | None = None,
    emit: Callable[[str], None] = lambda text: None,
    chunk: int | None = None,
) -> Answer:
    """Run one checked request through an otherwise idle chain; as `Runner.answer`, with the stages' statuses."""
    async with Runner(chain) as runner:
        answer = await runner.answer(request, stream=stream, emit=emit, chunk=chunk)
        answer.statuses = await chain.statuses()  # while the caches are still there
    return answer
