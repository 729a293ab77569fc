"""A window that a stage cannot compute ends its own session: nobody else's, and nothing of it is used again."""

import pytest

from protos.brigade_pb2 import Failure, Result
from tests.unit.fake_chain import Rig, plain_answer, prompt_of


def failed(result: Result, slot: int | None) -> Result:
    """The result, had a stage not been able to take the window of this slot."""
    result.failures.append(Failure(slot=slot, kind="CacheMismatch", message="holds another prefix", node="mini"))
    for samples in (result.samples, result.guesses):
        for sample in [sample for sample in samples if sample.slot == slot]:
            samples.remove(sample)
    return result


@pytest.mark.parametrize("num_steps", [0, 3])
def test_only_the_session_of_a_failed_window_ends(num_steps: int) -> None:
    rig = Rig(num_stages=1, chunk=16, keep=True)
    sessions = [rig.submit(prompt_of(4, seed=seed), 12) for seed in range(3)]
    for _ in range(num_steps):
        rig.step()
    rig.send_all()
    failing, known = sessions[1], sessions[1].generated
    commits = rig.scheduler.commit(failed(rig.chain.receive(), failing.slot))
    assert (failing, []) in commits and len(commits) == 3
    assert (failing.finish_reason, failing.generated) == ("error", known)
    rig.scheduler.close(failing, keep=True)
    frame = rig.send_one()
    assert frame and list(frame.closed) == [failing.slot], "the stages do not hold the same of it: it is not kept"
    rig.run(sessions[0], sessions[2])
    for seed in (0, 2):
        assert sessions[seed].generated == plain_answer(prompt_of(4, seed=seed), 12)
    assert rig.scheduler.slots.num_kept == 2
    rig.end()


def test_what_else_of_a_failed_session_is_in_flight_is_dropped() -> None:
    """A prompt's chunks follow each other: where one fails the next do, too."""
    rig = Rig(num_stages=3, chunk=4)
    session = rig.submit(prompt_of(14), 5)
    assert len(rig.send_all()) == 4
    assert rig.scheduler.commit(failed(rig.chain.receive(), 0)) == [(session, [])]
    rig.scheduler.close(session)
    other = rig.submit(prompt_of(3), 5)
    assert other.slot == session.slot
    rig.send_all()
    for _ in range(3):
        assert rig.scheduler.commit(failed(rig.chain.receive(), 0)) == []
    rig.run(other)
    assert session.generated == [] and other.generated == plain_answer(prompt_of(3), 5)
    rig.end()
