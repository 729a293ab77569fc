"""Cluster: keeps one chain open over the nodes that are there. planning/recovery.py decides each next action."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Self

from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment, OwnCopy, OwnNode, load_worker
from coordinator.cluster.nodes import ClusterNode, Nodes
from coordinator.cluster.peer import Peer
from coordinator.cluster.progress import NodeProgress
from coordinator.cluster.recovery_record import Recovered, Recovery
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import Assignment, Objective, Plan
from coordinator.planning.planner import Planner
from coordinator.planning.prediction import Prediction
from coordinator.planning.recovery import (
    USUAL,
    Action,
    Ask,
    ChainEvent,
    ChainState,
    LeaveOut,
    Limits,
    Load,
    Measure,
    NodeEvent,
    NodeState,
    Open,
    Situation,
    TakeOver,
    Wait,
    decide,
)
from coordinator.planning.speeds import NO_SPEEDS, Survey
from worker.errors import (
    BrigadeError,
    ChainReplaced,
    ConfigError,
    EngineHung,
    InputError,
    InternalError,
    ModelError,
    NodeBusy,
    NodeReturned,
    NodeSilent,
    OutOfMemory,
    SamplingError,
    StageLost,
    error_text,
    without_trace,
)
from worker.platform.machine import is_overloaded
from worker.platform.threads import run_in_thread

ASK_S, _LONGEST_ASK_S = 0.3, 1.0
_LEAST_TRY_S = 5.0  # in which opening the next chain may stand still; half of the time that is left, if that is longer
_UNUSED_S = 1.0  # without a frame in flight: no request waits for the first token of the chain any more
_PROVING_S = 0.5  # between two looks at that
_TEND_AGAIN_S = 10.0  # from an unexpected error to the next try to look after the open chain
_REPEATED_S = 600.0  # a second unknown error of an engine within this time rules the node out for a while
_LASTING = (ModelError, ConfigError, InputError, SamplingError)  # errors that would occur again
_REFUSALS = (*_LASTING, NodeBusy, OutOfMemory, InternalError)  # errors that would occur again on the first chain

Measuring = Callable[[Sequence[Peer], Survey], Awaitable[Survey]]  # adds the speeds of these workers to a survey


class Cluster:
    """Opens the first chain, and the next one after a loss or when a better one is possible. Async context manager."""

    def __init__(
        self,
        own: OwnNode,
        nodes: Nodes,
        deployment: Deployment,
        limits: Limits = USUAL,
        *,
        say: Callable[[str], None] = lambda line: None,
        on_recovered: Callable[[Recovered], None] = lambda recovered: None,
        speeds: Survey = NO_SPEEDS,
        measure: Measuring | None = None,
        objective: Objective | None = None,
        missing: Collection[str] = (),
    ) -> None:
        """
        Args:
            deployment: the first one.
            say: takes lines for the user.
            on_recovered: takes a report when a recovery has ended.
            speeds: of the nodes, for later plans.
            measure: adds the speeds of workers that were `missing`; None if plans are not made by speed.
            objective: of later plans, which may have less context than the first one, down to the objective's. Its
                layers are those that the user gave, for plans over all configured nodes.
            missing: workers that did not answer: the deployment leaves them out, and they join later.
        """
        self.chain: Chain
        self.nodes = nodes
        self.num_recoveries = 0
        self.waiting = ""  # why a node that is there does not take part yet
        self._own = own
        self._limits = limits
        self._say = say
        self._on_recovered = on_recovered
        self._measure = measure
        self._deployment = deployment  # of the present chain, or of the one being opened
        whole = deployment.plan
        objective = replace(objective or Objective(whole.context), max_context=whole.context)
        self._planner = Planner(deployment.spec, speeds, objective, whole)
        self._state = ChainState.STARTING
        self._recovery: Recovery | None = None  # the latest
        self._planned: Plan | None = None  # that the chain was ended for
        self._better: Plan | None = None  # over the same nodes: waits for an idle moment
        self._epoch = 0
        self._open = AsyncExitStack()  # the present chain
        self._tending: asyncio.Task[None] | None = None
        self._copies: set[asyncio.Task[OwnCopy]] = set()  # being described; each for the loads that began with it
        for worker in nodes.workers.values():
            worker.is_spare = worker.name not in whole.names and worker.name not in missing
            worker.is_measured = measure is None or worker.name not in missing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self._stop_tending()
            loads = [*(record.load for record in self.nodes.records if record.load), *self._copies]
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
        finally:
            await self._open.aclose()

    async def open(self, progress: NodeProgress = lambda node, report: None) -> Chain:
        """Load and open the first chain, again if a node is lost meanwhile.

        Raises:
            BrigadeError: as `reopen`; the refusal of a node that cannot hold its layers is final.
        """
        self._recovery = recovery = Recovery(self._deployment.plan, target=self._deployment.plan)
        await self.nodes.ask(self.nodes.workers, _LONGEST_ASK_S)
        for worker in self._members(recovery.plan):
            if not worker.answers and recovery.error is None:
                lost = worker.trouble or StageLost("does not answer any more", node=worker.name)
                await self._begin_or_raise(lost, recovery)
        return await self._open_next(recovery, progress)

    async def reopen(self, error: BrigadeError) -> Chain:
        """Return the chain on which requests go on after this error.

        Raises:
            StageLost: none could be opened in time.
            BrigadeError: the error would occur on every chain.
        """
        if (isinstance(error, _LASTING) and not error.node) or not self._limits.recovery_s:
            raise error
        await self._stop_tending()
        recovery = await self._lose(error)
        return await self._open_next(recovery, lambda node, report: None)

    @property
    def whole(self) -> Plan:
        """The plan over every configured node that has answered."""
        return self._planner.whole

    @property
    def missing(self) -> list[str]:
        """The expected nodes that the present chain lacks."""
        members = self.chain.plan.names
        return [each.name for each in self.nodes.records if not each.is_spare and each.name not in members]

    @property
    def why_missing(self) -> str:
        """Why they do not take part, as far as it is known."""
        workers = [self.nodes.workers[name] for name in self.missing]
        return "; ".join(str(error) for worker in workers if (error := worker.failure or worker.refusal))

    @property
    def outside(self) -> list[Assignment]:
        """The shards of the missing nodes by the whole plan; no layers for a node that it does not know yet."""
        planned = {assignment.name: assignment for assignment in self.whole.assignments}
        return [planned.get(name, Assignment(name)) for name in self.missing]

    @property
    def trouble(self) -> str:
        """Why there is no chain now; empty while there is one, or before the first."""
        error = None if self._recovery is None or self._state.is_open else self._recovery.error
        return "" if error is None else str(error)

    @property
    def recovery(self) -> Recovery:
        """The latest recovery, for its moments; the first one is the way to the first chain."""
        assert self._recovery is not None
        return self._recovery

    # --- without a chain --------------------------------------------------------------------------------------------

    async def _open_next(self, recovery: Recovery, progress: NodeProgress) -> Chain:
        """Act on one decision after another until there is a chain. Raises StageLost once the time is over."""
        while True:
            await self._note_loads(recovery)
            action = await self._decide(
                lambda: Situation(
                    now=time.monotonic(),
                    plan=recovery.plan,
                    lost_at=recovery.lost_at,
                    target=recovery.target,
                    spent_s=recovery.spent_s if recovery.error else -math.inf,
                    num_asks=recovery.num_asks,
                )
            )
            began, is_loading = time.monotonic(), any(each.load for each in self.nodes.records)
            match action:
                case Open():
                    try:
                        chain = await self.open_chain(action.plan, recovery, progress)
                    except BrigadeError as error:
                        await self._begin_or_raise(error, recovery)
                        returned = action.joined if recovery.is_return else ()  # requests go on without them
                        self._note_failure(
                            self.nodes.workers.get(error.node, self.nodes.own),
                            error,
                            has_chain=error.node in returned,
                            is_joining=True,
                        )
                        for name in returned:
                            if name != error.node:
                                self.nodes.workers[name].fail(time.monotonic(), has_chain=True)
                        for each in self.nodes.records:
                            each.asked_at = -math.inf
                    else:
                        self._go_on(chain, action, recovery)
                        return chain
                case Load():
                    recovery.target = action.plan
                    recovery.found_at = recovery.found_at or began
                    self._load(action, progress)
                case Ask():
                    await self._ask(action)
                    recovery.num_asks += 1
                case Wait():
                    await self.nodes.pause(action.for_s)
                case _:
                    raise self._given_up(recovery)
            if recovery.error is not None and not is_loading:
                recovery.spent_s += time.monotonic() - began

    async def open_chain(self, plan: Plan, recovery: Recovery, progress: NodeProgress) -> Chain:
        """Open a chain over nodes that hold their layers; a failure leaves nothing of it behind.

        After a loss one try may stand still for half of the time that is left, so that a node that hangs does not use
        up all of it. A try that moves may take longer than is left, since the next one would begin anew. The time may
        be over while another node loads, since that is not counted: a try may then stand still for the least time.
        """
        now = time.monotonic()
        recovery.found_at, recovery.loaded_at = recovery.found_at or now, now
        deployment = self._deployed(plan)
        self._epoch += 1
        most_still_s = None
        if recovery.error is not None:
            left_s = self._limits.recovery_s - recovery.spent_s
            most_still_s = max(_LEAST_TRY_S, left_s / 2)
            if not any(record.state is NodeState.LOADING for record in self.nodes.records):
                most_still_s = min(left_s, most_still_s)
        predicted = Prediction(deployment.spec, plan, self._planner.speeds)
        costs = ChainCosts(len(plan.assignments), predicted.chunks_s)
        answers_alone = plan.prompt_end is not None
        answer_costs = ChainCosts(1, predicted.of_answers.chunks_s) if answers_alone else costs
        is_awaited = (  # where the link of a node that fell silent may be slow, it is measured anew
            recovery.still_since is not None
            and not isinstance(recovery.error, NodeSilent)
            and (self.chain.num_stages, self.chain.answers_alone) == (len(plan.assignments), answers_alone)
        )
        if is_awaited:
            costs, answer_costs = self.chain.costs, self.chain.answer_costs
        async with AsyncExitStack() as stack:
            chain = Chain(
                *(self._own, deployment, self._epoch),
                costs=costs,
                answer_costs=answer_costs,
                is_awaited=is_awaited,
                can_spare=self._can_spare,
                say=self._say,
            )
            await stack.enter_async_context(chain)
            await chain.open(progress, most_still_s)
            self._open = stack.pop_all()
        self._deployment = deployment
        return chain

    def _go_on(self, chain: Chain, action: Open, recovery: Recovery) -> None:
        """Make this the present chain, and begin to tend it."""
        now = time.monotonic()
        recovery.opened_at = now
        recovery.target = None
        for record in (self.nodes.own, *self._members(chain.plan)):
            record.stands_in |= record.is_spare
            record.is_spare = False
            if record.state is NodeState.LOADED:  # else the chain is about to be lost, too
                record.meet(NodeEvent.ATTACHED, now)
                record.failure = None
        if set(self.whole.names) <= set(chain.plan.names):
            for worker in self.nodes.workers.values():
                if worker.stands_in and worker.name not in chain.plan.names:
                    worker.is_spare, worker.stands_in = True, False
        self.chain = chain
        if self._better and set(self._better.names) != set(chain.plan.names):
            self._better = None
        self._state = self._state.after(ChainEvent.OPENED)
        if recovery.error is not None:
            self.num_recoveries += not recovery.is_return
            recovery.story += f"; going on {action} after {now - recovery.lost_at:.1f} s"
            if recovery.still_since is None:  # no request was under way
                self._prove()
        if self._limits.recovery_s:
            self._begin_tending()

    def _given_up(self, recovery: Recovery) -> StageLost:
        assert recovery.error is not None
        missing = [each.name for each in self.nodes.records if each.name in recovery.plan.names and not each.is_usable]
        what = f"{' and '.join(missing)} did not come back" if missing else "no chain could be opened"
        what += f" within {self._limits.recovery_s:g} s"
        why = "" if self._can_spare() else ", and the model does not fit without"
        refusal = next(filter(None, (worker.refusal for worker in self.nodes.workers.values())), None)
        why += f" ({refusal})" if refusal else ""
        error = recovery.error
        return StageLost(f"{error.message}; {what}{why}", node=error.node)

    # --- with a chain -----------------------------------------------------------------------------------------------

    def _begin_tending(self, after_s: float = 0.0) -> None:
        self._tending = asyncio.create_task(self._tend(after_s))
        self._tending.add_done_callback(self._tended)

    async def _tend(self, after_s: float) -> None:
        """Look after the nodes that the open chain lacks, and end the chain once a better one is possible."""
        await asyncio.sleep(after_s)
        while True:
            if self._state is ChainState.PROVING:
                await self._wait_proof()
                continue
            await self._note_loads(None)
            self.note_draining()
            action = await self._decide(
                lambda: Situation(
                    now=time.monotonic(),
                    plan=self.chain.plan,
                    is_open=True,
                    target=self._better,
                    idle_s=self.chain.idle_s,
                )
            )
            self.waiting = action.why if isinstance(action, Wait) else ""
            match action:
                case TakeOver():
                    self._take_over(action)
                    return
                case Load():
                    names = " and ".join(action.names)
                    workers = "worker" if len(action.names) == 1 else "workers"
                    self._say(f"{workers} {names}: loading layers to rejoin the chain")
                    self._load(action, lambda node, report: None)
                case Ask():
                    await self._ask(action)
                case Measure():
                    assert self._measure is not None
                    peers = self.nodes.peers(action.names)
                    speeds = await self._measure(peers, self._planner.speeds)
                    self._planner = replace(self._planner, speeds=speeds)
                    for name in action.names:
                        self.nodes.workers[name].is_measured = True
                case LeaveOut():
                    for name in action.names:
                        self.nodes.workers[name].is_spare = True
                    names = " and ".join(action.names)
                    self._say(f"going on without {names}, which has no part of the best plan: see `brigade plan`")
                case Wait():
                    await self.nodes.pause(action.for_s)

    def _tended(self, tending: "asyncio.Task[None]") -> None:
        """Report the error that ended `_tend`, if one did, and tend the chain again after a pause."""
        if not tending.cancelled() and (error := tending.exception()):
            self._say(error_text(error))
            if self._tending is tending:
                self._begin_tending(_TEND_AGAIN_S)

    async def _stop_tending(self) -> None:
        tending, self._tending = self._tending, None
        if tending is not None:
            tending.cancel()
            await asyncio.wait([tending])

    async def _wait_proof(self) -> None:
        """Wait a moment for a token of the chain, or until no request waits for one: its client may have gone."""
        try:
            async with asyncio.timeout(_PROVING_S):
                await self.chain.has_token.wait()
        except TimeoutError:
            if self.chain.idle_s < _UNUSED_S:
                return
        self._prove()

    def _prove(self) -> None:
        """Note that the chain works: the recovery before it, if there was one, is over."""
        if self._state is ChainState.PROVING and self._recovery is not None:
            recovered = self._recovery.end()
            self._say(recovered.story)
            if not self._recovery.is_return:
                self._on_recovered(recovered)
        for record in self.nodes.records:
            if record.state is NodeState.ATTACHED:
                record.failing_since = None
        self._state = self._state.after(ChainEvent.PROVEN)

    def _take_over(self, action: TakeOver) -> None:
        """Have the chain end. The engine then asks for the next one, which is opened by this plan."""
        if not self.missing or len(self.missing) == len(action.joined):
            self._planner = replace(self._planner, whole=action.better or action.plan)
        self._better = action.better
        self._planned = action.plan
        names = " and ".join(action.joined)
        error = NodeReturned("rejoining the chain", node=names) if names else NodeReturned("the layers are split anew")
        self.chain.retire(error)

    # --- nodes ------------------------------------------------------------------------------------------------------

    async def _decide(self, situation: Callable[[], Situation]) -> Action:
        """Return the next action. Plans that it needs are searched for on a thread: streams do not wait for that."""
        before = [copy(each) for each in self.nodes.records]
        await run_in_thread(partial(decide, before, situation(), self._limits, self._planner))
        return decide(self.nodes.records, situation(), self._limits, self._planner)  # by what has changed meanwhile

    def _members(self, plan: Plan) -> list[ClusterNode]:
        """Return the workers of a plan, in its order."""
        return [self.nodes.workers[name] for name in plan.names[1:]]

    def _can_spare(self, name: str = "") -> bool:
        """Return whether requests can go on over the nodes that answer, also without this one."""
        nodes = [each.node for each in self.nodes.records if each.is_usable and each.name != name]
        return bool(self._limits.recovery_s) and self._planner.best(nodes) is not None

    async def _ask(self, action: Ask) -> None:
        """Ask workers whether they are there; report a refusal of TLS or of the protocol once."""
        await self.nodes.ask(action.names, action.within_s)
        for worker in (self.nodes.workers[name] for name in action.names):
            refusal = str(worker.refusal or "")
            if refusal not in ("", worker.reported):
                self._say(f"{refusal}; it cannot take part until this is fixed")
            worker.reported = refusal or ("" if worker.answers else worker.reported)

    def _deployed(self, plan: Plan) -> Deployment:
        """Return the deployment by this plan. Raises StageLost if a worker of the plan does not run."""
        workers = self._members(plan)
        if gone := [worker.name for worker in workers if worker.peer is None]:
            raise StageLost("has ended while a chain was opened", node=gone[0])
        return replace(self._deployment, plan=plan, peers=[worker.peer for worker in workers if worker.peer])

    def _load(self, action: Load, progress: NodeProgress) -> None:
        """Begin these loads, each of them independent of the others."""
        deployment = self._deployed(action.plan)
        copy = None
        if any(name != self.nodes.own.name for name in action.names):
            copy = asyncio.create_task(OwnCopy.of(deployment.checkpoint))
            self._copies.add(copy)
            copy.add_done_callback(self._copies.discard)
        for stage, assignment in enumerate(action.plan.assignments):
            if assignment.name not in action.names:
                continue
            record = self.nodes.own if stage == 0 else self.nodes.workers[assignment.name]
            record.meet(NodeEvent.LOADS, time.monotonic())
            record.shard = assignment
            if record.load is not None:
                record.load.cancel()  # it belongs to a process that has ended
            record.load = asyncio.create_task(self._load_one(deployment, stage, copy, progress))
            record.load.add_done_callback(lambda _: self.nodes.note_change())

    async def _load_one(
        self, deployment: Deployment, stage: int, copy: "asyncio.Task[OwnCopy] | None", progress: NodeProgress
    ) -> None:
        """Load one node's shard."""
        if copy is None or stage == 0:
            await self._own.load(deployment, progress)
        else:
            await load_worker(deployment, stage, await asyncio.shield(copy), progress)

    async def _note_loads(self, recovery: Recovery | None) -> None:
        """Enter the loads that have ended. Raises an error that would occur again, before the first chain."""
        for record in self.nodes.records:
            if record.load is None or not record.load.done():
                continue
            load, record.load = record.load, None
            if load.cancelled():  # by gRPC, as the connection was closed
                if record.state is NodeState.LOADING:
                    record.fail(time.monotonic(), has_chain=recovery is None)
                continue
            if (failure := load.exception()) is None:
                if record.state is NodeState.LOADING:
                    record.meet(NodeEvent.LOADED, time.monotonic())
                continue
            error = without_trace(failure)
            if recovery is None:
                self._say(f"{error}; the chain goes on without {record.name}")
            else:
                await self._begin_or_raise(error, recovery)
            self._note_failure(record, error, has_chain=recovery is None)

    def note_draining(self) -> None:
        """Enter the workers that announced on the present chain that they are shutting down."""
        for peer in self._deployment.peers:
            worker = self.nodes.workers[peer.name]
            if peer.is_draining and worker.peer is peer and worker.state is not NodeState.DRAINING:
                worker.meet(NodeEvent.DRAINS, time.monotonic())

    # --- failures ---------------------------------------------------------------------------------------------------

    async def _lose(self, error: BrigadeError) -> Recovery:
        """Enter the loss of the chain. A chain that made no token known belongs to the recovery before it."""
        if self.chain.has_token.is_set():
            self._prove()
        recovery, now = self._recovery, time.monotonic()
        is_same = recovery is not None and recovery.error is not None and self._state is ChainState.PROVING
        if recovery is None or not is_same or now - recovery.opened_at > self._limits.recovery_s:
            recovery = Recovery(self.chain.plan)
            recovery.begin(error, self.chain.still_since)
        recovery.note(error)
        recovery.num_asks = 0
        self._state = self._state.after(ChainEvent.LOSS)
        self._recovery = recovery
        if isinstance(error, NodeReturned):
            recovery.target = self._planned
        else:
            self._better = None
        self.waiting = ""
        self.note_draining()
        for record in self.nodes.records:
            record.asked_at = -math.inf
            if record.state is NodeState.ATTACHED:
                record.meet(NodeEvent.DETACHED, now)
        await self._open.aclose()
        worker = self.nodes.workers.get(error.node)
        if worker is not None and not isinstance(error, ChainReplaced):
            await self._note_loss(worker, error)
        return recovery

    async def _note_loss(self, worker: ClusterNode, error: BrigadeError) -> None:
        """Enter in the record of a worker that the chain was lost because of it."""
        if isinstance(error, StageLost) and not isinstance(error, EngineHung):
            if isinstance(error, NodeSilent) and not is_overloaded():  # else it may only lack CPU time: ask it first
                worker.kill()
            if not self._limits.rejoin_s and worker.peer and await worker.peer.is_elsewhere(ASK_S):
                return
            worker.meet(NodeEvent.LOST, time.monotonic())
        elif isinstance(error, (EngineHung, InternalError, *_LASTING)):
            self._note_failure(worker, error)

    def _note_failure(
        self, record: ClusterNode, error: BrigadeError, *, has_chain: bool = False, is_joining: bool = False
    ) -> None:
        """Rule out a process that would only fail again, and count any other failure; a hung one of our own is ended.

        A node that was joining the chain may lack its layers only because it was started anew.
        """
        now = time.monotonic()
        # one that is silent while it joins may only lack CPU time: ask it first
        is_asked = is_joining and is_overloaded()
        is_hung = isinstance(error, EngineHung) or (isinstance(error, NodeSilent) and not is_asked)
        if is_hung:
            record.kill()
        is_useless = is_hung or (isinstance(error, _LASTING) and not is_joining)
        is_repeated = isinstance(error, InternalError) and now - record.failed_at < _REPEATED_S
        if not record.is_own and (is_useless or is_repeated):
            record.stall(now)
        else:
            record.fail(now, has_chain=has_chain)
        record.failure, record.asked_at = error, -math.inf

    async def _begin_or_raise(self, error: BrigadeError, recovery: Recovery) -> None:
        """Make this the recovery's latest error, and its first one if there was none. Raise it if it is final."""
        if await self._is_lasting(error) or not self._limits.recovery_s:
            raise error
        if recovery.error is None:
            recovery.begin(error, None)
            self._state = self._state.after(ChainEvent.LOSS)
        recovery.note(error)

    async def _is_lasting(self, error: BrigadeError) -> bool:
        """Return whether the error would occur again.

        Before the first chain a worker's refusal is for the user to fix; later chains are opened without that worker.
        A worker that was started anew meanwhile only lacks what the process before it had loaded.
        """
        if not self._state.is_first:
            return isinstance(error, _LASTING) and not error.node
        if not isinstance(error, _REFUSALS):
            return False
        if (worker := self.nodes.workers.get(error.node)) is None:
            return True
        before = worker.incarnation
        await self.nodes.ask([worker.name], ASK_S)
        return worker.incarnation == before
