"""Background sessions: they take little of the others' time and memory, and go on."""

from tests.unit.fake_chain import Rig, plain_answer, prompt_of

BACKGROUND = 1


def test_the_background_has_one_frame_in_so_many_until_it_is_alone() -> None:
    rig = Rig(num_stages=2)
    others = [rig.submit(prompt_of(20, seed=9 + n), 40, priority=BACKGROUND) for n in range(3)]
    while min(session.num_generated for session in others) < 2:
        rig.step()
    better = [rig.submit(prompt_of(5, seed=n), 400) for n in range(3)]
    late = rig.submit(prompt_of(20, seed=20), 5, priority=BACKGROUND)
    while not all(session.num_generated for session in better):
        rig.step()
    first, before = len(rig.chain.frames), [session.num_generated for session in others]
    rig.run(*better)
    frames = [{window.slot for window in frame.windows} for frame in rig.chain.frames[first:]]
    slots = {session.slot for session in better}
    shared = [frame for frame in frames if frame - slots]
    assert all(not frame & slots for frame in shared), "a lane with the background waits for it"
    assert 0 < len(shared) <= len(frames) / 20
    assert all(session.num_generated > count for session, count in zip(others, before, strict=True))
    first = len(rig.chain.frames)
    rig.run(*others, late)
    assert len(rig.chain.frames) - first < 3 * 40 + 20
    for session in (*others, *better, late):
        assert session.generated == plain_answer(session.request.prompt, session.max_tokens)
    rig.end()


def test_a_better_session_takes_memory_and_turns_from_the_background() -> None:
    rig = Rig(num_stages=1, budget=600)
    others = [rig.submit(prompt_of(30, seed=9 + n), 200, priority=BACKGROUND) for n in range(4)]
    while rig.scheduler.slots.num_waiting < 1 or not others[0].num_generated:
        rig.step()
    worst, better = rig.submit(prompt_of(5, seed=2), 60, priority=2), rig.submit(prompt_of(5, seed=1), 60)
    assert better.slot is not None and worst.slot is None and any(session.slot is None for session in others)
    rig.run(better)
    assert any(session.finish_reason is None for session in others)
    rig.run(*others, worst)
    for session in (*others, better, worst):
        assert session.generated == plain_answer(session.request.prompt, session.max_tokens)
    rig.end()
