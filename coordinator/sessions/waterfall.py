"""Where each millisecond of a request went, from the stages' timing records. Pure.

Every frame's records tile the time from its sending to its result. With several frames in flight these tilings overlap,
so each is clipped to the time after the previous result: what remains tiles the whole request, part by part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from protos.brigade_pb2 import Result

PARTS = (
    "scheduling",
    "coordinator compute",
    "wire",
    "queue",
    "worker compute",
    "head + sampling",
    "return",
)
_COMPUTING = ("coordinator compute", "worker compute", "head + sampling")


class Moments(NamedTuple):
    """When a frame passed one stage, on that stage's own clock, nanoseconds: the fields of the proto's Timing."""

    received: int
    started: int
    computed: int
    sampled: int
    sent: int


@dataclass(frozen=True)
class Passage:
    """One frame's way through the chain: its moments by stage and when its result was back, nanoseconds."""

    timings: Sequence[Moments]
    returned: int
    num_rows: int = 0
    step: int = 0

    @classmethod
    def of(cls, result: Result, returned: int, num_rows: int) -> "Passage":
        """A copy of the result's records: a part of a result would keep all of it in memory."""
        timings = tuple(Moments(t.received, t.started, t.computed, t.sampled, t.sent) for t in result.timings)
        return cls(timings, returned, num_rows, result.step)


@dataclass
class StageTime:
    """One stage's sums over a request, in milliseconds."""

    compute_ms: float = 0.0  # while it was at a frame of this request or at several: no moment counts twice
    wire_ms: float = 0.0  # of the hop into this stage; on the first one the way back to it
    queue_ms: float = 0.0
    utilisation: float = 0.0  # compute over wall time


@dataclass
class Waterfall:
    """A request's wall time and its parts, in milliseconds; the parts add up to it."""

    wall_ms: float
    parts: dict[str, float]
    stages: list[StageTime] = field(default_factory=list)


def make_waterfall(passages: Sequence[Passage], offsets: Sequence[int], started: int, ended: int) -> Waterfall:
    """Divide [started, ended] among the parts.

    Args:
        passages: in the order of their results.
        offsets: by stage, that node's clock minus the coordinator's, nanoseconds. An error in them moves time between
            hops and nothing else: over the way out and back they cancel.
        started, ended: the request's first and last moment on the coordinator's clock, nanoseconds.
    """
    parts = dict.fromkeys(PARTS, 0)
    stages = [StageTime() for _ in offsets]
    busy: list[list[tuple[int, int]]] = [[] for _ in offsets]
    before = started
    for passage in passages:
        tiles = spans(passage, offsets)
        sent = tiles[0][2]
        parts["scheduling"] += max(0, sent - before)
        before = max(before, sent)
        for part, stage, begin, end in tiles:
            until = max(before, min(end, passage.returned))  # a tile may run backwards where a clock is wrong
            parts[part] += until - before
            if part in _COMPUTING:
                busy[stage].append((begin, end))
            else:
                _add_wait(stages[stage], part, (until - before) / 1e6)
            before = until
    parts["scheduling"] += max(0, ended - before)
    wall_ms = (ended - started) / 1e6
    for time, intervals in zip(stages, busy, strict=True):
        time.compute_ms = _covered(intervals) / 1e6
        time.utilisation = time.compute_ms / wall_ms if wall_ms else 0.0
    return Waterfall(wall_ms, {part: value / 1e6 for part, value in parts.items()}, stages)


def spans(passage: Passage, offsets: Sequence[int]) -> list[tuple[str, int, int, int]]:
    """The passage as (part, stage, begin, end), gapless, on the coordinator's clock."""
    tiles = []
    left = None
    for stage, timing in enumerate(passage.timings):
        received, started, computed, sampled, sent = (moment - offsets[stage] for moment in timing)
        if left is not None:
            tiles.append(("wire", stage, left, received))
        compute = "worker compute" if stage else "coordinator compute"
        tiles += [
            ("queue", stage, received, started),
            (compute, stage, started, computed),
            ("head + sampling", stage, computed, sampled),
            (compute, stage, sampled, sent),
        ]
        left = sent
    assert left is not None
    tiles.append(("return", 0, left, passage.returned))
    return tiles


def _add_wait(stage: StageTime, part: str, alone_ms: float) -> None:
    """A wait counts only while nothing else went on."""
    if part == "queue":
        stage.queue_ms += alone_ms
    else:
        stage.wire_ms += alone_ms


def _covered(intervals: Sequence[tuple[int, int]]) -> int:
    """How much time the intervals cover together: a stage takes up a frame while it still sends the one before."""
    covered, until = 0, min((begin for begin, _ in intervals), default=0)
    for begin, end in sorted(intervals):
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return covered
