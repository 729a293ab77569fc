"""EngineCore: the loop that runs sessions on one chain after another, as many at once as the stages have memory for.

Three verbs: the scheduler makes a frame, the chain takes the step, the scheduler commits its result. A chain, its
scheduler and its frames belong to one epoch; sessions outlive them.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NoReturn

from coordinator.cluster.chain import Chain
from coordinator.cluster.flight import ArrivedResult
from coordinator.engine.stats import Stats
from coordinator.planning.costs import LaneChooser, chunk_size
from coordinator.sessions.output import Output
from coordinator.sessions.quarantine import MOST_LOSSES, Suspects
from coordinator.sessions.request import Request, room_for_answer
from coordinator.sessions.scheduler import Commit, Scheduler
from coordinator.sessions.session import MOST_UNREAD, Session, SessionState
from coordinator.sessions.slots import MOST_WAITING, CacheCosts, cache_costs
from coordinator.sessions.waterfall import Passage, Route
from worker.errors import BrigadeError, ChainReplaced, InputError, NodeBusy, ReaderLost, StageLost, WaitedTooLong
from worker.node.framing import most_chunk_rows
from worker.node.rpc_errors import error_named
from worker.platform.tasks import background

MAX_WAIT_S = 600.0  # for memory, if nothing else is said
_LEAVE_S = 2.0  # for what is on its way when a core is left by an exception
_UNREAD_S = 30.0  # how long a session stays paused for a reader that does not read
_MOST_SCORED_ROWS = 64  # of a chunk: every row of it has logits for the whole vocabulary

NextChain = Callable[[BrigadeError], Awaitable[Chain]]
Outputs = asyncio.Queue[tuple[Session, Output | BaseException]]  # of all sessions of one call


class EngineCore:
    """Sessions, their scheduler and the present chain. Use as an async context manager."""

    def __init__(
        self,
        chain: Chain,
        *,
        when_lost: NextChain | None = None,
        stats: Stats | None = None,
        max_waiting: int = MOST_WAITING,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        """
        Args:
            when_lost: opens the chain on which requests go on once one has failed; without it they fail, too.
            stats: takes note of all frames.
            max_waiting: requests that wait for memory at most; one that has done so for `max_wait_s` is refused.
        """
        self.failure: BaseException | None = None  # why no request can be answered any more
        self.sessions: dict[Session, None] = {}  # that have not ended, in the order of arrival
        self._when_lost = when_lost
        self._stats = stats
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._deadlines: dict[Session, asyncio.TimerHandle] = {}  # while they wait for memory, or for their readers
        self._suspects: Suspects[Session] = Suspects()
        self._is_closing = False
        self._idle = asyncio.Event()  # nothing is in flight, or nothing will come back any more
        self._task: asyncio.Task[None] | None = None
        self._begin_epoch(chain)

    async def __aenter__(self) -> "EngineCore":
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        assert self._task is not None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if kind is None else _LEAVE_S):
                    await self._close_all()
        finally:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def wait_failed(self) -> None:
        """Return never; raise what made it impossible to answer once it is so."""
        assert self._task is not None
        await asyncio.shield(self._task)

    def submit(self, request: Request, queue: Outputs, chunk: int | None, *, traced: bool) -> Session:
        """Take a request in; its outputs go to the queue.

        Raises:
            InputError: no node has memory for the prompt. QueueFull: too many requests wait.
            NodeBusy: a node is about to end. BrigadeError: no chain can be opened any more.
        """
        if self.failure is not None:
            raise self.failure.again() if isinstance(self.failure, BrigadeError) else self.failure
        if self._is_closing:
            raise StageLost("the engine that was to answer this request has ended")
        if draining := self.chain.draining:
            raise draining
        decoder = request.decode.make_decoder(request.eos, self.chain.costs.steps)
        room = room_for_answer(request, self.chain.spec.context)
        rows = len(request.prompt) + room + decoder.num_ahead
        session = Session(
            request,
            decoder,
            max_tokens=max(1, room - rows + self.costs.most_rows(request.cache, rows)),  # what memory holds
            chunk=self._chunk_of(request, chunk, len(request.prompt)),
            asked_chunk=chunk,
            outputs=queue,
            started=time.monotonic_ns(),
            is_traced=traced,
        )
        self.sessions[session] = None
        try:
            self._enter(session)
        except BrigadeError:
            self.sessions.pop(session, None)
            raise
        self._send_all()
        return session

    def _chunk_of(self, request: Request, asked: int | None, num_tokens: int) -> int:
        """Rows per chunk where so many tokens are to be fed."""
        spec = self.chain.spec
        most = [most_chunk_rows(spec.row_bytes), replace(spec, cache=request.cache).longest_chunk]
        if request.score_from is not None:
            most.append(_MOST_SCORED_ROWS)
        return min(asked or chunk_size(num_tokens, self.chain.costs.stages_s), *filter(None, most))

    def _enter(self, session: Session) -> None:
        """Have the present epoch run the session; before it has begun it waits for memory no longer than it may."""
        self.scheduler.submit(session)
        if session.state is SessionState.WAITING and session not in self._deadlines:
            waited = WaitedTooLong(f"waited {self._max_wait_s:.0f} s for memory; try again later")
            self._give_up_after(self._max_wait_s, session, waited)

    def _give_up_after(self, seconds: float, session: Session, error: BrigadeError) -> None:
        self._deadlines[session] = asyncio.get_running_loop().call_later(seconds, self._give_up, session, error)

    def _give_up(self, session: Session, error: BrigadeError) -> None:
        if session.state is SessionState.WAITING or session.is_paused:
            self._fail(session, error)

    def _end_deadline(self, session: Session) -> None:
        """What was waited for has come."""
        if (deadline := self._deadlines.pop(session, None)) is not None:
            deadline.cancel()

    def resume_if_read(self, session: Session) -> None:
        """Have a paused session go on once its reader has read half of what it left."""
        if session.is_paused and session.num_unread <= MOST_UNREAD // 2 and session in self.sessions:
            self._end_deadline(session)
            session.is_paused = False
            self._send_all()

    def _fail(self, session: Session, error: BaseException) -> None:
        if session in self.sessions:
            session.put(error.again() if isinstance(error, BrigadeError) else error)
            self.close(session, keep=False)

    def close(self, session: Session, *, keep: bool) -> None:
        """End a session wherever it is, if it has not ended; its slot goes with the next frame, or stays."""
        if session in self.sessions:
            self._forget(session, keep=keep)
            self._send_all()

    def _forget(self, session: Session, *, keep: bool) -> None:
        """Take a session off; to be followed by `_send_all`. Nothing is kept while a node drains."""
        self._end_deadline(session)
        self.sessions.pop(session, None)
        self.scheduler.close(session, keep=keep and self.chain.draining is None)
        self._try_next(session)

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._run_epoch()
            except BrigadeError as error:
                if self._when_lost is None or self._is_closing:
                    raise
                self._lose_chain(error)
                self._begin_epoch(await self._when_lost(error))
                self._replay()

    async def _run_epoch(self) -> NoReturn:
        """Keep the chain at work. Raises BrigadeError once it has failed; what was in flight is lost."""
        try:
            async with background(self._drain_chain(self.chain)):
                while True:
                    arrival = await self.chain.receive()
                    commits = self.scheduler.commit(arrival.result)
                    self._take(arrival, commits)
                    self._send_all()
                    self._note(arrival, commits)
        finally:
            self._has_chain = False
            self._idle.set()

    def _send_all(self) -> None:
        """Send all frames that can be sent now."""
        if not self._has_chain:
            return
        with contextlib.suppress(BrigadeError):  # the chain has failed: `_run_epoch` raises it
            while (frame := self.scheduler.schedule()) is not None:
                self.chain.send(frame)
        if self.scheduler.is_idle:
            self._idle.set()
        else:
            self._idle.clear()

    def _take(self, arrival: ArrivedResult, commits: list[Commit]) -> None:
        """Hand on what became known, and close the sessions that have ended by it."""
        failures = {failure.slot: failure for failure in arrival.result.failures}
        timings = arrival.result.timings
        for session, samples in commits:
            if session.slot is not None and (failure := failures.get(session.slot)):
                self._fail(session, error_named(failure.kind, failure.message, failure.node))
                continue
            if not session.is_paused:
                self._end_deadline(session)  # it has a slot
            if timings and not session.begun:
                session.begun = timings[0].received
            if samples:
                self._try_next(session)
            session.put_output(samples, arrival.at)
            if session.state is SessionState.FINISHED:
                self._forget(session, keep=True)
            elif session.num_unread >= MOST_UNREAD and not session.is_paused:
                session.is_paused = True
                self._give_up_after(_UNREAD_S, session, ReaderLost(f"the answer was not read for {_UNREAD_S:.0f} s"))

    def _note(self, arrival: ArrivedResult, commits: list[Commit]) -> None:
        """Count the frame's way, once the next one has been sent; before any reader gets its turn."""
        traced = [session for session, _ in commits if session.is_traced]
        if traced or self._stats is not None:
            passage = Passage.of(arrival.result, arrival.at, arrival.num_rows)
            if self._stats is not None:
                self._stats.stages.take(self._route, passage)
            for session in traced:
                session.add_passage(self._route, passage)

    # --- epochs -----------------------------------------------------------------------------------------------------

    def _begin_epoch(self, chain: Chain) -> None:
        self.chain = chain
        lanes = LaneChooser(chain.num_stages, chain.costs.stages_s, chain.costs.hops_s)
        self.costs: CacheCosts = cache_costs(chain.plan, chain.spec)
        self._route = Route(chain.plan.assignments, chain.clock_offsets)
        self.scheduler = Scheduler(
            chain.num_stages, self.costs, chain.epoch, self._max_waiting, lanes=lanes.choose, last_step=chain.last_step
        )
        self._idle.clear()
        self._has_chain = True

    def _lose_chain(self, error: BrigadeError) -> None:
        """Count the loss for the sessions that ran; one under which that happened too often ends here.

        A chain that was handed over, since one of its nodes is about to end or has returned, was not lost.
        """
        leaving = {peer.name for peer in self.chain.peers if peer.is_draining}
        is_handover = isinstance(error, ChainReplaced) or error.node in leaving
        now = time.monotonic_ns()
        for session in [session for session in self.sessions if session.slot is not None]:
            if not is_handover and not self._suspects.lost_under(session, session.num_generated):
                said = f"given up: the chain was lost {MOST_LOSSES + 1} times without a token of it in between"
                self._fail(session, type(error)(f"{said}; the last time: {error.message}", node=error.node))
            else:
                session.lose_chain(now)

    def _replay(self) -> None:
        """Have every session fed anew from its own tokens; suspects one at a time."""
        sessions = list(self.sessions)
        for session in sessions:  # all before any enters: one that cannot may let another one in
            session.rewind()
            session.chunk = self._chunk_of(session.request, session.asked_chunk, len(session.history))
        for session in sessions:
            if self._suspects.may_run(session):
                self._enter_again(session)
        self._send_all()

    def _enter_again(self, session: Session) -> None:
        if session not in self.sessions or session in self.scheduler.slots:
            return
        try:
            self._enter(session)
        except InputError as error:
            self._fail(session, StageLost(f"the request does not fit on the nodes that are left: {error.message}"))
        except BrigadeError as error:
            self._fail(session, error)

    def _try_next(self, session: Session) -> None:
        """The session has got a token, or has ended: the next suspect may run if this one was tried."""
        suspect = self._suspects.next_tried(session)
        if suspect is not None and self._has_chain:  # or it begins on the next one
            self._enter_again(suspect)

    async def _drain_chain(self, chain: Chain) -> None:
        """Once a node shuts down let running sessions finish, refuse those that wait, and keep no prefix."""
        await chain.begins_draining.wait()
        if (draining := chain.draining) is None:
            return  # requests can go on without that node by now
        for session in [session for session in self.sessions if session.slot is None]:
            session.put(draining.again())
            self._forget(session, keep=False)
        self.scheduler.slots.forget_kept()
        self._send_all()

    async def _close_all(self) -> None:
        """End what still runs, free every slot on every stage, and take in what is still on its way."""
        self._is_closing = True
        for session in list(self.sessions):
            session.put(NodeBusy("the answer was cut off: what answered it was shut down"))
            self._forget(session, keep=False)
        self.scheduler.slots.forget_kept()
        self._send_all()
        while not self._idle.is_set():
            await self._idle.wait()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """The chain failed for good, or opening the next one was cancelled: every request fails."""
        error = None if task.cancelled() else task.exception()
        self.failure = error or StageLost("the engine that was to answer this request has ended")
        for session in self.sessions:
            session.put(self.failure.again() if isinstance(self.failure, BrigadeError) else self.failure)
