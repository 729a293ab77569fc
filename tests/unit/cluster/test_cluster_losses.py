"""What a cluster does about single losses, in virtual time: each was once the end of requests that could go on."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from coordinator.cluster.deployment import OwnCopy
from coordinator.planning.recovery import Action, LeaveOut, Limits, Load, NodeEvent, NodeState, decide
from coordinator.sessions.request import Request
from tests.unit.cluster import fake_network, test_cluster_states
from tests.unit.cluster.test_cluster_states import Cluster3
from worker.errors import BrigadeError, ModelError, NodeSilent, StageLost
from worker.node.rpc_errors import error_named

WHOLE = ["coordinator", "a", "b", "c"]


@pytest.fixture
def cluster() -> Iterator[Cluster3]:
    found = Cluster3(Limits())
    yield found
    found.end()


def restart(place: Any) -> None:
    place.end()
    place.start()


@pytest.mark.parametrize("load_s", [20.0, 70.0, 300.0])
def test_a_returned_node_loads_for_minutes_while_the_old_chain_answers(cluster: Cluster3, load_s: float) -> None:
    a = cluster.world.places["a"]
    cluster.act(a.end, wait_s=30)
    assert cluster.members == ["coordinator", "b", "c"]
    a.load_s = load_s
    cluster.act(a.start)
    until = cluster.time.now + load_s
    while cluster.time.now < until - 1:
        cluster.asked.clear()
        cluster.submit(Request((1, 2, 3), 20), wait_s=5)
        assert cluster.all_answered, "it waited for the load"
    cluster.wait(15)
    assert cluster.members == WHOLE and not cluster.cluster.missing and cluster.cluster.num_recoveries == 1


def test_requests_go_on_with_the_costs_that_a_chain_of_as_many_nodes_has_learned(cluster: Cluster3) -> None:
    before = cluster.cluster.chain
    cluster.submit(Request((1, 2, 3), 150), wait_s=0.1)
    cluster.act(restart, cluster.world.places["a"], wait_s=30)
    after = cluster.cluster.chain
    assert after is not before and cluster.members == WHOLE
    assert (after.costs, after.answer_costs) == (before.costs, before.answer_costs)
    cluster.submit(Request((1, 2, 3), 150), wait_s=0.1)
    cluster.act(cluster.world.places["a"].end, wait_s=30)
    assert cluster.members == ["coordinator", "b", "c"] and cluster.cluster.chain.costs is not after.costs


def test_a_load_that_fails_beside_others_ends_none_of_them(cluster: Cluster3) -> None:
    """Two nodes come back; one of them is started again in the middle of its load."""
    places = cluster.world.places
    for name in "ab":
        cluster.act(places[name].end)
    cluster.wait(30)
    loads = places["b"].num_loads
    for name in "ab":
        places[name].load_s = 180.0
        cluster.act(places[name].start)
    cluster.wait(100)
    cluster.act(restart, places["a"], wait_s=400)
    assert cluster.members == WHOLE and places["b"].num_loads == loads + 1


def refuse_loads(cluster: Cluster3) -> list[str]:
    """Have node a refuse to load with the first of these reasons, as long as there is one."""
    refusals = ["its weights differ"]

    async def load(deployment: Any, stage: int, *more: Any) -> None:
        if refusals and deployment.peers[stage - 1].name == "a":
            raise ModelError(refusals[0], node="a")
        await fake_network.load_worker(deployment, stage, *more)

    cluster.patch.setattr("coordinator.cluster.cluster.load_worker", load)
    return refusals


def test_a_worker_that_refused_to_load_is_tried_at_once_when_another_process_runs_there(cluster: Cluster3) -> None:
    refusals = refuse_loads(cluster)
    a = cluster.world.places["a"]
    cluster.act(restart, a, wait_s=200)
    assert cluster.members == ["coordinator", "b", "c"] and "its weights differ" in cluster.cluster.why_missing
    refusals.clear()
    cluster.act(restart, a, wait_s=20)
    assert cluster.members == WHOLE and not cluster.cluster.why_missing


def test_without_a_chain_a_fixed_worker_is_tried_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_cluster_states, "MEMORY", 2000)  # all nodes are needed
    cluster = Cluster3(Limits())
    refusals = refuse_loads(cluster)
    cluster.act(restart, cluster.world.places["a"], wait_s=37)
    refusals.clear()
    cluster.act(restart, cluster.world.places["a"], wait_s=10)
    assert cluster.members == WHOLE and cluster.cluster.chain in cluster.world.chains
    cluster.end()


def test_a_worker_that_shuts_down_while_the_first_chain_loads_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    class Draining(fake_network.World):
        def install(self, patch: pytest.MonkeyPatch) -> None:
            super().install(patch)
            self.places["a"].drain()

    monkeypatch.setattr(test_cluster_states, "World", Draining)
    cluster = Cluster3(Limits())
    assert cluster.members == [name for name in WHOLE if name != "a"]
    cluster.act(cluster.world.places["a"].end)
    cluster.act(cluster.world.places["a"].start, wait_s=20)
    assert cluster.members == WHOLE
    cluster.end()


def test_why_a_worker_that_crashes_again_and_again_is_left_out_is_known(cluster: Cluster3) -> None:
    a = cluster.world.places["a"]

    async def load(deployment: Any, stage: int, *more: Any) -> None:
        if deployment.peers[stage - 1].name == "a":
            restart(a)
            raise StageLost("closed the connection while it loaded", node="a")
        await fake_network.load_worker(deployment, stage, *more)

    cluster.patch.setattr("coordinator.cluster.cluster.load_worker", load)
    cluster.act(restart, a, wait_s=200)
    assert cluster.members == ["coordinator", "b", "c"] and "while it loaded" in cluster.cluster.why_missing
    assert cluster.cluster.nodes.workers["a"].num_failures > 3, "it is tried less and less often"


def test_a_hung_worker_that_misses_an_answer_is_still_a_hung_one(cluster: Cluster3) -> None:
    a, record = cluster.world.places["a"], cluster.cluster.nodes.workers["a"]
    cluster.act(setattr, a, "is_hung", True)
    cluster.submit(Request((1, 2, 3), 20), wait_s=12)
    assert record.state is NodeState.STALLED
    cluster.act(setattr, a, "is_stopped", True, wait_s=3)
    cluster.act(setattr, a, "is_stopped", False, wait_s=30)
    assert record.state is NodeState.STALLED and "a" not in cluster.members
    cluster.act(setattr, a, "is_hung", False, wait_s=60)
    assert cluster.members == WHOLE


def test_a_spare_that_helped_out_is_not_missed_once_the_plan_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    real = test_cluster_states.plan
    without = lambda spec, there, *more: real(spec, [each for each in there if each.name != "a"], *more)  # noqa: E731
    monkeypatch.setattr(test_cluster_states, "plan", without)
    cluster = Cluster3(Limits())
    places = cluster.world.places
    cluster.act(places["b"].end, wait_s=30)
    assert "a" in cluster.members
    cluster.act(places["a"].end, wait_s=30)
    cluster.act(places["b"].start, wait_s=600)
    assert cluster.members == ["coordinator", "b", "c"] and not cluster.cluster.missing
    cluster.end()


@pytest.mark.parametrize("error", [RuntimeError("odd"), asyncio.CancelledError()])  # gRPC cancels what it closes
def test_a_load_that_ends_by_an_unknown_error_or_is_cancelled_is_begun_again(
    cluster: Cluster3, error: BaseException
) -> None:
    errors = [error]

    async def load(*arguments: Any) -> None:
        if errors:
            raise errors.pop()
        await fake_network.load_worker(*arguments)

    a = cluster.world.places["a"]
    cluster.act(a.end, wait_s=30)
    cluster.patch.setattr("coordinator.cluster.cluster.load_worker", load)
    cluster.act(a.start, wait_s=30)
    assert not errors and cluster.members == WHOLE
    assert sum("internal error: RuntimeError('odd')" in line for line in cluster.said) == isinstance(
        error, RuntimeError
    )


def test_a_recovery_is_bounded_by_stalls_and_not_by_the_length_of_a_load(cluster: Cluster3) -> None:
    """All nodes are started again, as after a power cut, and the model takes three minutes to be read."""
    cluster.submit(Request((1, 2, 3), 60), wait_s=1)
    for place in cluster.world.places.values():
        place.load_s = 180.0
        cluster.act(restart, place)
    cluster.wait(100)
    cluster.act(restart, cluster.world.places["a"], wait_s=300)
    assert cluster.all_answered and cluster.members == WHOLE


def test_of_two_losses_only_time_without_a_chain_counts(cluster: Cluster3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them lies one long replay, without a token for a minute."""
    a = cluster.world.places["a"]
    monkeypatch.setattr(fake_network, "STEP_S", 0.3)
    monkeypatch.setattr(fake_network, "HUNG_S", 60.0)
    cluster.submit(Request(tuple(i % 40 for i in range(120)), 60), wait_s=12)
    monkeypatch.setattr(fake_network, "STEP_S", 25.0)
    a.load_s = 20.0
    cluster.act(restart, a, wait_s=62)
    cluster.act(restart, a, wait_s=30)
    monkeypatch.setattr(fake_network, "STEP_S", 0.05)
    cluster.wait(200)
    assert cluster.all_answered


def test_a_node_whose_engine_stood_still_is_taken_back_once_it_is_idle(cluster: Cluster3) -> None:
    b = cluster.world.places["b"]
    cluster.submit(Request((1, 2, 3), 150), wait_s=1)
    cluster.act(setattr, b, "is_hung", True, wait_s=9)
    assert "b" not in cluster.members
    cluster.wait(60)
    assert "b" not in cluster.members, "it still hangs"
    cluster.act(setattr, b, "is_hung", False, wait_s=60)
    assert cluster.members == WHOLE and cluster.all_answered


def test_an_unknown_error_ends_no_request_and_a_node_that_repeats_it_is_ruled_out(cluster: Cluster3) -> None:
    error: BrigadeError = error_named("InternalError", "internal error: RuntimeError('GPU Timeout Error')", "a")
    for i in range(3):
        cluster.submit(Request((i, 2, 3), 60))
    cluster.wait(0.5)
    chain: Any = cluster.cluster.chain
    cluster.act(chain.lose, error, wait_s=3)
    assert cluster.members == WHOLE
    chain = cluster.cluster.chain
    cluster.act(chain.lose, error, wait_s=1)
    assert "a" not in cluster.members
    cluster.wait(60)
    assert cluster.members == WHOLE and cluster.all_answered


def test_a_recovery_ends_when_the_only_client_leaves(cluster: Cluster3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the node that is missing would never be looked for."""
    cluster.submit(Request(tuple(range(40)), 60), wait_s=1)
    monkeypatch.setattr(fake_network, "STEP_S", 3.0)
    cluster.act(cluster.world.places["a"].end, wait_s=7)
    [task] = cluster.asked
    cluster.asked.clear()
    cluster.act(task.cancel, wait_s=20)
    assert cluster.recovered
    cluster.act(cluster.world.places["a"].start, wait_s=20)
    assert cluster.members == WHOLE


def test_workers_that_hand_over_in_turn_cost_nothing(cluster: Cluster3, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is fed while three workers are updated in turn: none of them is a loss under it."""
    monkeypatch.setattr(fake_network, "STEP_S", 3.0)
    monkeypatch.setattr(fake_network, "HUNG_S", 60.0)
    cluster.submit(Request(tuple(i % 40 for i in range(150)), 20), wait_s=4)
    for place in cluster.world.places.values():
        cluster.act(place.drain, wait_s=11)
        cluster.act(place.start, wait_s=3)
    monkeypatch.setattr(fake_network, "STEP_S", 0.05)
    cluster.wait(100)
    assert cluster.all_answered


def test_a_node_that_hangs_and_is_started_again_while_a_chain_is_opened_holds_nothing_up(cluster: Cluster3) -> None:
    """Another one hands over meanwhile: the chain is opened with both, and not given up after a minute."""
    places = cluster.world.places
    cluster.act(setattr, places["b"], "is_hung", True)
    cluster.submit(Request((1, 2, 3), 20))
    cluster.act(places["c"].drain, wait_s=1)
    cluster.act(restart, places["b"], wait_s=30)
    assert cluster.all_answered and cluster.members == WHOLE


@pytest.mark.parametrize(("hung", "lost"), [("b", "a"), ("ab", "c")])  # c is our own: it is started again
def test_nodes_that_hang_while_the_next_chain_opens_are_left_out_of_it(cluster: Cluster3, hung: str, lost: str) -> None:
    """One try must not use up the time of the whole recovery."""
    places = cluster.world.places
    cluster.submit(Request((1, 2, 3), 150), wait_s=1)
    for name in hung:
        cluster.act(setattr, places[name], "is_hung", True)
    cluster.act(places[lost].end, wait_s=50 if len(hung) == 1 else 60)
    assert cluster.members == ["coordinator", "c"] and cluster.all_answered
    assert cluster.cluster.nodes.workers["b"].state is NodeState.STALLED


@pytest.mark.parametrize("rejoin_s", [0.0, 5.0])  # the chain goes on without it, or waits for it
def test_a_process_of_our_own_that_hangs_before_it_joins_is_ended_and_started_again(rejoin_s: float) -> None:
    cluster = Cluster3(Limits(rejoin_s=rejoin_s))
    place = cluster.world.places["c"]
    cluster.act(place.end)
    for num_starts in (2, 3):  # the next process has as much time
        while place.num_starts < num_starts:
            cluster.wait(0.05)
        began = cluster.time.now
        cluster.act(cluster.world.stop, place)
        while place.num_starts == num_starts:
            cluster.wait(0.05)
        assert 3 < cluster.time.now - began < 15
    cluster.wait(15)
    assert place.num_starts == 4 and cluster.members == WHOLE
    cluster.end()


@pytest.mark.parametrize(
    ("is_overloaded", "is_stopped", "num_starts"), [(False, False, 2), (True, False, 1), (True, True, 2)]
)
def test_a_silent_process_of_our_own_is_ended_at_once_unless_it_may_lack_cpu_time(
    cluster: Cluster3, monkeypatch: pytest.MonkeyPatch, is_overloaded: bool, is_stopped: bool, num_starts: int
) -> None:
    """Then it has three seconds more to answer."""
    place, chain = cluster.world.places["c"], cluster.cluster.chain
    monkeypatch.setattr("coordinator.cluster.cluster.is_overloaded", lambda: is_overloaded)
    place.is_stopped = is_stopped
    cluster.act(chain.lose, NodeSilent("stopped answering", node="c"), wait_s=30)  # type: ignore[attr-defined]
    assert place.num_starts == num_starts and cluster.members == WHOLE


@pytest.mark.parametrize(("is_overloaded", "num_starts"), [(False, 2), (True, 1)])
def test_so_is_one_that_is_silent_while_a_chain_opens(
    cluster: Cluster3, monkeypatch: pytest.MonkeyPatch, is_overloaded: bool, num_starts: int
) -> None:
    opened, errors = fake_network.WorldChain.open, [NodeSilent("no answer", node="c")]

    async def fail_once(chain: Any, *how: Any) -> None:
        if errors:
            raise errors.pop()
        await opened(chain, *how)

    monkeypatch.setattr("coordinator.cluster.cluster.is_overloaded", lambda: is_overloaded)
    monkeypatch.setattr(fake_network.WorldChain, "open", fail_once)
    cluster.act(cluster.world.places["a"].end, wait_s=30)
    assert not errors and cluster.world.places["c"].num_starts == num_starts and "c" in cluster.members
    assert cluster.recovered[0].story.startswith("worker a: closed the connection; worker c: no answer; going on")


def test_one_whose_load_stands_still_is_ended_at_once_on_a_busy_machine_too(
    cluster: Cluster3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has had two minutes."""
    errors = [NodeSilent("its load stands still", node="c")]

    async def load(deployment: Any, stage: int, *more: Any) -> None:
        if errors and deployment.peers[stage - 1].name == "c":
            raise errors.pop()
        await fake_network.load_worker(deployment, stage, *more)

    monkeypatch.setattr("coordinator.cluster.cluster.is_overloaded", lambda: True)
    cluster.patch.setattr("coordinator.cluster.cluster.load_worker", load)
    cluster.act(cluster.world.places["c"].end, wait_s=60)
    assert not errors and cluster.world.places["c"].num_starts == 3 and cluster.members == WHOLE


def test_a_process_of_our_own_that_refuses_is_left_to_the_user(cluster: Cluster3) -> None:
    place = cluster.world.places["c"]
    cluster.act(place.end)
    while place.num_starts < 2:
        cluster.wait(0.05)
    cluster.act(setattr, place, "is_foreign", True, wait_s=30)
    assert place.num_starts == 2


def test_a_node_that_comes_back_with_a_certificate_of_another_authority_is_reported_once(cluster: Cluster3) -> None:
    a = cluster.world.places["a"]
    cluster.act(a.end, wait_s=10)
    cluster.act(setattr, a, "is_foreign", True)
    cluster.act(a.start, wait_s=3)
    told = [line for line in cluster.said if "its certificate is of another authority" in line]
    assert told == ["worker a: its certificate is of another authority; it cannot take part until this is fixed"]
    cluster.wait(30)
    assert cluster.said.count(told[0]) == 1
    cluster.act(setattr, a, "is_foreign", False, wait_s=10)
    assert cluster.members == WHOLE


def test_a_node_that_is_lost_while_a_plan_is_searched_for_is_not_loaded(cluster: Cluster3) -> None:
    a, worker = cluster.world.places["a"], cluster.cluster.nodes.workers["a"]
    cluster.act(a.end, wait_s=30)

    async def search(call: Callable[[], Any]) -> Any:
        found = call()
        if worker.state is NodeState.PRESENT:
            a.end()
            worker.meet(NodeEvent.LOST, cluster.time.now)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordinator.cluster.cluster.run_in_thread", search)
        cluster.act(a.start, wait_s=5)
    assert not a.is_up and not any("KeyError" in line for line in cluster.said)
    cluster.act(a.start, wait_s=30)
    assert cluster.members == WHOLE


def leave_out(cluster: Cluster3, name: str) -> None:
    """Have a node return that the best plan leaves out."""

    def left_out(*arguments: Any) -> Action:
        action = decide(*arguments)
        return LeaveOut(action.names) if isinstance(action, Load) else action

    cluster.act(cluster.world.places[name].end, wait_s=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordinator.cluster.cluster.decide", left_out)
        cluster.act(cluster.world.places[name].start, wait_s=30)


def test_a_returned_node_that_is_left_out_is_reported(cluster: Cluster3) -> None:
    leave_out(cluster, "a")
    assert cluster.said[-1].startswith("going on without a, ")
    assert cluster.cluster.nodes.workers["a"].is_spare and "a" not in cluster.members


def test_a_spare_node_that_has_replaced_a_lost_one_rejoins_after_its_own_restart(cluster: Cluster3) -> None:
    places, replaced = cluster.world.places, ["coordinator", "a", "c"]
    leave_out(cluster, "a")
    cluster.act(places["b"].end, wait_s=30)
    assert cluster.members == replaced and cluster.cluster.missing == ["b"]
    cluster.act(places["a"].end, wait_s=30)
    assert cluster.members == ["coordinator", "c"] and cluster.cluster.missing == ["a", "b"]
    cluster.act(places["a"].start, wait_s=30)
    assert cluster.members == replaced


@pytest.mark.parametrize("blamed", ["a", "b"])
def test_a_node_that_answers_and_cannot_join_ends_the_others_chain_ever_more_rarely(
    cluster: Cluster3, monkeypatch: pytest.MonkeyPatch, blamed: str
) -> None:
    """As where frames do not reach it, or its own do not reach the next node, while its other port is open."""
    opened, tries, is_cut = fake_network.WorldChain.open, list[float](), True

    async def open_chain(chain: Any, *how: Any) -> None:
        if is_cut and "a" in chain.plan.names and len(tries) < 20:
            tries.append(cluster.time.now)
            raise StageLost("did not take the hop within 5 s", node=blamed)
        await opened(chain, *how)

    monkeypatch.setattr(fake_network.WorldChain, "open", open_chain)
    a = cluster.world.places["a"]
    cluster.act(a.end, wait_s=30)
    cluster.act(a.start)
    for _ in range(10):
        cluster.submit(Request((1, 2, 3), 20), wait_s=200)
    assert cluster.all_answered and cluster.members == ["coordinator", "b", "c"]
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses[:3] == pytest.approx([5, 10, 20], abs=5) and pauses[-2:] == pytest.approx([600, 600], abs=10)
    is_cut = False
    cluster.wait(620)
    assert cluster.members == WHOLE


def test_an_error_beside_an_open_chain_keeps_no_node_out(cluster: Cluster3, monkeypatch: pytest.MonkeyPatch) -> None:
    note_draining, errors = cluster.cluster.note_draining, [KeyError("odd")]

    def fail_once() -> None:
        note_draining()
        if errors:
            raise errors.pop()

    a = cluster.world.places["a"]
    cluster.act(a.end, wait_s=30)
    monkeypatch.setattr(cluster.cluster, "note_draining", fail_once)
    cluster.wait(5)
    assert not errors and "internal error: KeyError('odd')" in cluster.said[-1]
    cluster.act(a.start, wait_s=30)
    assert cluster.members == WHOLE


def test_a_cluster_that_is_closed_while_its_model_is_described_leaves_no_task(cluster: Cluster3) -> None:
    begun = asyncio.Event()

    async def describe(checkpoint: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    a = cluster.world.places["a"]
    cluster.act(a.end, wait_s=30)
    cluster.patch.setattr(OwnCopy, "of", describe)
    cluster.act(a.start, wait_s=10)
    assert begun.is_set()


def test_a_chain_that_opens_beside_a_load_always_has_time(cluster: Cluster3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a node that joins would be blamed."""
    within: list[float | None] = []

    async def open_within(chain: Any, progress: Any, within_s: float | None) -> None:
        within.append(within_s)

    monkeypatch.setattr(fake_network.WorldChain, "open", open_within)
    recovery = cluster.cluster.recovery
    recovery.error, recovery.spent_s = StageLost("gone", node="a"), Limits().recovery_s
    cluster.cluster.nodes.workers["c"].state = NodeState.LOADING
    cluster.run(cluster.cluster.open_chain(cluster.cluster.chain.plan, recovery, lambda node, report: None))
    assert within == [5.0]
