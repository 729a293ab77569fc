"""EngineCore: the loop that runs sessions on one chain after another, as many at once as the stages have memory for.

The scheduler makes a frame, the chain takes the step, the scheduler commits its result. A chain, its scheduler and its
frames belong to one epoch; sessions outlive them. All of it runs on the MLX thread's loop, where the results arrive:
the main loop opens and closes sessions by calls that run between two steps, and reads their outputs from queues.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from coordinator.cluster.chain import Chain
from coordinator.cluster.step_timeouts import ArrivedResult
from coordinator.decoding.decoders import Decoder
from coordinator.decoding.suffix_automaton import EndedTexts
from coordinator.engine.caller import KEY_DIGEST
from coordinator.engine.quarantine import MOST_LOSSES, Quarantine
from coordinator.engine.stats import Stats
from coordinator.planning.costs import LaneChooser
from coordinator.sessions.admission import Slots
from coordinator.sessions.cache_costs import CacheCosts, cache_costs
from coordinator.sessions.output import Output
from coordinator.sessions.request import Request, room_for_answer
from coordinator.sessions.scheduler import Commit, Scheduler
from coordinator.sessions.session import MOST_UNREAD, Group, Session, SessionState
from coordinator.sessions.stored_prefixes import StoredPrefixes
from coordinator.sessions.waterfall import Passage, Route
from worker.errors import (
    BrigadeError,
    ChainReplaced,
    EngineHung,
    InputError,
    NodeBusy,
    NodeReturned,
    PoisonRequest,
    ReaderLost,
    StageLost,
    WaitedTooLong,
    again,
)
from worker.model.cache_spec import MOST_SNAPSHOT_BYTES
from worker.node.framing import most_chunk_rows, most_lane_rows
from worker.node.rpc_errors import error_named
from worker.platform.tasks import background, cancel_all

_LEAVE_S = 2.0  # for frames in flight when a core is left by an exception
_SPARE = 9  # a ninth of its budget is about what a node leaves to the system; scratch may take of that, too
_STORE_S = 10.0  # for prefixes that are not on disk yet when a core is left
_RETIRE_S = 5.0  # likewise when a chain is replaced: a node that is about to end waits for ten
_BRING_S = 10.0  # for prefixes from other nodes, while it is not known what computing them takes
_UNREAD_S = 30.0  # how long a session stays paused for a reader that does not read

NextChain = Callable[[BrigadeError], Coroutine[Any, Any, Chain]]
OutputQueue = asyncio.Queue[tuple[Session, Output | BaseException]]  # an exception is the last item of its session


class EngineCore:
    """Sessions, their scheduler and the present chain. Use as an async context manager."""

    def __init__(
        self,
        chain: Chain,
        *,
        when_lost: NextChain | None,
        stats: Stats | None,
        max_waiting: int,
        max_wait_s: float,
    ) -> None:
        """The arguments are those of `Engine`; `when_lost` runs on the main loop, and `stats` count all frames."""
        self.failure: BaseException | None = None  # why no more requests can be answered
        self.sessions: dict[Session, None] = {}  # those that have not ended, in the order of arrival
        self._when_lost = when_lost
        self._stats = stats
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._ended_texts = EndedTexts()  # to draft from
        self._deadlines: dict[Session, asyncio.TimerHandle] = {}  # of sessions that wait for memory or their readers
        self._quarantine: Quarantine[Session] = Quarantine()
        self._is_closing = False
        self._idle = asyncio.Event()  # nothing is in flight, or no results will come back
        self._thread = chain.thread
        self._outbox: deque[tuple[OutputQueue, Session, Output | BaseException]] = deque()  # for the main loop
        self._task: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[Chain] | None = None  # of the next chain, on the main loop
        self._begin_epoch(chain)

    # From the main loop

    async def __aenter__(self) -> "EngineCore":
        self._main = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._thread.call(self._run()))
        self._task.add_done_callback(self._ended)
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        assert self._task is not None
        try:
            with contextlib.suppress(TimeoutError, EngineHung):
                async with asyncio.timeout(None if kind is None else _LEAVE_S):
                    await self._thread.call(self._close_all())
        finally:
            self._task.cancel()
            await asyncio.wait([self._task])
            if self._opening is not None:  # before its owner closes what it opens
                await cancel_all(self._opening)

    async def wait_failed(self) -> None:
        """Wait until no more requests can be answered, and raise the reason."""
        assert self._task is not None
        await asyncio.shield(self._task)

    def session(
        self, request: Request, queue: OutputQueue, group: Group, chunk: int | None, *, traced: bool
    ) -> Session:
        """Return the session of a request, whose outputs go to the queue; `submit` starts it."""
        return Session(
            request,
            self._make_decoder(request, KEY_DIGEST.get()),
            chunk=chunk,
            put=partial(self._put, queue),
            started=time.monotonic_ns(),
            is_traced=traced,
            owner=KEY_DIGEST.get(),
            group=group,
        )

    def _make_decoder(self, request: Request, owner: str) -> Decoder:
        """Return a decoder that chooses by the costs of the present chain."""
        costs, most_drafts = self.chain.answer_costs, lambda: self.chain.most_drafts
        seed = request.sampling.seed
        ended = self._ended_texts.of(owner)
        return request.decode.make_decoder(request.eos, costs, ended, most_drafts, seed=seed)

    async def submit(self, session: Session) -> None:
        """Start a session.

        Raises:
            ContextExceeded: a node has no memory for the prompt. QueueFull: too many requests wait.
            NodeBusy: a node is about to end. BrigadeError: the engine has failed.
        """
        await self._thread.call(self._submit(session))

    def resume(self, session: Session) -> None:
        """Continue a session that was paused for its reader."""
        self._thread.post(partial(self._resume, session))

    def close(self, session: Session) -> None:
        """End a session in any state; what it has fed is kept as a prefix cache if it can be."""
        self._thread.post(partial(self._close, session))

    async def stored_names(self) -> set[bytes]:
        """Wait until nodes have stored what ended sessions left in the caches; return the names of its pieces."""
        return await self._thread.call(self._stored_names())

    async def _open_next(self, error: BrigadeError) -> Chain:
        """Return the chain on which sessions go on. Raises the reason if there is none, or the engine was left."""
        assert self._task is not None and self._when_lost is not None
        if self._task.done():
            raise StageLost("the engine has shut down")
        self._opening = asyncio.current_task()
        try:
            return await self._when_lost(error)
        finally:
            self._opening = None

    def _put(self, queue: OutputQueue, session: Session, item: Output | BaseException) -> None:
        """Put an item into a reader's queue, on either loop.

        From the MLX thread the items of a step go together, and two iterations later, when the stage has begun the next
        frame: the reader's thread would hold up what comes before that.
        """
        if (loop := asyncio.get_running_loop()) is self._main:
            queue.put_nowait((session, item))
            return
        self._outbox.append((queue, session, item))
        if len(self._outbox) == 1:
            loop.call_soon(loop.call_soon, self._main.call_soon_threadsafe, self._empty_outbox)

    def _empty_outbox(self) -> None:
        while self._outbox:
            queue, session, item = self._outbox.popleft()
            queue.put_nowait((session, item))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Fail every request, since the chain failed for good, or the engine has been left."""
        self._empty_outbox()  # a thread that hangs would keep the end of an answer
        error = None if task.cancelled() else task.exception()
        self.failure = error or StageLost("the engine has shut down")
        for session in list(self.sessions):
            session.put(again(self.failure))

    # From here on the MLX thread's loop

    async def _submit(self, session: Session) -> None:
        await self._bring(self.chain, [session], self.scheduler.slots.num_shared)
        if session.state is SessionState.FINISHED:
            return  # it was closed meanwhile: its reader has left
        self.sessions[session] = None  # first: `_ended`, on the main loop, sets the failure and then looks here
        try:
            if self.failure is not None:
                raise again(self.failure)
            if self._is_closing:
                raise StageLost("the engine has shut down")
            if draining := self.chain.draining:
                raise draining
            self._fit(session)
            self.enter(session)
        except BaseException:
            self.sessions.pop(session, None)
            raise
        self._send_all()

    def _fit(self, session: Session) -> None:
        """Choose which nodes compute the prompt, and cut the answer to what context and memory hold."""
        session.feeds_apart = self._pays_apart(session)
        session.max_tokens = room_for_answer(session.request, self.chain.spec.context)
        if session.feeds_apart and self.scheduler.slots.most_rows(session) < session.most_rows:
            session.feeds_apart = False  # it would need a snapshot's memory, too
        excess = session.most_rows - self.scheduler.slots.most_rows(session)
        session.max_tokens = max(1, session.max_tokens - excess)

    def _pays_apart(self, session: Session) -> bool:
        """Return whether all nodes are to compute the prompt of a session whose answer the first one makes alone."""
        prompt_end, spec = self.chain.plan.prompt_end, replace(self.chain.spec, cache=session.request.cache)
        if prompt_end is None or spec.largest_snapshot_bytes > MOST_SNAPSHOT_BYTES:
            return False
        num_alone, num_apart = (self._num_unfed(session, feeds_apart=apart) for apart in (False, True))
        return self.chain.costs.pays_apart(num_alone, num_apart, prompt_end / self.chain.spec.num_layers)

    def _num_unfed(self, session: Session, *, feeds_apart: bool) -> int:
        """Have a session feed its prompt in this way; return how many tokens no slot shares with it then."""
        session.feeds_apart = feeds_apart
        return len(session.history) - self.scheduler.slots.num_shared(session)

    def _chunk_rows(self, session: Session, num_unfed: int, beside_streams: bool) -> int:
        """Return the most rows of a prompt frame with this session; all ready prompts have `num_unfed` to feed."""
        chain = self.chain
        costs = chain.costs if session.feeds_apart else chain.answer_costs
        rows = session.chunk or costs.chunk_size(num_unfed, beside_streams=beside_streams)
        longest = replace(chain.spec, cache=session.request.cache).longest_chunk or rows
        rows = costs.carried_rows(min(rows, longest, most_chunk_rows(chain.spec.row_bytes)))
        before = len(session.history) - session.num_unfed
        stages = zip(costs.scratch, self.scheduler.slots.unreserved, chain.plan.assignments, strict=False)
        fitting = (
            scratch.most_rows(session.request.cache.kind, before, free + node.memory_bytes // _SPARE)
            for scratch, free, node in stages
        )
        return min(rows, *fitting)

    def enter(self, session: Session, *, is_replayed: bool = False) -> None:
        """Give the session to the present scheduler; one that has not begun has a deadline for its wait for memory."""
        self.scheduler.slots.add(session, is_replayed=is_replayed)
        if self._has_chain and not session.num_rows and session not in self._deadlines:
            self._await_memory(session)

    def _await_memory(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        self._deadlines[session] = loop.call_later(self._max_wait_s, self._give_up_waiting, session)

    def _give_up_waiting(self, session: Session) -> None:
        """Fail a session that waits, unless an answer of its call has begun; one with memory may lose it again."""
        if session.state is SessionState.WAITING and not session.group.has_begun:
            self.fail(session, WaitedTooLong(f"waited {self._max_wait_s:.0f} s for memory; try again later"))
        else:
            self._await_memory(session)

    def _give_up_unread(self, session: Session, num_taken: int) -> None:
        """Fail a paused session whose reader has taken nothing for so long; else look again later."""
        if session.is_paused and session.num_taken == num_taken:
            self.fail(session, ReaderLost(f"the answer was not read for {_UNREAD_S:.0f} s"))
        elif session.is_paused:
            self._await_reader(session)

    def _await_reader(self, session: Session) -> None:
        look = partial(self._give_up_unread, session, session.num_taken)
        self._deadlines[session] = asyncio.get_running_loop().call_later(_UNREAD_S, look)

    def _end_deadline(self, session: Session) -> None:
        """Cancel the session's deadline, if it has one."""
        if (deadline := self._deadlines.pop(session, None)) is not None:
            deadline.cancel()

    def _pause(self, session: Session) -> None:
        """Send nothing of a session until its reader has caught up; the reader's thread calls `resume` then."""
        session.is_paused = True
        if session.num_unread <= MOST_UNREAD // 2:  # it has caught up meanwhile, and saw no pause
            session.is_paused = False
        else:
            self._await_reader(session)

    def _resume(self, session: Session) -> None:
        if session.is_paused and session in self.sessions:
            self._end_deadline(session)
            session.is_paused = False
            self._send_all()

    def fail(self, session: Session, error: BaseException) -> None:
        """End a session with this error, unless it has ended."""
        if session in self.sessions:
            session.put(again(error))
            self._close(session)

    def _close(self, session: Session) -> None:
        if session in self.sessions:
            self._forget(session)
            self._send_all()
        elif session.state is not SessionState.FINISHED:
            session.finish()  # `_submit` of a reader that has left may still come

    def _forget(self, session: Session) -> None:
        """Remove a session; call `_send_all` afterwards. No slot is kept while a node drains."""
        self._end_deadline(session)
        if session in self.sessions and session.request.decode.reads_text:
            self._ended_texts.add(session.owner, session.generated)
        self.sessions.pop(session, None)
        begins_others = session.request.pool_from is None  # texts to embed rarely begin alike
        self.scheduler.close(session, keep=begins_others and self.chain.draining is None)
        self._release_next(session)

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run sessions on one chain after another. Raises the reason once there is none."""
        while True:
            try:
                await self._run_epoch()
            except BrigadeError as error:
                if self._when_lost is None or self._is_closing:
                    raise
                self._lose_chain(error)
                before = self.scheduler.slots
                opening = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._open_next(error), self._main))
                # `_run` may have been cancelled: asyncio would log an error that nothing retrieves
                opening.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
                chain = await asyncio.shield(opening)  # `__aexit__` cancels it
                await self._bring(chain, list(self.sessions), lambda session: 0)
                self._begin_epoch(chain)
                self._replay(before)

    async def _run_epoch(self) -> NoReturn:
        """Keep the chain busy. Raises BrigadeError once it has failed; the frames in flight are lost."""
        try:
            async with background(self._drain_chain(self.chain)), background(self._retire(self.chain)):
                while True:
                    arrival = await self.chain.receive()
                    commits = self.scheduler.commit(arrival.result)
                    passage = self._passage(arrival, commits)
                    self.put_outputs(arrival, commits)
                    self._send_all()
                    await asyncio.sleep(0)  # stage 0 begins the next frame before anything else
                    self.chain.learn(arrival)
                    if passage is not None and self._stats is not None:
                        self._stats.stages.take(self._route, passage)
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

    def put_outputs(self, arrival: ArrivedResult, commits: list[Commit]) -> None:
        """Give the readers their outputs, and remove the sessions that have ended."""
        failures = {failure.slot: failure for failure in arrival.result.failures}
        timings = arrival.result.timings
        for session, samples in commits:
            if session.slot is not None and (failure := failures.get(session.slot)):
                self.fail(session, error_named(failure.kind, failure.message, failure.node))
                continue
            if not session.is_paused:
                self._end_deadline(session)  # it has a slot
            if timings and not session.begun:
                session.begun = timings[0].received
            if samples:
                self._release_next(session)
            session.put_output(samples, arrival.at)
            if session.state is SessionState.FINISHED:
                self._forget(session)
            elif session.num_unread >= MOST_UNREAD and not session.is_paused:
                self._pause(session)

    def _passage(self, arrival: ArrivedResult, commits: list[Commit]) -> Passage | None:
        """Return the frame's timings; add them to the sessions that are traced, before a reader gets its output."""
        traced = [session for session, _ in commits if session.is_traced]
        if not traced and self._stats is None:
            return None
        passage = Passage.of(arrival.result, arrival.at, arrival.sent.num_rows)
        for session in traced:
            session.add_passage(self._route, passage)
        return passage

    # --- epochs -----------------------------------------------------------------------------------------------------

    def _begin_epoch(self, chain: Chain) -> None:
        self.chain = chain
        num_stages = 1 if chain.answers_alone else chain.num_stages  # that answers pass
        lanes = LaneChooser(num_stages, chain.answer_costs.stages_s, chain.answer_costs.hops_s)
        self.costs: CacheCosts = cache_costs(chain.plan, chain.spec)
        self._stored = None
        if (prefixes := chain.prefixes) is not None:
            self._stored = StoredPrefixes(
                prefixes.key, prefixes.whole, self.costs.rows_that_can_be_cut, chain.answer_costs.pays_to_read
            )
        self._route = Route(chain.plan.assignments, chain.clock_offsets)
        self.scheduler = Scheduler(
            *(chain.num_stages, self.costs, chain.epoch, self._max_waiting),
            lanes=lanes.choose,
            chunk_rows=self._chunk_rows,
            last_step=chain.last_step,
            most_lane_rows=most_lane_rows(chain.spec),
            answers_alone=chain.answers_alone,
            stored=self._stored,
        )
        self._idle.clear()
        self._has_chain = True

    def _lose_chain(self, error: BrigadeError) -> None:
        """Count the loss for the sessions that ran; fail those that have lost too many chains without progress.

        A chain that was replaced because a node is about to end or has returned does not count as lost.
        """
        leaving = {peer.name for peer in self.chain.peers if peer.is_draining}
        is_handover = isinstance(error, ChainReplaced) or error.node in leaving
        now = time.monotonic_ns()
        for session in self.sessions:
            if not session.is_paused:
                self._end_deadline(session)  # it waits for a chain now, and then anew for memory
        for session in [session for session in self.sessions if session.slot is not None]:
            if not is_handover and not self._quarantine.survives(session, session.num_generated):
                reason = f"given up: the chain was lost {MOST_LOSSES + 1} times without a token of it in between"
                kind = PoisonRequest if isinstance(error, StageLost) else type(error)
                self.fail(session, kind(f"{reason}; the last time: {error.message}", node=error.node))
            else:
                session.lose_chain(now, is_return=isinstance(error, NodeReturned))

    def _replay(self, before: Slots) -> None:
        """Feed every session again from its own tokens, those in quarantine one at a time.

        Where stage 0 made the answers alone, and does so still, they begin with the rows that it holds.
        """
        sessions = list(self.sessions)
        self.chain.keep_slots(self.scheduler.slots.adopt(before, self.chain.held_slots))
        for session in sessions:  # all before the first one enters, whose failure may let another one in
            session.rewind(self._make_decoder(session.request, session.owner))
            self._fit(session)
        for session in sessions:
            if self._quarantine.may_run(session):
                self._enter_again(session)
        self._send_all()

    def _enter_again(self, session: Session) -> None:
        if session not in self.sessions or session in self.scheduler.slots:
            return
        if session.num_generated > 0 and session.max_tokens <= session.num_generated:  # memory for no further token
            session.finish("length")
            session.put_output([], time.monotonic_ns())
            self._forget(session)
            return
        try:
            self.enter(session, is_replayed=True)
        except InputError as error:
            self.fail(session, StageLost(f"the request does not fit on the nodes that are left: {error.message}"))
        except BrigadeError as error:
            self.fail(session, error)

    def _release_next(self, session: Session) -> None:
        """Note that the session got a token or ended; if it was on trial, start the next one in quarantine."""
        following = self._quarantine.next_on_trial(session)
        if following is not None and self._has_chain:  # otherwise it starts on the next chain
            self._enter_again(following)

    async def _drain_chain(self, chain: Chain) -> None:
        """Refuse waiting sessions and keep no slots once a node is about to end; running sessions may finish."""
        await chain.begins_draining.wait()
        if (draining := chain.draining) is None:
            return  # requests can go on without that node by now
        for session in [session for session in self.sessions if session.state is SessionState.WAITING]:
            session.put(again(draining))
            self._forget(session)
        self.scheduler.slots.forget_kept()
        self._send_all()

    async def _retire(self, chain: Chain) -> None:
        """Have what sessions need to go on elsewhere written to disk once the chain is to be replaced; then end it."""
        await chain.retires.wait()
        self.scheduler.retire()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETIRE_S):
                self._send_all()
                await self._idle.wait()
        leaving = asyncio.run_coroutine_threadsafe(
            chain.leave(self.scheduler.slots.stored_names(of_running=True)), self._main
        )
        await asyncio.wrap_future(leaving)

    async def _bring(self, chain: Chain, sessions: Sequence[Session], num_there: Callable[[Session], int]) -> None:
        """Give nodes what they lack of the sessions' prefixes and others have, for at most as long as computing takes.

        Args:
            num_there: returns how many of a session's tokens need not be brought.
        """
        if self.failure is not None or chain.prefixes is None or not chain.prefixes.scattered:
            return
        prefixes = chain.prefixes
        scattered = dict(prefixes.scattered)
        pieces = [*prefixes.whole, *(piece for piece, _ in scattered.values())]
        known = StoredPrefixes(prefixes.key, pieces, cache_costs(chain.plan, chain.spec).rows_that_can_be_cut)
        wanted = {
            piece.name: piece
            for session in sessions
            for piece in known.pieces_to_read(session, num_there(session))
            if piece.name in scattered
        }
        if not wanted:
            return
        within_s = chain.costs.computed_s(sum(piece.end - piece.begin for piece in wanted.values()))
        bringing = prefixes.bring(list(wanted.values()), _BRING_S if within_s is None else within_s)
        brought = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(bringing, self._main))
        if self._stored and chain is self.chain:
            for piece in brought:
                self._stored.add(piece)

    async def _stored_names(self) -> set[bytes]:
        while not self._idle.is_set():
            await self._idle.wait()
        return self.scheduler.slots.stored_names()

    async def _close_all(self) -> None:
        """End all sessions, free every slot on every stage, and wait for the frames in flight."""
        self._is_closing = True
        for session in list(self.sessions):
            session.put(NodeBusy("the answer was cut off: the server was shut down"))
            self._forget(session)
        self._send_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STORE_S):
                await self._idle.wait()  # prefixes are written to disk
        self.scheduler.slots.forget_kept()
        self._send_all()
        while not self._idle.is_set():
            await self._idle.wait()
