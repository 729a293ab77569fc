"""What is done about nodes that are lost, hang and come back, as tables: records and the time in, one action out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from coordinator.planning.plan import Assignment, Node, Plan
from coordinator.planning.recovery import (
    Action,
    Ask,
    GiveUp,
    LeaveOut,
    Limits,
    Load,
    Measure,
    NodeEvent,
    NodeRecord,
    NodeState,
    Open,
    Situation,
    TakeOver,
    Wait,
    decide,
)
from coordinator.planning.speeds import NO_SPEEDS, Survey

ALL = ("max", "mini", "air")
LIMITS = Limits(rejoin_s=5, recovery_s=60)
A, P, LG, LD, AT, ST, DR = NodeState


def plan_over(names: Sequence[str]) -> Plan:
    return Plan(tuple(Assignment(name, i, i + 1, 1, 1, 10) for i, name in enumerate(names)), context=8)


@dataclass
class Splits:
    """One layer each; the model fits on so many nodes."""

    least: int = 1
    meanwhile: Plan | None = None
    always: Plan | None = None  # the best one, whatever nodes there are
    speeds: Survey = NO_SPEEDS

    def best(self, nodes: Sequence[Node]) -> Plan | None:
        if self.always is not None:
            return self.always
        return plan_over([node.name for node in nodes]) if len(nodes) >= self.least else None

    def without_growth(self, present: Plan, best: Plan) -> Plan | None:
        return self.meanwhile


def record(name: str, state: NodeState, plan: Plan | None = None, **more: float) -> NodeRecord:
    """A node that was asked just now, and holds or loads its part of the plan."""
    shard = next((each for each in plan.assignments if each.name == name), None) if plan else None
    return NodeRecord(
        name, name == "max", state=state, incarnation=name, shard=shard, asked_at=100, memory_bytes=10, **more
    )  # type: ignore[arg-type]


def nodes(*states: NodeState, plan: Plan | None = None) -> list[NodeRecord]:
    return [record(name, state, plan, since=100) for name, state in zip(ALL, states, strict=True)]


def lost(at_s: float = 0.0, **more: object) -> Situation:
    """So long after the loss of a chain over all; nothing has loaded meanwhile."""
    return replace(Situation(100 + at_s, plan_over(ALL), lost_at=100, spent_s=at_s), **more)  # type: ignore[arg-type]


def around(*names: str) -> Open:
    return Open(plan_over(names), tuple(name for name in ALL if name not in names))


WHOLE, PAIR = plan_over(ALL), plan_over(("max", "mini"))


@pytest.mark.parametrize(
    ("states", "holds", "at_s", "least", "action"),
    [
        ((LD, LD, LD), WHOLE, 0, 1, around(*ALL)),
        ((LD, LD, A), WHOLE, 0, 1, Wait(0.1)),
        ((LD, LD, A), WHOLE, 1, 1, Ask(("air",), 0.3)),
        ((LD, LD, A), PAIR, 6, 1, around("max", "mini")),
        ((LD, LD, A), PAIR, 6, 3, Ask(("air",), 0.3)),
        ((LD, LD, A), PAIR, 60, 3, GiveUp()),
        ((LD, LD, A), PAIR, 60, 1, GiveUp()),
        ((LD, LD, ST), PAIR, 0, 1, around("max", "mini")),
        ((LD, LD, DR), PAIR, 0, 1, around("max", "mini")),
        ((LD, LD, P), WHOLE, 0, 1, Load(WHOLE, ("air",))),
        ((LD, LD, LG), WHOLE, 0, 1, Wait(2.0)),
        ((LD, LD, LG), WHOLE, 70, 1, Wait(2.0)),  # it loads: no recovery counts that
        ((P, P, P), None, 0, 1, Load(WHOLE, ALL)),
    ],
)
def test_no_chain(states: tuple[NodeState, ...], holds: Plan | None, at_s: float, least: int, action: Action) -> None:
    there = nodes(*states, plan=holds)
    for each in there:
        each.asked_at += at_s if each.is_usable else 0
    assert decide(there, lost(at_s), LIMITS, Splits(least)) == action


def test_a_node_that_has_said_that_it_ends_is_not_awaited_even_if_it_is_gone_before_it_is_asked() -> None:
    there = nodes(LD, LD, AT, plan=PAIR)
    there[2].meet(NodeEvent.DRAINS, 100)
    there[2].meet(NodeEvent.LOST, 100.2)
    assert decide(there, lost(0.3), LIMITS, Splits()) == around("max", "mini")
    there[2].answer("another", 100.4)
    assert decide(there, lost(0.5), LIMITS, Splits()) == Load(WHOLE, ("air",))


def test_a_lost_node_that_only_computed_prompts_is_not_awaited() -> None:
    """The first node holds all layers, and goes on with the answers in their slots."""
    there = nodes(LD, LD, A, plan=plan_over(ALL))
    for prompt_end, action in ((None, Ask(("air",), 0.3)), (1, Open(plan_over(("max", "mini")), ("air",)))):
        situation = lost(plan=replace(plan_over(ALL), prompt_end=prompt_end))
        assert decide([replace(each, asked_at=99.8) for each in there], situation, LIMITS, Splits()) == action


@pytest.mark.parametrize(("state", "prompt_end"), [(LD, None), (LD, 1), (LG, 1)])
def test_answers_that_one_node_makes_wait_for_no_load_of_another(state: NodeState, prompt_end: int | None) -> None:
    """The other node that computed prompts holds its old layers only, or reads the new ones already."""
    there = nodes(LD, state, A, plan=replace(PAIR, assignments=PAIR.assignments[:1]))
    situation = lost(6, plan=replace(WHOLE, prompt_end=prompt_end))
    for each in there[:2]:
        each.asked_at += 6
    expected = Load(PAIR, ("mini",)) if prompt_end is None else around("max")
    assert decide(there, situation, LIMITS, Splits()) == expected
    assert decide(there, situation, LIMITS, Splits(least=2)) == (Load(PAIR, ("mini",)) if state is LD else Wait(2.0))


def test_a_spare_node_takes_part_and_is_not_awaited() -> None:
    there = nodes(LD, A, LD, plan=WHOLE)
    there[1].is_spare = True
    situation = replace(lost(), plan=plan_over(("max", "air")))
    there[2].shard = situation.plan.assignments[1]
    assert decide(there, situation, LIMITS, Splits()) == Open(situation.plan)
    there[1].answer("mini", 100)
    assert decide(there, situation, LIMITS, Splits()) == Load(WHOLE, ("mini", "air"))


def test_streams_wait_for_no_node_that_loads_to_join_later() -> None:
    """The chain had no air yet. Where the nodes that are left do not suffice, the load is awaited."""
    there = nodes(LD, LD, LG, plan=PAIR)
    situation = replace(lost(6), plan=PAIR)
    for each in there:
        each.asked_at += 6
    assert decide(there, situation, LIMITS, Splits()) == Open(PAIR)
    there[0].shard = plan_over(("max",)).assignments[0]
    there[1].meet(NodeEvent.LOST, 100)
    assert decide(there, situation, LIMITS, Splits()) == Open(plan_over(("max",)), ("mini",))
    assert isinstance(decide(there, situation, LIMITS, Splits(least=2)), Load | Wait)


def test_a_node_that_answers_and_fails_is_tried_as_long_as_one_that_is_silent_is_awaited() -> None:
    there = nodes(LD, LD, LD, plan=WHOLE)
    there[2].fail(101, has_chain=False)
    assert decide(there, lost(1), LIMITS, Splits()) == Wait(pytest.approx(0.1))
    assert decide(there, lost(1.2), LIMITS, Splits()) == Load(WHOLE, ("air",))
    there[1].shard = PAIR.assignments[1]
    for each in there:
        each.asked_at = 106
    assert decide(there, lost(6.2), LIMITS, Splits()) == around("max", "mini")
    assert decide(there, lost(6.2), LIMITS, Splits(3)) == Load(WHOLE, ("air",)), "there is no other way"


def test_the_pause_of_a_node_that_failed_to_load_takes_no_recovery_beyond_its_time() -> None:
    there = nodes(LD, LD, P, plan=WHOLE)
    for each in there:
        each.asked_at = 159
    there[2].retry_at = 163
    assert decide(there, lost(59.5), LIMITS, Splits()) == Wait(pytest.approx(0.5))


def test_a_load_for_a_plan_goes_on_though_another_node_answers_by_now() -> None:
    there = nodes(LD, LG, P, plan=PAIR)
    assert decide(there, lost(6, target=PAIR), LIMITS, Splits()) == Ask(("air",), 0.3)
    there[2].asked_at = 106
    assert decide(there, lost(6, target=PAIR), LIMITS, Splits()) == Wait(2.0)
    there[1].meet(NodeEvent.LOADED, 107)
    there[1].asked_at = 106
    assert decide(there, lost(7, target=PAIR), LIMITS, Splits()) == around("max", "mini")


def test_no_load_is_cut_short_for_another_plan() -> None:
    there = nodes(LD, LG, A, plan=WHOLE)
    there[1].shard = Assignment("mini", 2, 3, 1, 1, 10)
    assert decide(there, lost(6), LIMITS, Splits()) == Wait(2.0)
    there[1].meet(NodeEvent.LOADED, 107)
    assert decide(there, lost(6), LIMITS, Splits()) == Ask(("mini",), 0.3)
    there[1].asked_at = 106
    assert decide(there, lost(6), LIMITS, Splits()) == Load(PAIR, ("mini",))


def opened(plan: Plan, idle_s: float = 0.0, **more: object) -> Situation:
    return replace(Situation(100.0, plan, is_open=True, idle_s=idle_s), **more)  # type: ignore[arg-type]


def grown(names: Sequence[str]) -> Plan:
    """A plan in which the first node has two layers."""
    return Plan(tuple(Assignment(name, i + (i > 0), i + 2, 1, 1, 10) for i, name in enumerate(names)), context=8)


@pytest.mark.parametrize(
    ("state", "action"),
    [(A, Wait(2.0)), (P, Load(WHOLE, ("air",))), (LG, Wait(2.0)), (LD, TakeOver(WHOLE, ("air",))), (ST, Wait(2.0))],
)
def test_a_node_that_is_back_loads_beside_the_open_chain_and_then_takes_over(state: NodeState, action: Action) -> None:
    there = [*nodes(AT, AT, P, plan=PAIR)[:2], record("air", state, WHOLE)]
    assert decide(there, opened(PAIR), LIMITS, Splits()) == action


def test_nodes_outside_of_the_chain_are_asked_now_and_then_and_stalled_ones_load_once_they_are_idle() -> None:
    there = nodes(AT, AT, ST, plan=PAIR)
    there[2].asked_at = -math.inf
    assert decide(there, opened(PAIR), LIMITS, Splits()) == Ask(("air",), 1.0)
    there[2].answer("air", 100)
    assert decide(there, opened(PAIR, now=101.0), LIMITS, Splits()) == Wait(2.0)
    assert decide(there, opened(PAIR, now=102.0), LIMITS, Splits()) == Ask(("air",), 1.0)
    there[2].answer("air", 102)
    there[2].meet(NodeEvent.IDLE, 102)
    assert decide(there, opened(PAIR, now=102.0), LIMITS, Splits()) == Load(WHOLE, ("air",))


def test_a_node_of_unknown_speed_is_measured_before_it_joins_a_plan_by_speed() -> None:
    there = [*nodes(AT, AT, P, plan=PAIR)[:2], record("air", P)]
    there[2].is_measured = False
    assert decide(there, opened(PAIR), LIMITS, Splits()) == Measure(("air",))
    there[2].is_measured = True
    assert decide(there, opened(PAIR), LIMITS, Splits()) == Load(WHOLE, ("air",))


def test_a_recovery_takes_in_a_node_of_unknown_speed_only_if_the_others_do_not_suffice() -> None:
    there = [*nodes(LD, LD, P, plan=PAIR)[:2], record("air", P)]
    there[2].is_measured = False
    situation = replace(lost(), plan=PAIR)
    assert decide(there, situation, LIMITS, Splits()) == Open(PAIR)
    there[1].meet(NodeEvent.STALLED, 100)
    assert decide(there, situation, LIMITS, Splits(2)) == Load(plan_over(("max", "air")), ("air",))


def test_pauses_grow_with_each_failure_in_a_row_up_to_ten_minutes() -> None:
    air, now, pauses = record("air", P), 100.0, []
    for _ in range(9):
        air.stall(now)
        pauses.append(air.retry_at - now)
        now = air.retry_at
        air.meet(NodeEvent.IDLE, now)
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    air.stall(now + 601)
    assert air.retry_at == now + 606, "it was sound for ten minutes"


def test_where_another_node_would_grow_a_split_without_growth_is_taken_or_an_idle_moment_is_awaited() -> None:
    present, best = plan_over(("max", "mini")), grown(ALL)

    there = [*nodes(AT, AT, P, plan=present)[:2], record("air", LD, WHOLE)]
    assert decide(there, opened(present), LIMITS, Splits(meanwhile=WHOLE, always=best)) == TakeOver(
        WHOLE, ("air",), best
    )
    there[2].meet(NodeEvent.ATTACHED, 100)
    assert isinstance(decide(there, opened(WHOLE, target=best), LIMITS, Splits(always=best)), Wait)
    assert decide(there, opened(WHOLE, 3.0, target=best), LIMITS, Splits(always=best)) == TakeOver(best, ())
    there = [*nodes(AT, AT, P, plan=present)[:2], record("air", LD, best)]
    waits = decide(there, opened(present), LIMITS, Splits(always=best))  # there is no such split
    assert isinstance(waits, Wait) and "air" in waits.why and "idle" in waits.why
    assert decide(there, opened(present, 3.0), LIMITS, Splits(always=best)) == TakeOver(best, ("air",))


def test_a_node_that_makes_nothing_better_is_left_out() -> None:
    there = [*nodes(AT, AT, P, plan=PAIR)[:2], record("air", P)]
    for splits in (Splits(always=PAIR), Splits(least=4)):
        assert decide(there, opened(PAIR), LIMITS, splits) == LeaveOut(("air",))
    there[2].is_spare = True
    assert decide(there, opened(PAIR), LIMITS, Splits(always=PAIR)) == Wait(2.0)


@pytest.mark.parametrize("state", NodeState)
def test_whatever_a_node_was_at_it_may_be_lost_replaced_stall_or_drain(state: NodeState) -> None:
    events = {NodeEvent.LOST: A, NodeEvent.REPLACED: P, NodeEvent.STALLED: ST, NodeEvent.DRAINS: DR}
    for event, following in events.items():
        air = record("air", state, WHOLE)
        air.meet(event, 101)
        assert air.state is following and (air.shard is None or following is DR)
    air = record("air", state, WHOLE)
    air.answer("another", 101)
    assert air.state is P and air.shard is None, "a process that was started anew holds no layers"


def test_the_lost_chain_s_plan_is_kept_for_the_same_nodes_and_a_shard_of_another_budget_is_loaded_again() -> None:
    there = nodes(LD, LD, LD, plan=WHOLE)
    assert decide(there, lost(), LIMITS, Splits(always=grown(ALL))) == Open(WHOLE)
    there[2].shard = replace(WHOLE.assignments[2], memory_bytes=9)
    assert decide(there, lost(), LIMITS, Splits()) == Load(WHOLE, ("air",))


def test_the_lost_chain_s_plan_is_kept_unless_a_node_came_back_with_too_little_memory_for_its_part() -> None:
    there, best = nodes(LD, LD, LD, plan=WHOLE), grown(ALL)
    there[2].memory_bytes = 1
    assert decide(there, lost(), LIMITS, Splits(always=best)) == Open(WHOLE), "it holds its part"
    there[2].shard = None
    assert decide(there, lost(), LIMITS, Splits(always=best)) == Load(best, ALL)
    there[2].memory_bytes = WHOLE.assignments[2].needed_bytes
    less = WHOLE.within({"air": WHOLE.assignments[2].needed_bytes})
    assert decide(there, lost(), LIMITS, Splits(always=best)) == Load(less, ("air",)), "caches have no more than that"


def test_a_node_that_is_started_again_before_it_loads_for_a_plan_has_its_present_memory() -> None:
    there, best = nodes(LD, LD, P, plan=WHOLE), grown(ALL)
    for memory_bytes, plan in ((5, WHOLE.within({"air": 5})), (20, WHOLE.within({"air": 20})), (1, best)):
        there[2].memory_bytes = memory_bytes
        names = ALL if plan is best else ("air",)
        assert decide(there, lost(target=WHOLE), LIMITS, Splits(always=best)) == Load(plan, names)
    assert decide(there, lost(target=WHOLE, lost_at=0.0), LIMITS, Splits()) == Load(WHOLE.within({"air": 1}), ("air",))
    there[2].state = LG
    assert decide(there, lost(target=WHOLE), LIMITS, Splits(always=best)) == Wait(2.0), "it reads its layers already"
