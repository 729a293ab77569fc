"""The plans of a model's chains: by speed for the least context, and then with all the context that has room."""

from coordinator.planning.contexts import Contexts, plan_largest
from coordinator.planning.replan import Replan
from tests.unit.planning.test_fastest import GB, ROOMY, model, names, nodes, surveyed

SPEC = model([GB] * 4, per_token=1000)
SURVEY = surveyed(SPEC, 400, 100, 200)


def test_the_fastest_plan_gets_the_largest_context_that_it_has_room_for() -> None:
    """The second node is left out, though with it there would be room for a longer one."""
    where = nodes(2 * GB + 2 * 1000 * 1024, ROOMY, ROOMY)
    found = Replan(SPEC, SURVEY)(where, Contexts(512, 4096))
    assert (names(found), found.layers, found.context) == (["n0", "n2"], [2, 2], 1024)
    assert plan_largest(SPEC, where, Contexts(512, 4096)).context == 4096


def test_what_a_loss_leaves_is_planned_by_speed_too() -> None:
    where = nodes(2 * GB + 4 * 1000 * 256, ROOMY, ROOMY)
    assert names(Replan(SPEC, SURVEY)(where[:2], Contexts.exactly(256))) == ["n0", "n1"]


def test_what_cannot_be_planned_by_speed_is_planned_by_bytes() -> None:
    contexts = Contexts.exactly(256)
    for where, replan in ((nodes(ROOMY, ROOMY), Replan(SPEC)), (nodes(GB, GB), Replan(SPEC, SURVEY))):
        assert replan(where, contexts) == plan_largest(SPEC, where, contexts)


def test_whoever_wants_a_chain_gets_one_if_there_are_workers() -> None:
    replan = Replan(SPEC, SURVEY, may_be_alone=False)
    assert names(replan(nodes(ROOMY, ROOMY, ROOMY), Contexts.exactly(256))) == ["n0", "n2"]
    assert names(replan(nodes(ROOMY), Contexts.exactly(256))) == ["n0"]
    assert names(Replan(SPEC, SURVEY)(nodes(ROOMY, ROOMY, ROOMY), Contexts.exactly(256))) == ["n0"]


def test_for_throughput_all_are_kept_at_work_and_there_is_memory_for_all_requests_if_there_can_be() -> None:
    """Layers of 2.5, 10 and 5 ms: three on the first node, if they have room there with the caches of four sessions."""
    contexts = Contexts.exactly(256)
    replan = Replan(SPEC, SURVEY, objective="throughput", num_requests=4)
    assert Replan(SPEC, SURVEY)(nodes(ROOMY, ROOMY, ROOMY), contexts).layers == [4]
    assert replan(nodes(ROOMY, ROOMY, ROOMY), contexts).layers == [3, 1]
    whole = 4 * (GB + 1000 * 256)  # with one session's caches
    assert Replan(SPEC, SURVEY)(nodes(whole, ROOMY, ROOMY), contexts).layers == [4], "latency is of one session"
    for sessions, first in ((4, 3), (3, 2)):
        room = 3 * GB + 3 * 1000 * 256 * sessions
        assert replan(nodes(room, ROOMY, ROOMY), contexts).layers[0] == first
    of_one = [count * (GB + 1000 * 256) for count in (3, 1, 1)]
    assert replan(nodes(*of_one), contexts).layers == [3, 1], "better for one session than by bytes"
