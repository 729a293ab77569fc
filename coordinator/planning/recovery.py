"""Recovery: what is to be done while a chain is closed, by who answers and for how long. Pure: no clock, no I/O."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.planning.plan import Node, Plan

Split = Callable[[Sequence[Node]], Plan | None]  # the best plan over these nodes, None if none fits


@dataclass(frozen=True)
class Limits:
    """How long a lost node is awaited where the model fits without it, and how long a recovery may take, seconds."""

    rejoin_s: float = 5.0
    recovery_s: float = 60.0


USUAL = Limits()


@dataclass(frozen=True)
class Present:
    """A node that answers: what it offers, and which process it is (none: this very process)."""

    node: Node
    incarnation: str = ""


@dataclass(frozen=True)
class Wait:
    """Ask again; this long after, the decision may be another one even if the same nodes answer."""

    for_s: float


@dataclass(frozen=True)
class Reopen:
    """Open a chain by this plan, which is without these nodes of the last one, and has these that it had not."""

    plan: Plan
    without: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class GiveUp:
    """The time is over."""


Decision = Wait | Reopen | GiveUp


class Recovery:
    """One recovery, from the loss of a chain until another one has made a token known.

    Times are seconds since it began.
    """

    def __init__(self, plan: Plan, limits: Limits) -> None:
        """`plan` is that of the lost chain."""
        self._plan = plan
        self._limits = limits
        self._present: Sequence[Present] = ()
        self._absent_since: dict[str, float] = {}
        self._failing_since: dict[str, float] = {}  # by name: one that crashes at every start is ever another process
        self._useless: set[str] = set()  # incarnations

    def rule_out(self, incarnation: str) -> None:
        """This process is of no use any more, whatever it answers: it hangs, is about to end, has another model."""
        self._useless.add(incarnation)

    def leaves(self, name: str) -> None:
        """This node has said that it is about to end: it is not awaited, though perhaps gone before it is asked."""
        if name in self._expected:
            self._absent_since[name] = -math.inf

    def saw(self, now_s: float, present: Sequence[Present]) -> None:
        """Take note of all who answer, in the order that a chain has them."""
        self._present = [each for each in present if not each.incarnation or each.incarnation not in self._useless]
        ruled_out = {each.node.name for each in present} - {each.node.name for each in self._present}
        here = {each.node.name for each in self._present}
        for name in self._expected:
            if name in here:
                self._absent_since.pop(name, None)
            else:
                self._absent_since.setdefault(name, -math.inf if name in ruled_out else now_s)

    def failed(self, now_s: float, name: str) -> None:
        """A chain with this node could not be opened, because of it."""
        self._failing_since.setdefault(name, now_s)

    def decide(self, now_s: float, split: Split) -> Decision:
        """What to do now."""
        left_s = self._limits.recovery_s - now_s
        due_s = [self._limits.rejoin_s - (now_s - since) for since in self._absent_since.values()]
        awaited = [each for each in due_s if each > 0]
        if left_s <= 0:
            return GiveUp()
        if awaited:
            return Wait(min(left_s, *awaited))
        sound = [each for each in self._present if not self._is_hopeless(each, now_s)]
        plan = self._plan_over(sound, split) or self._plan_over(self._present, split)
        if plan is None:
            return Wait(left_s)
        taking_part = [assignment.name for assignment in plan.assignments]
        without = tuple(name for name in self._expected if name not in taking_part)
        return Reopen(plan, without, tuple(name for name in taking_part if name not in self._expected))

    @property
    def missing(self) -> list[str]:
        """Nodes of the lost chain that cannot take part now."""
        return list(self._absent_since)

    @property
    def _expected(self) -> list[str]:
        return [assignment.name for assignment in self._plan.assignments]

    def _is_hopeless(self, each: Present, now_s: float) -> bool:
        """Whether it has failed for so long, though it answers, that it is to be left out; a spare one at once."""
        since = self._failing_since.get(each.node.name)
        if since is None or not each.incarnation:
            return False
        return each.node.name not in self._expected or now_s - since >= self._limits.rejoin_s

    def _plan_over(self, present: Sequence[Present], split: Split) -> Plan | None:
        """The plan as it was, if the same nodes are here: nothing has to be loaded then."""
        nodes = [each.node for each in present]
        return self._plan if [node.name for node in nodes] == self._expected else split(nodes)


def how(found: Reopen, plan: Plan) -> str:
    """How a chain goes on that was opened again, for the user."""
    changes = [
        f"{word} {' and '.join(names)}" for word, names in (("without", found.without), ("with", found.joined)) if names
    ]
    layers = ", ".join(f"{a.name} [{a.start}, {a.end})" for a in plan.assignments)
    return f"{' and '.join(changes)} ({layers})" if changes else "with the same nodes"
