"""What an executor concludes from the times of its steps."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from protos.brigade_pb2 import Frame, Opening, Piece, Result, Store, Window
from tests.tiny import make_model
from worker.compute import executor as executor_module
from worker.compute.executor import Executor
from worker.compute.shard import Shard
from worker.compute.step import share_of_begin
from worker.errors import CacheMismatch, PrefixLost
from worker.memory.history import History
from worker.memory.slot_caches import CacheSegment
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


@pytest.fixture
def executor(tmp_path: Path) -> Executor:
    return executor_in(tmp_path)


def executor_in(folder: Path, **more: Any) -> Executor:
    """Of a whole tiny model in float32."""
    checkpoint = open_folder(make_model(folder / "model"))
    spec = describe(checkpoint)
    shard = Shard(checkpoint, 0, spec.num_layers)
    shard.materialise(lambda num_bytes: None)
    return Executor(shard, 0, spec.dtype, **more)


@pytest.mark.parametrize(
    "rows",
    [
        (mx.zeros((1, 9, 63)),),
        (mx.zeros((2, 9, 64)),),
        (mx.zeros((9, 64)),),
        (mx.zeros((1, 9, 64), mx.float16),),
        (mx.zeros((1, 9, 64)), mx.zeros((1, 9, 64))),
        (mx.zeros((1, 10, 64)),),
        (),
    ],
    ids=lambda rows: " ".join(f"{each.shape}" for each in rows),
)
def test_rows_of_a_prompt_that_are_no_output_of_this_model_are_refused(
    executor: Executor, rows: tuple[mx.array, ...]
) -> None:
    window = Window(slot=0, prefix_hash=History().prefix_hash(0), tokens=range(9))
    executor.step(Frame(opened=[Opening(slot=0)], windows=[window]), 0)
    executor.put_segments(0, [CacheSegment(0, 0, 0, (mx.zeros((1, 9, 64)),), (), is_output=True)])
    executor.put_segments(1, [CacheSegment(0, 0, 0, rows, (), is_output=True)])  # a slot that has been closed
    with pytest.raises(CacheMismatch, match="expected rows "):
        executor.put_segments(0, [CacheSegment(0, 0, 0, rows, (), is_output=True)])


@pytest.mark.parametrize("most", [1, 6000, 1 << 22])
def test_segments_of_several_layers_share_a_message_as_far_as_they_fit(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(executor_module, "MESSAGE_BYTES", most)
    executor.returns_segments = True
    window = Window(slot=0, prefix_hash=History().prefix_hash(0), tokens=range(9))
    step = executor.begin(Frame(opened=[Opening(slot=0)], windows=[window]), (), 0, 0)
    messages = [segments for _, segments in step.segments]
    sizes = [[sum(array.nbytes for array in each.arrays) for each in segments] for segments in messages]
    rows = {number: 0 for number in range(4)}
    for each in (each for segments in messages for each in segments):
        rows[each.number] += each.keys[0].shape[2]
    assert rows == dict.fromkeys(range(4), 9)
    assert all(sum(each) <= most or len(each) == 1 for each in sizes)
    assert all(sum(one) + other[0] > most for one, other in pairwise(sizes)), "none has room for the next segment"
    executor.finish(step)


def test_only_a_prompt_chunk_that_is_alone_tells_what_memory_it_took(executor: Executor) -> None:
    """MLX has one peak: of steps that overlap nobody can tell which one it is of."""

    def chunk(slot: int, num_rows: int, **more: Any) -> Frame:
        window = Window(slot=slot, prefix_hash=History().prefix_hash(0), tokens=[5] * num_rows, **more)
        return Frame(opened=[Opening(slot=slot)], windows=[window])

    def scratch(*frames: Frame) -> list[bool]:
        steps = [executor.begin(frame, (), 0, 0) for frame in frames]
        results = [executor.finish(step)[0] for step in steps]
        return [isinstance(each, Result) and each.timings[-1].scratch_bytes > 0 for each in results]

    assert scratch(chunk(0, 64)) == scratch(chunk(0, 64, wanted=1)) == [True]
    assert scratch(chunk(0, 64), chunk(1, 64)) == [False, False]
    assert scratch(chunk(0, 64, wanted=64)) == scratch(chunk(0, 8)) == [False]
    both = chunk(0, 64)
    both.MergeFrom(chunk(1, 64))
    assert scratch(both) == [False]


class Disk:
    """Pieces in memory."""

    def __init__(self) -> None:
        self.pieces: dict[bytes, Sequence[CacheSegment]] = {}
        self.takes = True

    def read(self, name: bytes, upcoming: Sequence[bytes]) -> Sequence[CacheSegment]:
        if name not in self.pieces:
            raise PrefixLost("not here")
        return self.pieces[name]

    def discard(self, name: bytes) -> None:
        del self.pieces[name]

    def put(self, piece: Piece, segments: Sequence[CacheSegment]) -> bool:
        if self.takes:
            self.pieces[piece.name] = segments
        return self.takes

    def close(self) -> None: ...


def test_nothing_leaves_a_step_that_the_device_computed_wrongly_however_late_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, late, history = Disk(), list[bool](), History(range(1, 41))
    executor = executor_in(tmp_path, pieces=disk)

    def fail(*, waits: bool) -> None:
        late.append(waits)
        raise RuntimeError("Insufficient Memory")

    window = Window(prefix_hash=History().prefix_hash(0), tokens=history.tokens, wanted=1)
    stored = Store(piece=Piece(end=40), prefix_hash=history.prefix_hash(40))
    for frame in Frame(opened=[Opening()], windows=[window]), Frame(stores=[stored]):
        step = executor.begin(frame, (), 0, 0)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            patch.setattr(executor_module, "raise_late_errors", fail)
            executor.finish(step)
    assert late == [False, True] and not disk.pieces


def test_a_piece_is_written_only_of_the_tokens_that_it_names_and_read_back_to_the_last_bit(tmp_path: Path) -> None:
    disk, name = Disk(), bytes(16)
    executor = executor_in(tmp_path, pieces=disk)
    tokens, other = History(range(1, 41)), History(range(2, 42))

    def step(frame: Frame) -> Result:
        executor.check(frame)
        result = executor.step(frame, 0)
        assert isinstance(result, Result)
        return result

    def window(history: History, slot: int, base: int, **more: Any) -> Window:
        prefix_hash = history.prefix_hash(base)
        return Window(slot=slot, base=base, prefix_hash=prefix_hash, tokens=history.tokens[base:], **more)

    def store(history: History, slot: int = 0) -> Result:
        piece = Piece(name=name, end=40)
        return step(Frame(stores=[Store(slot=slot, piece=piece, prefix_hash=history.prefix_hash(40))]))

    step(Frame(opened=[Opening(slot=0)], windows=[window(tokens, 0, 0)]))
    assert [failure.kind for failure in store(other).failures] == ["CacheMismatch"] and not disk.pieces
    assert [failure.slot for failure in store(tokens, 3).failures] == [3]
    disk.takes = False
    assert [failure.kind for failure in store(tokens).failures] == ["PrefixLost"]
    disk.takes = True
    assert not store(tokens).failures and disk.pieces
    read = step(Frame(opened=[Opening(slot=1)], windows=[window(tokens, 1, 0, stored=name)]))
    assert not read.samples and not read.failures
    both = [
        step(Frame(windows=[Window(slot=slot, base=40, prefix_hash=tokens.prefix_hash(40), tokens=[7], wanted=1)]))
        for slot in (0, 1)
    ]
    ours, theirs = ([(each.token, each.logprob) for each in result.samples] for result in both)
    assert ours == theirs and len(ours) == 1
    lost = step(Frame(opened=[Opening(slot=2)], windows=[window(tokens, 2, 0, stored=bytes(15) + b"1")]))
    assert [failure.kind for failure in lost.failures] == ["PrefixLost"]
    assert not step(Frame(windows=[window(other, 2, 0)])).failures, "the slot takes other windows then"
    disk.pieces[name] = disk.pieces[name][1:]
    torn = step(Frame(opened=[Opening(slot=4)], windows=[window(tokens, 4, 0, stored=name)]))
    assert [failure.kind for failure in torn.failures] == ["PrefixLost"] and not disk.pieces
