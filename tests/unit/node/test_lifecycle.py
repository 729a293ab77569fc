"""The states of a worker: which follow which."""

from worker.node.lifecycle import TRANSITIONS, WorkerState


def test_every_state_is_reached_only_what_is_loaded_is_attached_and_a_worker_may_end_at_any_time() -> None:
    assert set(TRANSITIONS) == set(WorkerState)
    reached, before = {WorkerState.EMPTY}, set[WorkerState]()
    while reached != before:
        before, reached = reached, reached.union(*(TRANSITIONS[state] for state in reached))
    assert reached == set(WorkerState)
    assert all(WorkerState.DRAINING in following for following in TRANSITIONS.values())
    assert TRANSITIONS[WorkerState.DRAINING] == {WorkerState.DRAINING}
    assert [state for state in WorkerState if WorkerState.ATTACHED in TRANSITIONS[state]] == [WorkerState.LOADED]
