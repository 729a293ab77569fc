"""Recovery: from node records and the time to one action, for a chain that is lost or could be better. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from coordinator.planning.plan import Assignment, Node, Plan

if TYPE_CHECKING:  # it imports numpy, for which --help should not wait
    from coordinator.planning.planner import Planner

_ASK_AGAIN_S = 0.1  # between two questions to a node that does not answer, while there is no chain
LOOK_S = 2.0  # between two questions to any other node
_FIRST_ASK_S, _LONGEST_ASK_S = 0.3, 1.0
IDLE_S = 2.0  # without a frame in flight: no request notices then that the chain is replaced
_FAILED_S, _LONGEST_FAILED_S = 0.1, 10.0  # pause after a failure without a chain, doubled with each in a row
REFUSED_S, LONGEST_REFUSED_S = 5.0, 600.0  # the same with an open chain, or after a hang
_FORGET_S = 600.0  # after a pause: a failure that comes later than this is the first of a row


@dataclass(frozen=True)
class Limits:
    """How long the coordinator waits for nodes, in seconds."""

    rejoin_s: float = 5.0  # for a lost node, if the model fits without it
    recovery_s: float = 60.0  # without a chain while no node loads; stalls alone bound a load
    arrival_s: float = 10.0  # for one more worker to answer, before the first chain opens without the missing ones


USUAL = Limits()


class NodeState(Enum):
    """The state of a node, as its coordinator sees it."""

    ABSENT = auto()  # does not answer
    PRESENT = auto()  # answers, and holds no layers for this coordinator as far as that is known
    LOADING = auto()  # reads its layers
    LOADED = auto()  # holds its layers, outside of a chain
    ATTACHED = auto()  # is a stage of the chain
    STALLED = auto()  # answers, but its engine hangs or refuses: unused until it is idle and its pause is over
    DRAINING = auto()  # is shutting down


class NodeEvent(Enum):
    """An event that takes a node from one state to another."""

    ANSWERED = auto()  # the same process as before answers
    REPLACED = auto()  # another process answers
    LOST = auto()  # no answer, or a closed connection
    LOADS = auto()
    LOADED = auto()
    FAILED = auto()  # could not load, or could not join the chain
    ATTACHED = auto()
    DETACHED = auto()  # the chain was closed
    STALLED = auto()
    IDLE = auto()  # the engine of a stalled node runs no step any more
    DRAINS = auto()


_S, _E = NodeState, NodeEvent
_ANYWHERE = {_E.REPLACED: _S.PRESENT, _E.LOST: _S.ABSENT, _E.STALLED: _S.STALLED, _E.DRAINS: _S.DRAINING}
_NEXT: dict[NodeState, dict[NodeEvent, NodeState]] = {
    _S.ABSENT: {_E.ANSWERED: _S.PRESENT, _E.FAILED: _S.ABSENT, _E.DETACHED: _S.ABSENT},
    _S.PRESENT: {_E.ANSWERED: _S.PRESENT, _E.LOADS: _S.LOADING, _E.FAILED: _S.PRESENT},
    _S.LOADING: {_E.ANSWERED: _S.LOADING, _E.LOADED: _S.LOADED, _E.FAILED: _S.PRESENT},
    _S.LOADED: {
        **{_E.ANSWERED: _S.LOADED, _E.LOADS: _S.LOADING, _E.FAILED: _S.PRESENT},
        **{_E.ATTACHED: _S.ATTACHED, _E.DETACHED: _S.LOADED},
    },
    _S.ATTACHED: {_E.ANSWERED: _S.ATTACHED, _E.DETACHED: _S.LOADED, _E.FAILED: _S.PRESENT},
    _S.STALLED: {_E.ANSWERED: _S.STALLED, _E.IDLE: _S.PRESENT, _E.FAILED: _S.STALLED, _E.DETACHED: _S.STALLED},
    _S.DRAINING: {_E.ANSWERED: _S.DRAINING, _E.FAILED: _S.DRAINING, _E.DETACHED: _S.DRAINING},
}


@dataclass
class NodeRecord:
    """The coordinator's record of one node. Times are seconds, monotonic."""

    name: str
    is_own: bool = False  # this very process
    is_spare: bool = False  # left out by the best plan, and not in place of a lost node since
    is_measured: bool = True  # its speed is known, or cannot be; only False where plans are made by speed
    state: NodeState = NodeState.ABSENT
    since: float = -math.inf  # when it entered the state
    incarnation: str = ""  # the process that answered last
    memory_bytes: int = 0  # its budget
    shard: Assignment | None = None  # that it reads or holds
    num_failures: int = 0  # in a row
    failed_at: float = -math.inf  # the last of them
    failing_since: float | None = None  # the first of them
    retry_at: float = -math.inf
    stalled: str = ""  # the process whose engine hangs, or would refuse the same again, until it is idle
    asked_at: float = -math.inf

    def meet(self, event: NodeEvent, now: float) -> None:
        """Enter the next state. A KeyError is a bug: this event cannot happen in this state."""
        state = _NEXT[self.state].get(event) or _ANYWHERE[event]
        if event is NodeEvent.IDLE:
            self.stalled = ""
        if state is not self.state:
            has_drained = self.state is NodeState.DRAINING and state is NodeState.ABSENT
            self.since = -math.inf if has_drained else now  # a node that announced its end is not waited for
        self.state = state
        if state in (NodeState.ABSENT, NodeState.PRESENT, NodeState.STALLED):
            self.shard = None

    def answer(self, incarnation: str, now: float) -> None:
        """Note that the process of this incarnation answered."""
        is_known = incarnation == self.incarnation or self.state is NodeState.ABSENT
        self.incarnation, self.asked_at = incarnation, now
        self.meet(NodeEvent.ANSWERED if is_known else NodeEvent.REPLACED, now)
        if incarnation == self.stalled:  # a missed answer has not fixed it
            self.meet(NodeEvent.STALLED, now)

    def fail(self, now: float, *, has_chain: bool) -> None:
        """Note that it could not load or join. The pause that follows is longer if requests go on without it."""
        self._count_failure(now, *((REFUSED_S, LONGEST_REFUSED_S) if has_chain else (_FAILED_S, _LONGEST_FAILED_S)))
        self.meet(NodeEvent.FAILED, now)

    def stall(self, now: float) -> None:
        """Note that its engine hangs, or would refuse the same again: it is not used for a while."""
        self._count_failure(now, REFUSED_S, LONGEST_REFUSED_S)
        self.meet(NodeEvent.STALLED, now)
        self.stalled = self.incarnation

    def _count_failure(self, now: float, first_s: float, longest_s: float) -> None:
        self.num_failures = 1 if now - self.retry_at > _FORGET_S else self.num_failures + 1
        self.failed_at = now
        self.failing_since = now if self.failing_since is None else self.failing_since
        self.retry_at = now + min(longest_s, first_s * 2 ** min(self.num_failures - 1, 20))

    @property
    def is_usable(self) -> bool:
        """Whether it may take part in the next chain."""
        return self.state in (NodeState.PRESENT, NodeState.LOADING, NodeState.LOADED, NodeState.ATTACHED)

    @property
    def answers(self) -> bool:
        return self.state is not NodeState.ABSENT

    @property
    def node(self) -> Node:
        return Node(self.name, self.memory_bytes)

    def holds(self, wanted: Assignment) -> bool:
        """Return whether it has loaded these layers, within the same budget."""
        held = self.shard
        return (
            held is not None
            and self.state in (NodeState.LOADED, NodeState.ATTACHED)
            and (held.start, held.end, held.memory_bytes) == (wanted.start, wanted.end, wanted.memory_bytes)
        )


class ChainState(Enum):
    """The state of a cluster's one chain."""

    STARTING = auto()  # none has been open
    RESTARTING = auto()  # none has been open, and the first try failed
    SOUND = auto()  # open
    LOST = auto()  # closed, and the next one is not open
    PROVING = auto()  # open after a loss, and has made no token known

    @property
    def is_open(self) -> bool:
        return self in (ChainState.SOUND, ChainState.PROVING)

    @property
    def is_first(self) -> bool:
        """Whether no chain has been open."""
        return self in (ChainState.STARTING, ChainState.RESTARTING)

    def after(self, event: ChainEvent) -> ChainState:
        """Return the state after this event. A KeyError is a bug: the event cannot happen in this state."""
        return _NEXT_OF_CHAIN[self, event]


class ChainEvent(Enum):
    """An event that takes a chain from one state to another."""

    LOSS = auto()
    OPENED = auto()
    PROVEN = auto()  # by a token, or because no request waits for one


_NEXT_OF_CHAIN = {
    (ChainState.STARTING, ChainEvent.OPENED): ChainState.SOUND,
    (ChainState.STARTING, ChainEvent.LOSS): ChainState.RESTARTING,
    (ChainState.RESTARTING, ChainEvent.OPENED): ChainState.PROVING,
    (ChainState.SOUND, ChainEvent.PROVEN): ChainState.SOUND,
    (ChainState.SOUND, ChainEvent.LOSS): ChainState.LOST,
    (ChainState.LOST, ChainEvent.OPENED): ChainState.PROVING,
    (ChainState.PROVING, ChainEvent.PROVEN): ChainState.SOUND,
    (ChainState.PROVING, ChainEvent.LOSS): ChainState.LOST,
}


@dataclass(frozen=True)
class Ask:
    """Ask these nodes whether they are there, for so long at most."""

    names: tuple[str, ...]
    within_s: float


@dataclass(frozen=True)
class Measure:
    """Have these nodes measure their speed, before a plan includes them."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Load:
    """Have these nodes load their part of this plan; an open chain goes on meanwhile."""

    plan: Plan
    names: tuple[str, ...]


@dataclass(frozen=True)
class Open:
    """Open a chain by this plan, `without` these nodes of the last one, and with `joined` as new ones."""

    plan: Plan
    without: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Describe the difference from the last chain, for the user."""
        changes = [
            f"{word} {' and '.join(names)}"
            for word, names in (("without", self.without), ("with", self.joined))
            if names
        ]
        return f"{' and '.join(changes)} ({self.plan})" if changes else "with the same nodes"


@dataclass(frozen=True)
class TakeOver:
    """End the open chain for one by this plan, whose new nodes all hold their layers."""

    plan: Plan
    joined: tuple[str, ...]
    better: Plan | None = None  # for an idle moment after that


@dataclass(frozen=True)
class LeaveOut:
    """Make these nodes spare: the best plan leaves them out."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """Decide again after so long, or as soon as a node's record changes. `why` is for the user."""

    for_s: float
    why: str = ""


@dataclass(frozen=True)
class GiveUp:
    """End the recovery: its time is over."""


Action = Ask | Measure | Load | Open | TakeOver | LeaveOut | Wait | GiveUp


@dataclass(frozen=True)
class Situation:
    """The state of the chain, as far as decisions depend on it. Times are seconds."""

    now: float
    plan: Plan  # of the open chain, or of the one that was lost
    is_open: bool = False
    lost_at: float = 0.0  # 0 before the first failure
    target: Plan | None = None  # that nodes load for; with an open chain: that waits for an idle moment
    spent_s: float = 0.0  # without a chain while no node loaded
    num_asks: int = 0  # since the chain was lost
    idle_s: float = 0.0  # for how long nothing has been in flight on the open chain


def decide(nodes: Sequence[NodeRecord], situation: Situation, limits: Limits, planner: Planner) -> Action:
    """Return the next action. `nodes` are in the order of a chain, this process first."""
    if situation.is_open:
        return _improve(nodes, situation, planner)
    return _reopen(nodes, situation, limits, planner)


def _reopen(nodes: Sequence[NodeRecord], now: Situation, limits: Limits, planner: Planner) -> Action:
    """Return the next action without a chain: ask which nodes are there, wait for lost ones, load, open."""
    left_s = limits.recovery_s - now.spent_s
    is_loading = any(each.state is NodeState.LOADING for each in nodes)
    if left_s <= 0 and not is_loading:
        return GiveUp()
    expected = now.plan.names
    absent_s = [now.now - each.since for each in nodes if each.name in expected and each.state is NodeState.ABSENT]
    rejoin_s = limits.rejoin_s if now.plan.prompt_end is None else 0.0  # else the first node goes on alone, at once
    waits_s = [rejoin_s - each_s for each_s in absent_s if each_s < rejoin_s]
    plan = None if waits_s else _plan_for_next(nodes, now, limits, planner)
    if asked := tuple(each.name for each in nodes if _is_to_be_asked(each, now.now, has_plan=plan is not None)):
        within_s = min(_LONGEST_ASK_S, _FIRST_ASK_S * 2 ** min(now.num_asks, 9))
        return Ask(asked, max(_ASK_AGAIN_S, min(within_s, left_s)))
    if plan is None:
        return Wait(min([left_s if left_s > 0 else LOOK_S, *waits_s, _ASK_AGAIN_S]))
    step = _load_for(plan, nodes, now, plan.names)
    answered_alone = bool(now.lost_at) and now.plan.prompt_end is not None
    alone = planner.best([nodes[0].node]) if step and answered_alone else None
    if alone and _load_for(alone, nodes, now, alone.names) is None:
        plan, step = alone, None  # the other nodes load while the first one goes on
    if isinstance(step, Wait) and not is_loading:
        return Wait(min(step.for_s, left_s))  # for the pause of a node that has failed
    return step or Open(
        plan,
        tuple(name for name in expected if name not in plan.names),
        tuple(name for name in plan.names if name not in expected),
    )


def _is_to_be_asked(each: NodeRecord, now: float, *, has_plan: bool) -> bool:
    """Return whether to ask a node while there is no chain. With a plan, missing nodes hold nothing up."""
    if each.is_own or each.state is NodeState.LOADING:
        return False
    if each.is_usable:
        return now - each.asked_at >= LOOK_S
    return not has_plan and now - each.asked_at >= (LOOK_S if each.state is NodeState.STALLED else _ASK_AGAIN_S)


def _plan_for_next(nodes: Sequence[NodeRecord], now: Situation, limits: Limits, planner: Planner) -> Plan | None:
    """Return the plan that nodes load for already, the lost chain's, or the best one over the nodes that are there."""
    expected = now.plan.names

    def is_hopeless(each: NodeRecord) -> bool:
        """Return whether it answers but has failed for too long; a new node is hopeless after one failure."""
        if each.failing_since is None or each.is_own or each.state is not NodeState.PRESENT:
            return False
        if each.name in expected:
            return now.now - each.failing_since >= limits.rejoin_s
        return each.failed_at >= now.lost_at or each.retry_at > now.now

    usable = [each for each in nodes if each.is_usable]
    sound = [each for each in usable if each.is_measured and not is_hopeless(each)]
    if now.target and {each.name for each in sound} >= set(now.target.names):
        target = _at_present(now.target, sound)
        if target.fits or not now.lost_at:  # the first plan is the user's
            return target
    # a node that loads to join later holds nothing up
    settled = [each for each in sound if each.name in expected or each.state is not NodeState.LOADING]
    for candidates in (settled, sound, usable):
        if {each.name for each in candidates} == set(expected) and (same := _at_present(now.plan, candidates)).fits:
            return same  # only nodes that were started anew have to load then
        if found := planner.best([each.node for each in candidates]):
            return found
    return None


def _at_present(plan: Plan, nodes: Sequence[NodeRecord]) -> Plan:
    """Return the plan with the present budgets of the nodes that have yet to begin loading their part."""
    by_name = {each.name: each for each in nodes}
    parts = [(by_name[a.name], a) for a in plan.assignments]
    return plan.within(
        {
            each.name: each.memory_bytes
            for each, part in parts
            if each.state is not NodeState.LOADING and not each.holds(part)
        }
    )


def _load_for(plan: Plan, nodes: Sequence[NodeRecord], now: Situation, names: Collection[str]) -> Load | Wait | None:
    """Have these nodes load what they lack of a plan; None once each holds its part. A load is never interrupted."""
    by_name = {each.name: each for each in nodes}
    lacking = [by_name[a.name] for a in plan.assignments if a.name in names and not by_name[a.name].holds(a)]
    if not lacking:
        return None
    resting = [each for each in lacking if each.state is not NodeState.LOADING]
    if ready := tuple(each.name for each in resting if each.retry_at <= now.now):
        return Load(plan, ready)
    return Wait(min([LOOK_S, *(each.retry_at - now.now for each in resting)]))


def _improve(nodes: Sequence[NodeRecord], now: Situation, planner: Planner) -> Action:
    """Return the next action with an open chain: ask the nodes that it lacks, load, and take over."""
    members = now.plan.names
    outside = [each for each in nodes if each.name not in members]
    if any(each.state is not NodeState.ATTACHED for each in nodes if each.name in members):
        return Wait(LOOK_S)  # a member is about to end
    if asked := tuple(each.name for each in outside if _is_looked_for(each, now.now)):
        return Ask(asked, _LONGEST_ASK_S)
    ready = [each for each in outside if each.is_usable and not each.is_spare and each.retry_at <= now.now]
    if not ready:
        if now.target is None:
            return Wait(LOOK_S)
        if now.idle_s >= IDLE_S:
            return TakeOver(now.target, ())
        return Wait(LOOK_S, "a better split of the layers waits for an idle moment")
    if unmeasured := tuple(each.name for each in ready if not each.is_measured):
        return Measure(unmeasured)
    best = planner.best([each.node for each in nodes if each.name in members or each in ready])
    left_out = tuple(each.name for each in ready if best is None or each.name not in best.names)
    if best is None or left_out:
        return LeaveOut(left_out)
    gentle = planner.without_growth(now.plan, best) if _grows(now.plan, best) else best
    plan = gentle or best
    newcomers = tuple(each.name for each in ready)
    if step := _load_for(plan, nodes, now, newcomers):
        return step
    if gentle is None and now.idle_s < IDLE_S:
        names = " and ".join(newcomers)
        return Wait(
            LOOK_S, f"{names} has its layers, and joins in an idle moment: other nodes have to read layers, too"
        )
    return TakeOver(plan, newcomers, best if plan is not best else None)


def _is_looked_for(each: NodeRecord, now: float) -> bool:
    """Return whether to ask a node that the open chain lacks: another process may have taken a stalled one's place."""
    if each.is_own or each.is_spare or each.state in (NodeState.LOADING, NodeState.ATTACHED):
        return False
    return now - each.asked_at >= LOOK_S


def _grows(present: Plan, best: Plan) -> bool:
    """Return whether a node of the present plan would have to read layers that it does not hold."""
    held = {each.name: each for each in present.assignments}
    return any(
        each.name in held and not held[each.name].start <= each.start < each.end <= held[each.name].end
        for each in best.assignments
    )
