"""What to do about nodes that are lost, hang or come back: records and the time in, one action out. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from typing import Protocol

from coordinator.planning.plan import Assignment, Node, Objective, Plan
from coordinator.planning.speeds import NOTHING_KNOWN, Survey
from worker.model.modelspec import ModelSpec

_ASK_AGAIN_S = 0.1  # a node that does not answer, while there is no chain
_LOOK_S = 2.0  # any other node
_FIRST_ASK_S, _LONGEST_ASK_S = 0.3, 1.0
_IDLE_S = 2.0  # without a frame in flight: then requests do not notice that the chain is replaced
_FAILED_S, _LONGEST_FAILED_S = 0.1, 10.0  # pause after a failure while there is no chain, doubled with each in a row
_REFUSED_S, _LONGEST_REFUSED_S = 5.0, 600.0  # likewise while there is one, or where the node hangs
_FORGET_S = 600.0  # a node that was sound for so long has no failures in a row


@dataclass(frozen=True)
class Limits:
    """How long nodes are waited for, in seconds."""

    rejoin_s: float = 5.0  # for a lost node, where the model fits without it
    recovery_s: float = 60.0  # without a chain while no node loads; a load is bounded by stalls only
    arrival_s: float = 10.0  # for another worker to answer, before the first chain is opened without the missing ones


USUAL = Limits()


class NodeState(Enum):
    """How a node stands to its coordinator."""

    ABSENT = auto()  # it does not answer
    PRESENT = auto()  # it answers, and holds no layers for this coordinator as far as that is known
    LOADING = auto()  # it reads its layers
    LOADED = auto()  # it holds its layers, outside of a chain
    ATTACHED = auto()  # it is a stage of the chain
    STALLED = auto()  # it answers, but its engine hangs or refuses: unused until it is idle and its pause is over
    DRAINING = auto()  # it is about to end


class NodeEvent(Enum):
    """What takes a node from one state to another."""

    ANSWERED = auto()  # by the same process as before
    REPLACED = auto()  # another process answers
    LOST = auto()  # it does not answer, or has closed its connection
    LOADS = auto()
    LOADED = auto()
    FAILED = auto()  # it could not load, or not join the chain
    ATTACHED = auto()
    DETACHED = auto()  # the chain was closed
    STALLED = auto()
    IDLE = auto()  # a stalled one says that its engine is at no step
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
    """A node as the coordinator sees it. Times are seconds, monotonic."""

    name: str
    is_own: bool = False  # this very process
    is_spare: bool = False  # the best plan goes without it: it joins only where another node is lost
    state: NodeState = NodeState.ABSENT
    since: float = -math.inf  # when it came into the state
    incarnation: str = ""  # the process that answered last
    memory_bytes: int = 0  # what it may use
    shard: Assignment | None = None  # what it reads or holds
    num_failures: int = 0  # in a row
    failed_at: float = -math.inf  # the last of them
    failing_since: float | None = None  # the first of them
    retry_at: float = -math.inf
    asked_at: float = -math.inf

    def meet(self, event: NodeEvent, now: float) -> None:
        """Go to the next state. A KeyError is a bug: this cannot happen to a node in this state."""
        following = _NEXT[self.state].get(event) or _ANYWHERE[event]
        if following is not self.state:
            has_said_so = self.state is NodeState.DRAINING and following is NodeState.ABSENT
            self.since = -math.inf if has_said_so else now  # nobody waits for a node that said that it ends
        self.state = following
        if following in (NodeState.ABSENT, NodeState.PRESENT, NodeState.STALLED):
            self.shard = None

    def answer(self, incarnation: str, now: float) -> None:
        """The process of this incarnation answered."""
        is_known = incarnation == self.incarnation or self.state is NodeState.ABSENT
        self.incarnation, self.asked_at = incarnation, now
        self.meet(NodeEvent.ANSWERED if is_known else NodeEvent.REPLACED, now)

    def fail(self, now: float, *, has_chain: bool) -> None:
        """It could not load or join; a pause follows, which is longer where requests go on without it."""
        self._count_failure(now, *((_REFUSED_S, _LONGEST_REFUSED_S) if has_chain else (_FAILED_S, _LONGEST_FAILED_S)))
        self.meet(NodeEvent.FAILED, now)

    def stall(self, now: float) -> None:
        """Its engine hangs, or refuses what it would refuse again: it is not used for a while."""
        self._count_failure(now, _REFUSED_S, _LONGEST_REFUSED_S)
        self.meet(NodeEvent.STALLED, now)

    def prove(self) -> None:
        """A chain with it has made a token known."""
        self.failing_since = None

    def _count_failure(self, now: float, first_s: float, longest_s: float) -> None:
        self.num_failures = 1 if now - self.failed_at > _FORGET_S else self.num_failures + 1
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

    def holds(self, assignment: Assignment) -> bool:
        return self.state in (NodeState.LOADED, NodeState.ATTACHED) and _is_same(self.shard, assignment)


def _is_same(held: Assignment | None, wanted: Assignment) -> bool:
    return held is not None and (held.start, held.end, held.memory_bytes) == (
        wanted.start,
        wanted.end,
        wanted.memory_bytes,
    )


class ChainState(Enum):
    """How the one chain of a cluster stands."""

    STARTING = auto()  # there has been none
    RESTARTING = auto()  # there has been none, and the first try failed
    SOUND = auto()  # it is open
    LOST = auto()  # it is closed, and the next one is not open
    PROVING = auto()  # it is open after a loss, and has made no token known

    @property
    def is_open(self) -> bool:
        return self in (ChainState.SOUND, ChainState.PROVING)

    @property
    def is_first(self) -> bool:
        """Whether no chain has been open."""
        return self in (ChainState.STARTING, ChainState.RESTARTING)


class ChainEvent(Enum):
    """What takes a chain from one state to another."""

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


def following(state: ChainState, event: ChainEvent) -> ChainState:
    """Return the state after this event. Nothing else can happen in it."""
    return _NEXT_OF_CHAIN[state, event]


@dataclass(frozen=True)
class Ask:
    """Ask these nodes whether they are there, for so long at most."""

    names: tuple[str, ...]
    within_s: float


@dataclass(frozen=True)
class Load:
    """Have these nodes load what this plan gives them; an open chain goes on meanwhile."""

    plan: Plan
    names: tuple[str, ...]


@dataclass(frozen=True)
class Open:
    """Open a chain by this plan: without these nodes of the last one, and with these that it had not."""

    plan: Plan
    without: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class TakeOver:
    """End the open chain for one by this plan, all of whose new nodes hold their layers."""

    plan: Plan
    joined: tuple[str, ...]
    better: Plan | None = None  # to be taken over in an idle moment after that


@dataclass(frozen=True)
class LeaveOut:
    """The best plan goes without these nodes: they are spare."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """Decide again after so long, or as soon as something is known of a node. `why` is for the user."""

    for_s: float
    why: str = ""


@dataclass(frozen=True)
class GiveUp:
    """The time is over."""


Action = Ask | Load | Open | TakeOver | LeaveOut | Wait | GiveUp


@dataclass(frozen=True)
class Situation:
    """How the chain stands. Times are seconds."""

    now: float
    plan: Plan  # of the open chain, or of the one that was lost
    is_open: bool = False
    lost_at: float = 0.0
    target: Plan | None = None  # nodes load for it; with an open chain: it waits for an idle moment
    spent_s: float = 0.0  # without a chain while no node loaded
    num_asks: int = 0  # since the chain was lost
    idle_s: float = 0.0  # for how long nothing has been in flight on the open chain


class Splits(Protocol):
    """How layers are split over nodes."""

    def best(self, nodes: Sequence[Node]) -> Plan | None:
        """Return the best plan over these nodes, None where none fits."""

    def without_growth(self, present: Plan, best: Plan) -> Plan | None:
        """Return a plan over the nodes of `best` in which no node of the present plan holds a layer that it lacks."""


@dataclass
class Planner:
    """Splits one model over whichever nodes there are."""

    spec: ModelSpec
    speeds: Survey
    objective: Objective
    whole: Plan  # the plan over all nodes that were asked for, as far as they have answered
    layers: Sequence[int] | None = None  # of the plan over all configured nodes, where the user says so

    def best(self, nodes: Sequence[Node]) -> Plan | None:
        from coordinator.planning.planner import plan as make_plan  # numpy starts a thread: not before Ctrl-C is safe

        if {node.name for node in nodes} == set(_names(self.whole)):
            return self.whole
        if len(nodes) > self.spec.num_layers:
            return None
        is_given = self.layers is not None and len(self.layers) == len(nodes)
        objective = replace(self.objective, layers=self.layers if is_given else None)
        found = make_plan(self.spec, nodes, self.speeds, objective)
        return found if found.fits else None

    def without_growth(self, present: Plan, best: Plan) -> Plan | None:
        from coordinator.planning.planner import plan as make_plan  # numpy starts a thread: not before Ctrl-C is safe

        layers = _layers_without_growth(present, best)
        if layers is None:
            return None
        nodes = [Node(each.name, each.memory_bytes) for each in best.assignments]
        found = make_plan(self.spec, nodes, NOTHING_KNOWN, Objective(present.context, layers=layers))
        return found if found.fits else None


def _layers_without_growth(present: Plan, best: Plan) -> list[int] | None:
    """How many layers each node of `best` holds if those of the present plan only give layers to new neighbours."""
    order = [each.name for each in best.assignments]
    held = {each.name: each for each in present.assignments}
    stayers = [name for name in order if name in held]
    if stayers != list(held) or order[0] != stayers[0]:
        return None  # the nodes change their order, or one leaves
    wanted = {each.name: each for each in best.assignments}
    ends: dict[str, int] = {}
    start = 0  # of the stayer, which may have given its first layers away
    for name, following_one in [*pairwise(stayers), (stayers[-1], None)]:
        newcomers = order[order.index(name) + 1 : order.index(following_one) if following_one else None]
        boundary = held[name].end
        if not newcomers:
            ends[name] = boundary
            start = boundary
            continue
        most = held[following_one].end - 1 if following_one else boundary
        end = min(max(wanted[name].end, start + 1), boundary)
        last = most if following_one is None else min(max(wanted[newcomers[-1]].end, boundary), most)
        if last - end < len(newcomers):
            end = max(start + 1, last - len(newcomers))
        if last - end < len(newcomers):
            return None
        ends[name] = end
        for number, newcomer in enumerate(newcomers, 1):
            ends[newcomer] = end + number * (last - end) // len(newcomers)
        start = last
    return [end - begin for begin, end in pairwise([0, *(ends[name] for name in order)])]


def decide(nodes: Sequence[NodeRecord], situation: Situation, limits: Limits, splits: Splits) -> Action:
    """Return what to do now. `nodes` are in the order of a chain, this process first."""
    if situation.is_open:
        return _improve(nodes, situation, splits)
    return _reopen(nodes, situation, limits, splits)


def _reopen(nodes: Sequence[NodeRecord], now: Situation, limits: Limits, splits: Splits) -> Action:
    """Without a chain: find out which nodes are there, wait for lost ones, load, open."""
    left_s = limits.recovery_s - now.spent_s
    is_loading = any(each.state is NodeState.LOADING for each in nodes)
    if left_s <= 0 and not is_loading:
        return GiveUp()
    expected = [assignment.name for assignment in now.plan.assignments]
    waits_s = [limits.rejoin_s - (now.now - each.since) for each in _absent(nodes, expected)]
    awaited = [wait_s for wait_s in waits_s if wait_s > 0]
    plan = None if awaited else _plan_for_next(nodes, expected, now, limits, splits)
    asked = [each.name for each in nodes if _is_to_be_asked(each, now.now, has_plan=plan is not None)]
    if asked:
        within_s = min(_LONGEST_ASK_S, _FIRST_ASK_S * 2 ** min(now.num_asks, 9))
        return Ask(tuple(asked), max(_ASK_AGAIN_S, min(within_s, left_s)))
    if plan is None:
        for_s = min([left_s, *awaited]) if left_s > 0 else _LOOK_S
        return Wait(min(for_s, _ASK_AGAIN_S))
    step = _load_for(plan, nodes, now)
    if isinstance(step, Wait) and not is_loading:
        return Wait(min(step.for_s, left_s))  # for the pause of a node that has failed
    return step or Open(
        plan,
        tuple(name for name in expected if name not in _names(plan)),
        tuple(name for name in _names(plan) if name not in expected),
    )


def _absent(nodes: Sequence[NodeRecord], names: Sequence[str]) -> list[NodeRecord]:
    return [each for each in nodes if each.name in names and each.state is NodeState.ABSENT]


def _is_to_be_asked(each: NodeRecord, now: float, *, has_plan: bool) -> bool:
    """Whether a node is to be asked while there is no chain; what is missing holds nothing up where there is a plan."""
    if each.is_own or each.state is NodeState.LOADING:
        return False
    if each.is_usable:
        return now - each.asked_at >= _LOOK_S
    return not has_plan and now - each.asked_at >= _ASK_AGAIN_S and now >= _asked_again_at(each)


def _asked_again_at(each: NodeRecord) -> float:
    return each.retry_at if each.state is NodeState.STALLED else -math.inf


def _plan_for_next(
    nodes: Sequence[NodeRecord], expected: Sequence[str], now: Situation, limits: Limits, splits: Splits
) -> Plan | None:
    """The plan that nodes load for already, the lost chain's, or the best over those that are there."""

    def is_hopeless(each: NodeRecord) -> bool:
        """Whether it has failed for so long, though it answers, that it is left out; a node that is new at once."""
        if each.failing_since is None or each.is_own or each.state is not NodeState.PRESENT:
            return False
        if each.name in expected:
            return now.now - each.failing_since >= limits.rejoin_s
        return each.failed_at >= now.lost_at or each.retry_at > now.now

    usable = [each for each in nodes if each.is_usable]
    sound = [each for each in usable if not is_hopeless(each)]
    if now.target and {each.name for each in sound} >= set(_names(now.target)):
        return now.target
    for candidates in (sound, usable):
        if {each.name for each in candidates} == set(expected):
            return now.plan  # nothing has to be loaded then
        if found := splits.best([each.node for each in candidates]):
            return found
    return None


def _load_for(plan: Plan, nodes: Sequence[NodeRecord], now: Situation) -> Load | Wait | None:
    """Have the nodes load what they lack for this plan; None once each holds its part. No load is cut short."""
    by_name = {each.name: each for each in nodes}
    lacking = [by_name[a.name] for a in plan.assignments if not by_name[a.name].holds(a)]
    if not lacking:
        return None
    ready = [each for each in lacking if each.state is not NodeState.LOADING and each.retry_at <= now.now]
    if ready:
        return Load(plan, tuple(each.name for each in ready))
    pauses = [each.retry_at - now.now for each in lacking if each.state is not NodeState.LOADING]
    return Wait(min([_LOOK_S, *pauses]))


def _improve(nodes: Sequence[NodeRecord], now: Situation, splits: Splits) -> Action:
    """With an open chain: look for the nodes that it is without, have them load, and take over once they have."""
    members = _names(now.plan)
    outside = [each for each in nodes if each.name not in members]
    if any(each.state is not NodeState.ATTACHED for each in nodes if each.name in members):
        return Wait(_LOOK_S)  # one is about to end
    asked = [each.name for each in outside if _is_looked_for(each, now.now)]
    if asked:
        return Ask(tuple(asked), _LONGEST_ASK_S)
    ready = [each for each in outside if each.is_usable and not each.is_spare and each.retry_at <= now.now]
    if not ready:
        if now.target is None:
            return Wait(_LOOK_S)
        if now.idle_s >= _IDLE_S:
            return TakeOver(now.target, ())
        return Wait(_LOOK_S, "a better split of the layers waits for an idle moment")
    best = splits.best([each.node for each in nodes if each.name in members or each in ready])
    left_out = [each.name for each in ready if best is None or each.name not in _names(best)]
    if best is None or left_out:
        return LeaveOut(tuple(left_out))
    joined = tuple(each.name for each in ready)
    plan: Plan | None = best if not _grows(now.plan, best) else splits.without_growth(now.plan, best)
    waits = plan is None
    plan = plan or best
    newcomers = [each for each in nodes if each in ready]
    if (load := _load_for(_only(plan, newcomers), nodes, now)) is not None:
        return Load(plan, load.names) if isinstance(load, Load) else load
    if waits and now.idle_s < _IDLE_S:
        who = " and ".join(joined)
        return Wait(_LOOK_S, f"{who} has its layers, and joins in an idle moment: other nodes have to read layers, too")
    return TakeOver(plan, joined, best if plan is not best else None)


def _is_looked_for(each: NodeRecord, now: float) -> bool:
    if each.is_own or each.is_spare or each.state in (NodeState.LOADING, NodeState.ATTACHED):
        return False
    return now - each.asked_at >= _LOOK_S and now >= _asked_again_at(each)


def _grows(present: Plan, following_one: Plan) -> bool:
    """Whether a node of the present plan would have to read layers that it does not hold."""
    held = {each.name: each for each in present.assignments}
    return any(
        each.name in held and not held[each.name].start <= each.start < each.end <= held[each.name].end
        for each in following_one.assignments
    )


def _only(plan: Plan, nodes: Sequence[NodeRecord]) -> Plan:
    """The plan's part for these nodes."""
    names = {each.name for each in nodes}
    return Plan(tuple(a for a in plan.assignments if a.name in names), plan.context, plan.num_sessions)


def _names(plan: Plan) -> list[str]:
    return [assignment.name for assignment in plan.assignments]


def how(found: Open, plan: Plan) -> str:
    """Return how a chain goes on that was opened again, for the user."""
    changes = [
        f"{word} {' and '.join(names)}" for word, names in (("without", found.without), ("with", found.joined)) if names
    ]
    layers = ", ".join(f"{a.name} [{a.start}, {a.end})" for a in plan.assignments)
    return f"{' and '.join(changes)} ({layers})" if changes else "with the same nodes"
