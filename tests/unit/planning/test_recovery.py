"""What is done while a chain is closed, as tables: who answers, for how long, and what follows."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.planning.plan import Assignment, Node, Plan
from coordinator.planning.recovery import Decision, GiveUp, Limits, Present, Recovery, Reopen, Wait

ALL = ("max", "mini", "air")
LIMITS = Limits(rejoin_s=5, recovery_s=60)


def plan_over(names: Sequence[str]) -> Plan:
    return Plan(tuple(Assignment(name, i, i + 1, 1, 1, 10) for i, name in enumerate(names)), context=8)


def present(*names: str) -> list[Present]:
    """Processes by node: `max` is this one, `air2` another one of `air`."""
    return [Present(Node(name.rstrip("2"), 10), name if name != "max" else "") for name in names]


def fits(nodes: Sequence[Node]) -> Plan | None:
    return plan_over([node.name for node in nodes])


def fits_on_three(nodes: Sequence[Node]) -> Plan | None:
    return fits(nodes) if len(nodes) >= 3 else None


def around(*names: str) -> Reopen:
    return Reopen(plan_over(names), tuple(name for name in ALL if name not in names))


SAME = Reopen(plan_over(ALL))


@pytest.mark.parametrize(
    ("seen", "now_s", "split", "decision"),
    [
        ([(0, ALL)], 0, fits, SAME),
        ([(0, ("max", "mini"))], 0, fits, Wait(5)),
        ([(1, ("max", "mini"))], 3, fits, Wait(3)),
        ([(1, ("max", "mini"))], 6, fits, around("max", "mini")),
        ([(0, ("max", "mini"))], 6, fits_on_three, Wait(54)),
        ([(0, ("max", "mini"))], 60, fits_on_three, GiveUp()),
        ([(0, ("max", "mini"))], 60, fits, GiveUp()),
        ([(0, ("max", "mini")), (59, ALL)], 59, fits_on_three, SAME),
        ([(0, ("max", "mini")), (59, ("max", "mini", "air2"))], 59, fits_on_three, SAME),
        ([(0, ("max", "mini")), (3, ("max", "air"))], 5.5, fits, Wait(2.5)),  # mini was lost later
        ([(0, ("max",))], 5, fits, around("max")),
        ([(0, ("max",)), (4, ("max", "mini"))], 5, fits, around("max", "mini")),
        ([(58, ("max", "mini"))], 58, fits, Wait(2)),  # no wait passes the end
    ],
)
def test_who_is_awaited_and_for_how_long(
    seen: list[tuple[float, Sequence[str]]], now_s: float, split: object, decision: Decision
) -> None:
    recovery = Recovery(plan_over(ALL), LIMITS)
    for at_s, names in seen:
        recovery.saw(at_s, present(*names))
    assert recovery.decide(now_s, split) == decision  # type: ignore[arg-type]


def test_a_node_that_has_said_that_it_ends_is_not_awaited_even_if_it_is_gone_before_it_is_asked() -> None:
    recovery = Recovery(plan_over(ALL), LIMITS)
    recovery.leaves("air")
    recovery.saw(0.3, present("max", "mini"))
    assert recovery.decide(0.3, fits) == around("max", "mini")
    recovery.saw(0.5, present("max", "mini", "air2"))  # started again
    assert recovery.decide(0.5, fits) == SAME


def test_a_spare_node_takes_part_and_is_not_awaited() -> None:
    recovery = Recovery(plan_over(("max", "air")), LIMITS)
    recovery.saw(0, present("max", "mini", "air"))
    assert recovery.decide(0, fits) == Reopen(plan_over(ALL), joined=("mini",))
    recovery.saw(0, present("max", "air"))
    assert recovery.decide(0, fits) == Reopen(plan_over(("max", "air")))


def test_a_node_that_answers_and_fails_is_tried_as_long_as_one_that_is_silent_is_awaited() -> None:
    recovery = Recovery(plan_over(ALL), LIMITS)
    recovery.saw(0, present(*ALL))
    recovery.failed(1, "air")
    assert recovery.decide(2, fits) == SAME
    assert recovery.decide(6, fits) == around("max", "mini")
    assert recovery.decide(6, fits_on_three) == SAME, "there is no other way"


def test_a_node_that_crashes_whenever_it_joins_is_left_out_though_each_time_it_is_another_process() -> None:
    recovery = Recovery(plan_over(ALL), LIMITS)
    for now_s, process in enumerate(("air", "air2", "air", "air2", "air")):
        recovery.saw(now_s, present("max", "mini", process))
        assert recovery.decide(now_s, fits) == SAME
        recovery.failed(now_s + 0.5, "air")
    recovery.saw(6, present("max", "mini", "air2"))
    assert recovery.decide(6, fits) == around("max", "mini")
    assert recovery.decide(6, fits_on_three) == SAME, "there is no other way"


def test_a_spare_node_that_fails_is_left_out_at_once() -> None:
    recovery = Recovery(plan_over(("max", "air")), LIMITS)
    recovery.saw(0, present("max", "mini", "air"))
    recovery.failed(0, "mini")
    assert recovery.decide(0, fits) == Reopen(plan_over(("max", "air")))


def test_a_process_that_is_ruled_out_is_not_awaited_but_its_successor_is_taken() -> None:
    recovery = Recovery(plan_over(ALL), LIMITS)
    recovery.rule_out("air")
    recovery.saw(0, present(*ALL))
    assert recovery.decide(0, fits) == around("max", "mini")
    assert recovery.decide(0, fits_on_three) == Wait(60)
    recovery.saw(1, present("max", "mini", "air2"))
    assert recovery.decide(1, fits) == SAME


@pytest.mark.parametrize("seed", range(50))
def test_whatever_happens_no_wait_passes_its_deadline_and_no_chain_has_a_node_that_is_away(seed: int) -> None:
    numbers = random.Random(seed)
    limits = Limits(numbers.choice([0, 2, 5, 90]), 60)
    recovery, split, now_s, tried = Recovery(plan_over(ALL), limits), numbers.choice([fits, fits_on_three]), 0.0, 0
    while True:
        names = ["max", *numbers.sample(["mini", "mini2", "air", "air2"], numbers.randrange(3))]
        here = {each.node.name: each for each in present(*names)}
        recovery.saw(now_s, [here[name] for name in ALL if name in here])
        decision = recovery.decide(now_s, split)
        if isinstance(decision, GiveUp):
            break
        if isinstance(decision, Reopen):
            chosen = [assignment.name for assignment in decision.plan.assignments]
            assert set(chosen) <= set(here) and set(decision.without) == set(ALL) - set(chosen)
            recovery.failed(now_s, numbers.choice(chosen))
            tried, now_s = tried + 1, now_s + 0.1
        else:
            assert 0 < decision.for_s <= 60 - now_s
            now_s += min(decision.for_s, numbers.choice([0.1, 1, 10]))
    assert 60 <= now_s < 60.2


def test_the_plan_stays_as_it_was_where_the_same_nodes_are_there_with_other_budgets() -> None:
    recovery = Recovery(plan_over(ALL), LIMITS)
    recovery.saw(0, [replace(each, node=Node(each.node.name, 3)) for each in present(*ALL)])
    assert recovery.decide(0, lambda nodes: None) == SAME
