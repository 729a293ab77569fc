"""Rows that a session on a grid of blocks reuses from another one."""

import pytest

from coordinator.decoding.decoders import Verified
from coordinator.sessions.scheduler import Scheduler
from protos.brigade_pb2 import Result, Sample
from tests.unit.fake_chain import costs_per_row, make_session, prompt_of


class OnGrid(Verified):
    grid = 4


@pytest.mark.parametrize(("num_shared", "num_reused"), [(39, 36), (36, 36), (35, 32), (17, 16), (16, 16), (15, 0)])
def test_tokens_of_a_grid_are_reused_in_whole_blocks(num_shared: int, num_reused: int) -> None:
    text = prompt_of(60)
    scheduler = Scheduler(2, costs_per_row())
    first = make_session(text, 1)
    second = make_session([*text[:num_shared], text[num_shared] ^ 1, 2, 3], 1, decoder=OnGrid())
    scheduler.submit(first)
    while first.finish_reason is None:
        frame = scheduler.schedule()
        assert frame is not None
        scheduler.commit(Result(epoch=1, step=frame.step, samples=[Sample(token=5)] if frame.windows[0].wanted else []))
    scheduler.close(first, keep=True)
    scheduler.submit(second)
    assert scheduler.schedule() is not None
    assert second.num_reused == num_reused
