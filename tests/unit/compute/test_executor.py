"""What an executor concludes from the times of its steps."""

from pathlib import Path
from typing import Any

import pytest

from protos.brigade_pb2 import Frame, Opening, Result, Window
from tests.tiny import make_model
from worker.compute.executor import Executor, share_of_begin
from worker.compute.shard import Shard
from worker.memory.history import History
from worker.model.checkpoint import open_folder
from worker.model.describe import describe


@pytest.mark.parametrize(
    ("times_us", "share"),
    [
        ((0, 900, 900, 1000), 0.9),  # a CPU computes in `begin`
        ((0, 100, 100, 1000), 0.1),  # a device that takes longer than it takes to begin
        ((0, 100, 400, 1000), 0.1),  # something else was begun meanwhile, and the device was still busy
        ((0, 500, 1100, 1110), 0.98),  # the device was done before that: its own time is unknown
        ((0, 0, 0, 0), 0.0),
    ],
)
def test_steps_overlap_where_the_device_takes_longer(times_us: tuple[int, int, int, int], share: float) -> None:
    assert share_of_begin(*(1000 * time for time in times_us)) == pytest.approx(share, abs=0.001)


def test_only_a_prompt_chunk_that_is_alone_tells_what_memory_it_took(tmp_path: Path) -> None:
    """MLX has one peak: of steps that overlap nobody can tell which one it is of."""
    checkpoint = open_folder(make_model(tmp_path / "model"))
    spec = describe(checkpoint)
    shard = Shard(checkpoint, 0, spec.num_layers)
    shard.materialise(lambda num_bytes: None)
    executor = Executor(shard, 0, spec.dtype)

    def chunk(slot: int, num_rows: int, **more: Any) -> Frame:
        window = Window(slot=slot, prefix_hash=History().prefix_hash(0), tokens=[5] * num_rows, **more)
        return Frame(opened=[Opening(slot=slot)], windows=[window])

    def scratch(*frames: Frame) -> list[bool]:
        steps = [executor.begin(frame, None, 0, 0) for frame in frames]
        results = [executor.finish(step)[0] for step in steps]
        return [isinstance(each, Result) and each.timings[-1].scratch_bytes > 0 for each in results]

    assert scratch(chunk(0, 64)) == scratch(chunk(0, 64, wanted=1)) == [True]
    assert scratch(chunk(0, 64), chunk(1, 64)) == [False, False]
    assert scratch(chunk(0, 64, wanted=64)) == scratch(chunk(0, 8)) == [False]
    both = chunk(0, 64)
    both.MergeFrom(chunk(1, 64))
    assert scratch(both) == [False]
