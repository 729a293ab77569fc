"""Cluster: keeps a chain open over whichever nodes there are. planning/recovery.py decides what is done next."""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Self

from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment, OwnCopy, OwnNode, Progress, load_worker
from coordinator.cluster.nodes import ClusterNode, Nodes
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import Assignment, Objective, Plan
from coordinator.planning.recovery import (
    USUAL,
    Action,
    Ask,
    ChainEvent,
    ChainState,
    LeaveOut,
    Limits,
    Load,
    NodeEvent,
    NodeState,
    Open,
    Planner,
    Situation,
    TakeOver,
    Wait,
    decide,
    following,
    how,
)
from coordinator.planning.speeds import NOTHING_KNOWN, Survey
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
    internal_error_text,
)

_ASK_S, _LONGEST_ASK_S = 0.3, 1.0
_UNUSED_S = 1.0  # without a frame in flight: no request waits for the first token of a chain any more
_PROVING_S = 0.5  # between two looks whether that is so
REPEATED_S = 600.0  # an unknown error of an engine so soon after another one rules the node out for a while
_LASTING = (ModelError, ConfigError, InputError, SamplingError)  # it would be the same again
_REFUSALS = (*_LASTING, NodeBusy, OutOfMemory, InternalError)  # likewise, for the first chain


@dataclass
class Timeline:
    """How far the latest recovery has come. Seconds, monotonic; 0 for what has not happened."""

    lost_at: float = 0.0  # the loss was noticed
    found_at: float = 0.0  # there were enough nodes for a chain
    loaded_at: float = 0.0  # each of them had its layers
    opened_at: float = 0.0  # they were joined


@dataclass(frozen=True)
class Recovered:
    """A recovery that is over."""

    cause: str  # class name of the error that began it
    node: str  # the worker that it was of; empty for none in particular
    story: str  # for the user
    took_s: float  # until there was a chain again
    still_s: float | None  # how long streams stood still; None if no request was under way


@dataclass
class Outage:
    """One loss of a chain, until another one has made a token known; or the way to the first chain."""

    plan: Plan  # of the chain that was lost, or that is to be the first
    error: BrigadeError | None = None  # the latest; None until something has failed
    story: str = ""  # what was lost, and then how it goes on, for the user
    cause: str = ""  # class name of the error that was first
    culprit: str = ""  # the worker that it was of
    still_since: float | None = None  # seconds, monotonic; None if no request was under way
    target: Plan | None = None  # what nodes load for
    spent_s: float = 0.0  # without a chain while no node loaded
    num_asks: int = 0
    timeline: Timeline = field(default_factory=Timeline)

    def begin(self, error: BrigadeError, still_since: float | None) -> None:
        """This is the first error."""
        self.error, self.story, self.cause, self.culprit = error, str(error), type(error).__name__, error.node
        self.still_since, self.spent_s, self.timeline = still_since, 0.0, Timeline(time.monotonic())

    @property
    def is_return(self) -> bool:
        """Whether nothing was lost: the chain was ended for a node that is there again."""
        return self.cause == NodeReturned.__name__

    def end(self) -> Recovered:
        """It is over: what is told of it."""
        still_s = None if self.still_since is None else time.monotonic() - self.still_since
        still = "" if still_s is None else f", the stream stood still for {still_s:.1f} s"
        took_s = self.timeline.opened_at - self.timeline.lost_at
        return Recovered(self.cause, self.culprit, self.story + still, took_s, still_s)


class Cluster:
    """Opens the first chain, and the next one whenever a chain is lost or can be better. Async context manager."""

    def __init__(
        self,
        own: OwnNode,
        nodes: Nodes,
        deployment: Deployment,
        limits: Limits = USUAL,
        *,
        say: Callable[[str], None] = lambda line: None,
        speeds: Survey = NOTHING_KNOWN,
        objective: Objective | None = None,
        layers: Sequence[int] | None = None,
        missing: Collection[str] = (),
    ) -> None:
        """`deployment` is the first one; `say` takes lines for the user.

        Args:
            speeds: of the nodes, for the plans of later chains.
            objective: of the first plan, and of later ones: its context is how few tokens per request will do then.
            layers: of the plan over all configured nodes, where the user says so.
            missing: workers that the deployment goes without because they did not answer: they are taken in later.
        """
        self.chain: Chain
        self.nodes = nodes
        self.num_recoveries = 0
        self.on_recovered: Callable[[Recovered], None] = lambda found: None
        self.waiting = ""  # why a node that is there does not take part yet
        self._own = own
        self._limits = limits
        self._say = say
        self._deployment = deployment  # of the present chain, or of the one that is opened
        whole = deployment.plan
        objective = replace(objective or Objective(whole.context), max_context=whole.context)
        self._planner = Planner(deployment.spec, speeds, objective, whole, layers)
        self._state = ChainState.STARTING
        self._outage: Outage | None = None  # the latest
        self._planned: Plan | None = None  # the chain was ended for it
        self._better: Plan | None = None  # of the same nodes: waits for an idle moment
        self._epoch = 0
        self._open = AsyncExitStack()  # the present chain
        self._tending: asyncio.Task[None] | None = None
        planned = {assignment.name for assignment in whole.assignments}
        for worker in nodes.workers.values():
            worker.is_spare = worker.name not in planned and worker.name not in missing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self._stop_tending()
            loads = [record.load for record in self.nodes.records if record.load]
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
        finally:
            await self._open.aclose()

    async def open(self, progress: Progress = lambda node, report: None) -> Chain:
        """Load, and open the first chain, anew if a node is lost meanwhile.

        Raises:
            BrigadeError: as `reopen`; a node that cannot hold its layers says so at once.
        """
        self._outage = outage = Outage(self._deployment.plan, target=self._deployment.plan)
        await self.nodes.ask(self.nodes.workers, _LONGEST_ASK_S)
        for worker in self._members(outage.plan):
            if not worker.answers and outage.error is None:
                lost = worker.trouble or StageLost("does not answer any more", node=worker.name)
                await self._note_first_failure(lost, outage)
        return await self._open_next(outage, progress)

    async def reopen(self, error: BrigadeError) -> Chain:
        """Return the chain on which requests go on after this error.

        Raises:
            StageLost: none could be opened in time.
            BrigadeError: what would be the same on every chain.
        """
        if (isinstance(error, _LASTING) and not error.node) or not self._limits.recovery_s:
            raise error
        await self._stop_tending()
        outage = await self._lose(error)
        return await self._open_next(outage, lambda node, report: None)

    @property
    def whole(self) -> Plan:
        """The plan with every node that has answered."""
        return self._planner.whole

    @property
    def missing(self) -> list[str]:
        """Nodes that were counted on, and that the present chain is without."""
        members = {assignment.name for assignment in self.chain.plan.assignments}
        return [each.name for each in self.nodes.records if not each.is_spare and each.name not in members]

    @property
    def outside(self) -> list[Assignment]:
        """What the missing nodes are to hold by the whole plan; no layers for one that it does not know yet."""
        planned = {assignment.name: assignment for assignment in self.whole.assignments}
        return [planned.get(name, Assignment(name, 0, 0, 0, 0, 0)) for name in self.missing]

    @property
    def trouble(self) -> str:
        """Why there is no chain now; nothing while there is one, or has been none."""
        return (
            "" if self._outage is None or self._outage.error is None or self._state.is_open else str(self._outage.error)
        )

    @property
    def timeline(self) -> Timeline:
        """The latest recovery's."""
        return Timeline() if self._outage is None else self._outage.timeline

    async def _open_next(self, outage: Outage, progress: Progress) -> Chain:
        """Do what is decided until there is a chain. Raises StageLost once the time is over."""
        while True:
            await self._note_loads(outage)
            action = self._decide(
                Situation(
                    now=time.monotonic(),
                    plan=outage.plan,
                    lost_at=outage.timeline.lost_at,
                    target=outage.target,
                    spent_s=outage.spent_s if outage.error else -math.inf,
                    num_asks=outage.num_asks,
                )
            )
            began, is_loading = time.monotonic(), any(each.load for each in self.nodes.records)
            if isinstance(action, Open):
                try:
                    chain = await self._open_chain(action, outage, progress)
                except BrigadeError as error:
                    await self._note_failed_open(error, outage)
                except TimeoutError:
                    raise self._given_up(outage) from None
                else:
                    self._go_on(chain, action, outage)
                    return chain
            elif isinstance(action, Load):
                outage.target = action.plan
                outage.timeline.found_at = outage.timeline.found_at or time.monotonic()
                self._load(action, progress)
            elif isinstance(action, Ask):
                await self.nodes.ask(action.names, action.within_s)
                outage.num_asks += 1
                if action.within_s >= _LONGEST_ASK_S:
                    self._kill_silent(action.names)
            elif isinstance(action, Wait):
                await self.nodes.pause(action.for_s)
            else:
                raise self._given_up(outage)
            if outage.error is not None and not is_loading:
                outage.spent_s += time.monotonic() - began

    async def _tend(self) -> None:
        """Look after the nodes that the open chain is without, and end it once another one is better."""
        while True:
            if self._state is ChainState.PROVING:
                await self._prove()
                continue
            await self._note_loads(None)
            self._note_draining()
            action = self._decide(
                Situation(
                    now=time.monotonic(),
                    plan=self.chain.plan,
                    is_open=True,
                    target=self._better,
                    idle_s=self.chain.idle_s,
                )
            )
            self.waiting = action.why if isinstance(action, Wait) else ""
            if isinstance(action, TakeOver):
                self._take_over(action)
                return
            if isinstance(action, Load):
                self._say(f"worker {' and '.join(action.names)} is there again: it joins once it has loaded its layers")
                self._load(action, lambda node, report: None)
            elif isinstance(action, Ask):
                await self.nodes.ask(action.names, action.within_s)
            elif isinstance(action, LeaveOut):
                for name in action.names:
                    self.nodes.workers[name].is_spare = True
            elif isinstance(action, Wait):
                await self.nodes.pause(action.for_s)

    def _decide(self, situation: Situation) -> Action:
        return decide(self.nodes.records, situation, self._limits, self._planner)

    def _members(self, plan: Plan) -> list[ClusterNode]:
        """The workers of a plan, in its order."""
        return [self.nodes.workers[assignment.name] for assignment in plan.assignments[1:]]

    def _load(self, action: Load, progress: Progress) -> None:
        """Begin these loads. None of them ends because another one fails."""
        if any(worker.peer is None for worker in self._members(action.plan)):
            return  # a process of our own has just ended
        deployment = self._deployed(action.plan)
        known = asyncio.ensure_future(OwnCopy.of(deployment.checkpoint)) if deployment.peers else None
        for stage, assignment in enumerate(action.plan.assignments):
            if assignment.name not in action.names:
                continue
            record = self.nodes.own if stage == 0 else self.nodes.workers[assignment.name]
            record.meet(NodeEvent.LOADS, time.monotonic())
            record.shard = assignment
            if record.load is not None:
                record.load.cancel()  # that of a process that has ended
            record.load = asyncio.create_task(self._load_one(deployment, stage, known, progress))
            record.load.add_done_callback(lambda _: self.nodes.note_change())

    async def _load_one(
        self, deployment: Deployment, stage: int, known: "asyncio.Future[OwnCopy] | None", progress: Progress
    ) -> BrigadeError | None:
        """Load one node's shard; what it failed with, if it did."""
        try:
            if known is None or stage == 0:
                await self._own.load(deployment, progress)
            else:
                await load_worker(deployment, stage, await asyncio.shield(known), progress)
        except BrigadeError as error:
            return error
        return None

    def _deployed(self, plan: Plan) -> Deployment:
        """Raises StageLost if a worker of the plan does not run."""
        workers = self._members(plan)
        if gone := [worker.name for worker in workers if worker.peer is None]:
            raise StageLost("has ended while a chain was opened", node=gone[0])
        return replace(self._deployment, plan=plan, peers=[worker.peer for worker in workers if worker.peer])

    async def _open_chain(self, found: Open, outage: Outage, progress: Progress) -> Chain:
        """Open a chain over nodes that hold their layers; nothing is left of it if that fails."""
        now = time.monotonic()
        outage.timeline.found_at, outage.timeline.loaded_at = outage.timeline.found_at or now, now
        deployment = self._deployed(found.plan)
        self._epoch += 1
        left_s = None if outage.error is None else self._limits.recovery_s - outage.spent_s
        async with AsyncExitStack() as stack, asyncio.timeout(left_s):
            chain = Chain(
                *(self._own, deployment, self._epoch),
                costs=self._costs_for(found.plan, outage),
                can_spare=self._can_spare,
                say=self._say,
            )
            await stack.enter_async_context(chain)
            await chain.open(progress)
            self._open = stack.pop_all()
        self._deployment = deployment
        return chain

    def _costs_for(self, plan: Plan, outage: Outage) -> ChainCosts | None:
        """Reuse the lost chain's costs if requests are waiting and the number of stages is unchanged."""
        is_awaited = outage.still_since is not None
        return self.chain.costs if is_awaited and self.chain.num_stages == len(plan.assignments) else None

    def _go_on(self, chain: Chain, found: Open, outage: Outage) -> None:
        """There is a chain again."""
        now = time.monotonic()
        outage.timeline.opened_at = now
        outage.target = None
        for record in (self.nodes.own, *self._members(chain.plan)):
            if record.state is NodeState.LOADED:  # else the chain is about to be lost, too
                record.meet(NodeEvent.ATTACHED, now)
        self.chain = chain
        if self._better and {a.name for a in self._better.assignments} != {a.name for a in chain.plan.assignments}:
            self._better = None
        self._enter(ChainEvent.OPENED)
        if outage.error is not None:
            self.num_recoveries += not outage.is_return
            outage.story += f"; going on {how(found, chain.plan)} after {now - outage.timeline.lost_at:.1f} s"
            if outage.still_since is None:  # no request was under way
                self._proven()
        if self._limits.recovery_s:
            self._tending = asyncio.create_task(self._tend())
            self._tending.add_done_callback(self._tended)

    def _tended(self, tending: "asyncio.Task[None]") -> None:
        """Say what ended it, if that was a bug: the chain is none the worse for it."""
        if not tending.cancelled() and (error := tending.exception()):
            self._say(str(error) if isinstance(error, BrigadeError) else internal_error_text(error))

    async def _stop_tending(self) -> None:
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait([self._tending])
            self._tending = None

    async def _prove(self) -> None:
        """Wait for a token of the chain, or until no request waits for one: its client may have gone."""
        try:
            async with asyncio.timeout(_PROVING_S):
                await self.chain.has_token.wait()
        except TimeoutError:
            if self.chain.idle_s < _UNUSED_S:
                return
        self._proven()

    def _proven(self) -> None:
        """The chain is as good as any other: the outage is over, if there was one."""
        if self._state is ChainState.PROVING and self._outage is not None:
            recovered = self._outage.end()
            self._say(recovered.story)
            if not self._outage.is_return:
                self.on_recovered(recovered)
        for record in self.nodes.records:
            if record.state is NodeState.ATTACHED:
                record.prove()
        self._enter(ChainEvent.PROVEN)

    def _enter(self, event: ChainEvent) -> None:
        self._state = following(self._state, event)

    def _take_over(self, action: TakeOver) -> None:
        """End the chain; the next one is opened by this plan when whoever uses the chain asks for it."""
        if not self.missing or len(self.missing) == len(action.joined):
            self._planner.whole = action.better or action.plan
        self._better = action.better
        self._planned = action.plan
        who = " and ".join(action.joined)
        error = NodeReturned("is there again", node=who) if who else NodeReturned("the layers are split anew")
        self.chain.end(error)

    async def _lose(self, error: BrigadeError) -> Outage:
        """Enter the loss of the chain in the records. A chain that made no token known is part of its outage."""
        if self.chain.has_token.is_set():
            self._proven()
        outage, now = self._outage, time.monotonic()
        is_same = outage is not None and outage.error is not None and self._state is ChainState.PROVING
        if outage is None or not is_same or now - outage.timeline.opened_at > self._limits.recovery_s:
            outage = Outage(self.chain.plan)
            outage.begin(error, self.chain.still_since)
        outage.error, outage.num_asks = error, 0
        self._enter(ChainEvent.LOSS)
        self._outage = outage
        if isinstance(error, NodeReturned):
            outage.target = self._planned
        else:
            self._better = None
        self.waiting = ""
        self._note_draining()
        for record in self.nodes.records:
            record.asked_at = -math.inf
            if record.state is NodeState.ATTACHED:
                record.meet(NodeEvent.DETACHED, now)
        await self._open.aclose()
        await self._note_loss(error)
        return outage

    async def _note_loss(self, error: BrigadeError) -> None:
        """Enter in the record of a worker that the chain was lost because of it."""
        worker = self.nodes.workers.get(error.node)
        if worker is None or isinstance(error, ChainReplaced):
            return
        now = time.monotonic()
        if isinstance(error, StageLost) and not isinstance(error, EngineHung):
            if isinstance(error, NodeSilent):
                worker.kill()
            may_be_elsewhere = not self._limits.rejoin_s and worker.peer is not None
            if may_be_elsewhere and worker.peer and await worker.peer.is_elsewhere(_ASK_S):
                return
            worker.meet(NodeEvent.LOST, now)
        elif isinstance(error, (EngineHung, InternalError, *_LASTING)):
            self._note_failure(worker, error)

    def _note_failure(
        self, record: ClusterNode, error: BrigadeError, *, has_chain: bool = False, is_joining: bool = False
    ) -> None:
        """Do without a process that would only fail again; one of our own is started again.

        A node that was joining the chain may lack its layers only because it was started anew.
        """
        now = time.monotonic()
        if isinstance(error, (EngineHung, NodeSilent)):
            record.kill()
        is_useless = isinstance(error, (EngineHung, NodeSilent)) or (isinstance(error, _LASTING) and not is_joining)
        is_repeated = isinstance(error, InternalError) and now - record.failed_at < REPEATED_S
        if not record.is_own and (is_useless or is_repeated):
            record.stall(now)
        else:
            record.fail(now, has_chain=has_chain)
        record.asked_at = -math.inf

    def _note_draining(self) -> None:
        """Workers that said on the present chain that they are about to end."""
        for peer in self._deployment.peers:
            worker = self.nodes.workers[peer.name]
            if peer.is_draining and worker.peer is peer and worker.state is not NodeState.DRAINING:
                worker.meet(NodeEvent.DRAINS, time.monotonic())

    async def _note_loads(self, outage: Outage | None) -> None:
        """Enter the loads that have ended. Raises what would be the same again, where there has been no chain."""
        for record in self.nodes.records:
            if record.load is None or not record.load.done():
                continue
            load, record.load = record.load, None
            if load.cancelled():
                continue
            if (error := load.result()) is None:
                if record.state is NodeState.LOADING:
                    record.meet(NodeEvent.LOADED, time.monotonic())
                continue
            if outage is None:
                self._say(f"{error}; the chain goes on without it")
            else:
                await self._note_first_failure(error, outage)
            self._note_failure(record, error, has_chain=outage is None)

    async def _note_failed_open(self, error: BrigadeError, outage: Outage) -> None:
        """Enter that a chain could not be opened. Raises what would be the same again."""
        await self._note_first_failure(error, outage)
        record = self.nodes.workers.get(error.node, self.nodes.own)
        self._note_failure(record, error, is_joining=True)
        for each in self.nodes.records:
            each.asked_at = -math.inf

    async def _note_first_failure(self, error: BrigadeError, outage: Outage) -> None:
        """Begin the outage with this error, unless it has begun. Raises the error if it is to be final."""
        if await self._is_lasting(error) or not self._limits.recovery_s:
            raise error
        if outage.error is None:
            outage.begin(error, None)
            self._enter(ChainEvent.LOSS)
        outage.error = error

    async def _is_lasting(self, error: BrigadeError) -> bool:
        """Whether it would be the same again.

        What a worker refuses is for the user to fix as long as no chain has been open at all; later ones are opened
        without it. A worker that was started anew meanwhile only lacks what the process before had loaded.
        """
        if not self._state.is_first:
            return isinstance(error, _LASTING) and not error.node
        if not isinstance(error, _REFUSALS):
            return False
        if (worker := self.nodes.workers.get(error.node)) is None:
            return True
        before = worker.incarnation
        await self.nodes.ask([worker.name], _ASK_S)
        return worker.incarnation == before

    def _given_up(self, outage: Outage) -> StageLost:
        assert outage.error is not None
        expected = [assignment.name for assignment in outage.plan.assignments]
        missing = [each.name for each in self.nodes.records if each.name in expected and not each.is_usable]
        who = f"{' and '.join(missing)} did not come back" if missing else "no chain could be opened"
        why = "" if self._fits() else ", and the model does not fit without"
        troubles = (worker.trouble for worker in self.nodes.workers.values())
        refusal = next((each for each in troubles if isinstance(each, ConfigError)), None)
        why += f" ({refusal})" if refusal else ""
        error = outage.error
        return StageLost(f"{error.message}; {who} within {self._limits.recovery_s:g} s{why}", node=error.node)

    def _can_spare(self, name: str) -> bool:
        """Whether requests can go on without this worker."""
        return bool(self._limits.recovery_s) and self._fits(without=name)

    def _fits(self, *, without: str = "") -> bool:
        """Whether the nodes that answer can hold the model, if need be without this one."""
        nodes = [each.node for each in self.nodes.records if each.is_usable and each.name != without]
        return self._planner.best(nodes) is not None

    def _kill_silent(self, names: Collection[str]) -> None:
        """End those of these workers that are our own, were part of the lost chain, still run and say nothing."""
        for worker in (self.nodes.workers[name] for name in names):
            if not worker.answers and worker.peer is not None and worker.peer in self._deployment.peers:
                worker.kill()
