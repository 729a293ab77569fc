"""Runner: requests under way. They outlive chains; on which one they run now is the epoch's affair."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from functools import cache, partial

from coordinator.cluster.chain import Chain
from coordinator.cluster.epoch import Epoch
from coordinator.cluster.feeding import chunk_of, session_of
from coordinator.cluster.flight import Arrival
from coordinator.cluster.ticket import Ticket
from coordinator.sessions.answer import Answer, Piece
from coordinator.sessions.request import Request
from coordinator.sessions.scheduler import Commit, Scheduler
from coordinator.sessions.session import Session
from coordinator.sessions.slots import MOST_WAITING
from coordinator.sessions.suspects import MOST_LOSSES, Suspects
from coordinator.sessions.text import Text, TokenIds
from coordinator.sessions.waterfall import Passage, Route
from worker.errors import BrigadeError, InputError, InternalError, NodeBusy, ReaderLost, StageLost, WaitedTooLong
from worker.node.status import error_named

_LEAVE_S = 2.0  # for what is on its way when a runner is left by an exception
_UNREAD_S = 30.0  # how long a session stays paused for a reader who does not read
_MAX_WAIT_S = 600.0  # for memory

NextChain = Callable[[BrigadeError], Awaitable[Chain]]
Emit = Callable[[str], None]
Keep = Callable[[Piece, Emit], Awaitable[None]]


async def keep_nothing(piece: Piece, emit: Emit) -> None:
    """Give the text to whoever reads it."""
    if piece.text:
        emit(piece.text)


class Runner:
    """Answers requests, as many at once as the stages have memory for. Use as an async context manager."""

    def __init__(
        self,
        chain: Chain,
        *,
        when_lost: NextChain | None = None,
        max_waiting: int = MOST_WAITING,
        max_wait_s: float = _MAX_WAIT_S,
    ) -> None:
        """`when_lost` opens the chain on which requests go on once one has failed; without it they fail, too.

        At most `max_waiting` requests wait for memory; one that has done so for `max_wait_s` is refused.
        """
        self.on_passage: Callable[[Route, Passage], None] | None = None  # takes every frame's way through a chain
        self._max_waiting = max_waiting
        self._epoch = self._epoch_of(chain)
        self._when_lost = when_lost
        self._max_wait_s = max_wait_s
        self._tickets: dict[Session, Ticket] = {}
        self._suspects: Suspects[Session] = Suspects()
        self._failure: BaseException | None = None  # nothing can be sent any more
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
            self._epoch.chain.on_draining = None
            await asyncio.wait([self._task])

    @property
    def chain(self) -> Chain:
        """The present epoch's."""
        return self._epoch.chain

    @property
    def failure(self) -> BaseException | None:
        """Why no request can be answered any more."""
        return self._failure

    async def wait_failed(self) -> None:
        """Raise what ends every request, once it has come to that."""
        assert self._task is not None
        await asyncio.shield(self._task)

    @property
    def scheduler(self) -> Scheduler:
        """The present epoch's."""
        return self._epoch.scheduler

    @property
    def tickets(self) -> Collection[Ticket]:
        """Of all requests that have not ended."""
        return self._tickets.values()

    async def stream(
        self, request: Request, *, text: Text | None = None, chunk: int | None = None, traced: bool = False
    ) -> AsyncGenerator[Piece, None]:
        """Run a checked request, piece by piece. Closing the iterator frees its slot on every stage within a step.

        Tokens become text here, in the reader's own task. A session pauses while 256 steps are unread, and is given
        up if that lasts for 30 s.

        Args:
            text: turns tokens into text and watches for stop strings; without one the ids are the text.
            chunk: rows per prompt chunk; None chooses by `chunk_size`.
            traced: keep the timing records of every frame, for a waterfall or a trace.
        Raises:
            InputError: no node has memory for it. QueueFull: too many requests wait. WaitedTooLong: it did.
            ReaderLost: it was not read. NodeBusy: a node is about to end, and the request had not begun.
            BrigadeError: a stage failed, or the runner has been left.
        """
        text = text or TokenIds()
        ticket = self._submit(request, chunk, traced=traced)
        try:
            while True:
                piece = ticket.say(await ticket.next_step(), text)
                self._resume_if_read(ticket)
                if piece.finish_reason is not None:
                    self._close(ticket, keep=True)
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self._close(ticket, keep=False)

    async def answer(
        self,
        request: Request,
        *,
        text: Text | None = None,
        emit: Emit = lambda piece: None,
        keep: Keep = keep_nothing,
        chunk: int | None = None,
        traced: bool = False,
    ) -> Answer:
        """All pieces of `stream` as one; `emit` takes each one's text, once `keep` has what it keeps of it."""
        answer = Answer()
        async with contextlib.aclosing(self.stream(request, text=text, chunk=chunk, traced=traced)) as pieces:
            async for piece in pieces:
                answer.add(piece)
                await keep(piece, emit)
        return answer

    def _submit(self, request: Request, chunk: int | None, *, traced: bool) -> Ticket:
        if self._failure is not None:
            raise self._failure.again() if isinstance(self._failure, BrigadeError) else self._failure
        if self._is_closing:
            raise StageLost("the runner that was to answer this request has ended")
        if draining := self._epoch.chain.draining:
            raise draining
        ticket = Ticket(session_of(request, chunk, self.chain), request, chunk, traced=traced)
        self._tickets[ticket.session] = ticket
        try:
            self._enter(ticket)
        except BrigadeError:
            del self._tickets[ticket.session]
            raise
        self._epoch.send_all()
        return ticket

    def _enter(self, ticket: Ticket) -> None:
        """Have the present epoch run the session; it waits for memory no longer than it may."""
        self._epoch.scheduler.submit(ticket.session)
        if ticket.session.slot is None and ticket.deadline is None:
            waited = WaitedTooLong(f"waited {self._max_wait_s:.0f} s for memory; try again later")
            self._give_up_after(self._max_wait_s, ticket, waited)

    async def _run(self) -> None:
        while True:
            try:
                await self._epoch.run(self._take)
            except BrigadeError as error:
                if self._when_lost is None or self._is_closing or isinstance(error, InternalError):
                    raise  # a bug would meet the requests on the next chain, too
                self._lose_chain(error)
                self._go_on(await self._when_lost(error))

    def _lose_chain(self, error: BrigadeError) -> None:
        """Count it for those that ran on it; one under which that happened too often ends here."""
        for session, ticket in list(self._tickets.items()):
            if session.slot is None:
                continue
            if not self._suspects.lost_under(session, session.num_generated):
                said = f"given up: the chain was lost {MOST_LOSSES + 1} times without a token of it in between"
                self._fail(ticket, type(error)(f"{said}; the last time: {error.message}", node=error.node))
                continue
            ticket.lose_chain()

    def _go_on(self, chain: Chain) -> None:
        """Begin the next epoch: every session is fed anew, from its own tokens."""
        self._epoch = self._epoch_of(chain)
        for session, ticket in list(self._tickets.items()):
            session.rewind()
            session.chunk = chunk_of(ticket.request, ticket.chunk, len(session.history), chain)
            if self._suspects.may_run(session):
                self._enter_again(ticket)
        self._epoch.send_all()

    def _enter_again(self, ticket: Ticket) -> None:
        try:
            self._enter(ticket)
        except InputError as error:
            self._fail(ticket, StageLost(f"the request does not fit on the nodes that are left: {error.message}"))
        except BrigadeError as error:
            self._fail(ticket, error)

    def _try_next(self, session: Session) -> None:
        """This one has got a token, or has ended: it is nobody's turn to wait for it any more."""
        suspect = self._suspects.next_tried(session)
        if suspect is not None and not self._epoch.has_ended:  # or it begins on the next one
            self._enter_again(self._tickets[suspect])

    def _epoch_of(self, chain: Chain) -> Epoch:
        chain.on_draining = self._drain_chain
        return Epoch(chain, self._max_waiting)

    def _drain_chain(self) -> None:
        """A node is about to end: those that run may finish, those that wait may not begin, nothing is kept."""
        draining = self._epoch.chain.draining
        assert draining is not None
        for ticket in [ticket for ticket in self._tickets.values() if ticket.session.slot is None]:
            ticket.fail(draining)
            self._forget(ticket, keep=False)
        self.scheduler.slots.forget_kept()
        self._epoch.send_all()

    def _take(self, arrival: Arrival, commits: list[Commit]) -> None:
        passage = cache(partial(Passage.of, arrival.result, arrival.at, arrival.num_rows))  # one for all, if any
        if self.on_passage is not None:
            self.on_passage(self._epoch.route, passage())
        failures = {failure.slot: failure for failure in arrival.result.failures}
        for session, samples in commits:
            ticket = self._tickets[session]
            if session.slot is not None and (failure := failures.get(session.slot)):
                self._fail(ticket, error_named(failure.kind, failure.message, failure.node))
                continue
            if not session.is_paused:
                ticket.end_deadline()  # it has a slot
            ticket.begin(arrival.result.timings)
            ticket.pass_by(self._epoch.route, passage)
            if samples:
                self._try_next(session)
            ticket.take(samples, arrival.at)
            if session.finish_reason is not None:
                self._forget(ticket, keep=True)
            elif ticket.is_full and not session.is_paused:
                session.is_paused = True
                self._give_up_after(_UNREAD_S, ticket, ReaderLost(f"nobody read the answer for {_UNREAD_S:.0f} s"))

    def _resume_if_read(self, ticket: Ticket) -> None:
        if ticket.session.is_paused and ticket.is_read_again:
            ticket.end_deadline()
            ticket.session.is_paused = False
            self._epoch.send_all()

    def _give_up_after(self, seconds: float, ticket: Ticket, error: BrigadeError) -> None:
        ticket.deadline = asyncio.get_running_loop().call_later(seconds, self._fail, ticket, error)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        if ticket.session in self._tickets:
            ticket.fail(error)
            self._close(ticket, keep=False)

    def _close(self, ticket: Ticket, *, keep: bool) -> None:
        """End a request wherever it is, if it has not ended; its slot goes with the next frame, or stays."""
        if ticket.session in self._tickets:
            self._forget(ticket, keep=keep)
            self._epoch.send_all()

    def _forget(self, ticket: Ticket, *, keep: bool) -> None:
        ticket.end_deadline()
        del self._tickets[ticket.session]
        self._epoch.close(ticket.session, keep=keep)
        self._try_next(ticket.session)

    async def _drain(self) -> None:
        """End what still runs, free every slot on every stage, and take in what is still on its way."""
        self._is_closing = True
        for ticket in list(self._tickets.values()):
            ticket.fail(NodeBusy("the answer was cut off: what answered it was shut down"))
            self._forget(ticket, keep=False)
        self.scheduler.slots.forget_kept()
        self._epoch.send_all()
        await self._epoch.wait_idle()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """The chain failed for good, or whoever opens the next one was cancelled: every request fails."""
        error = None if task.cancelled() else task.exception()
        self._failure = error or StageLost("the runner that was to answer this request has ended")
        for ticket in self._tickets.values():
            ticket.fail(self._failure)


async def generate(
    chain: Chain,
    request: Request,
    *,
    when_lost: NextChain | None = None,
    text: Text | None = None,
    emit: Emit = lambda piece: None,
    keep: Keep = keep_nothing,
    chunk: int | None = None,
    traced: bool = False,
) -> Answer:
    """Run one checked request through an otherwise idle chain; as `Runner.answer`, with the stages' statuses."""
    async with Runner(chain, when_lost=when_lost) as runner:
        answer = await runner.answer(request, text=text, emit=emit, keep=keep, chunk=chunk, traced=traced)
        answer.statuses = await runner.chain.statuses()  # while the caches are still there
    return answer
