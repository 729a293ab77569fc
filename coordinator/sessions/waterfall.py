"""Where each millisecond of a request went, from the stages' timing records. Pure.

Every frame's records tile the time from its sending to its result. With several frames in flight these tilings overlap,
so each is clipped to the time after the previous result: what remains tiles the whole request, part by part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.planning.plan import Assignment
from protos.brigade_pb2 import Result

PARTS = (
    "scheduling",
    "recovery",
    "coordinator compute",
    "wire",
    "queue",
    "decode",
    "worker compute",
    "head + sampling",
    "encode",
    "return",
)
_COMPUTING = ("decode", "coordinator compute", "worker compute", "head + sampling", "encode")


class Moments(NamedTuple):
    """When a frame passed one stage, on that stage's own clock, nanoseconds: the fields of the proto's Timing."""

    received: int
    taken: int
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
        timings = tuple(Moments(t.received, t.taken, t.started, t.computed, t.sampled, t.sent) for t in result.timings)
        return cls(timings, returned, num_rows, result.step)


@dataclass(frozen=True)
class Route:
    """A chain as frames pass it: its nodes, and by how much each one's clock is ahead of the coordinator's.

    An offset, in nanoseconds, that is wrong moves time between hops and nothing else: over the way out and back it
    cancels.
    """

    nodes: Sequence[Assignment]
    offsets: Sequence[int]


@dataclass(frozen=True)
class Leg:
    """What one chain did for a request: its passages, in the order of their results."""

    route: Route
    passages: list[Passage]
    is_recovered: bool = False  # a chain had been lost under the request before


@dataclass
class StageTime:
    """One node's sums over a request, in milliseconds."""

    node: Assignment  # as it was the last time
    is_lost: bool = False  # it is not in the request's last chain
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


def make_waterfall(legs: Sequence[Leg], started: int, ended: int) -> Waterfall:
    """Divide [started, ended] among the parts, and what each node did among the nodes of all chains.

    Args:
        started, ended: the request's first and last moment on the coordinator's clock, nanoseconds.
    """
    parts = dict.fromkeys(PARTS, 0)
    stages = {stage.node.name: stage for stage in _stages(legs)}
    busy: dict[str, list[tuple[int, int]]] = {name: [] for name in stages}
    before = started
    for leg, wait, passage in _in_order(legs):
        tiles = spans(passage, leg.route.offsets)
        sent = tiles[0][2]
        parts[wait] += max(0, sent - before)
        before = max(before, sent)
        for part, stage, begin, end in tiles:
            name = leg.route.nodes[stage].name
            until = max(before, min(end, passage.returned))  # a tile may run backwards where a clock is wrong
            parts[part] += until - before
            if part in _COMPUTING:
                busy[name].append((begin, end))
            else:
                _add_wait(stages[name], part, (until - before) / 1e6)
            before = until
    parts["scheduling"] += max(0, ended - before)
    wall_ms = (ended - started) / 1e6
    for name, time in stages.items():
        time.compute_ms = _covered(busy[name]) / 1e6
        time.utilisation = time.compute_ms / wall_ms if wall_ms else 0.0
    return Waterfall(wall_ms, {part: value / 1e6 for part, value in parts.items()}, list(stages.values()))


def nodes_of(legs: Sequence[Leg]) -> list[Assignment]:
    """Every node that took part, once: those of the last chain in its order, then those that were lost."""
    found: dict[str, Assignment] = {}
    for leg in reversed(legs):
        for node in leg.route.nodes:
            found.setdefault(node.name, node)
    return list(found.values())


def recoveries(legs: Sequence[Leg]) -> Iterator[tuple[int, int]]:
    """From the last result of a chain to the first frame on the next one, on the coordinator's clock."""
    returned = None
    for _, wait, passage in _in_order(legs):
        if wait == "recovery" and returned is not None:
            yield returned, passage.timings[0].received
        returned = passage.returned


def _in_order(legs: Sequence[Leg]) -> Iterator[tuple[Leg, str, Passage]]:
    """All passages, and what the time before each belongs to."""
    for leg in legs:
        wait = "recovery" if leg.is_recovered else "scheduling"
        for passage in leg.passages:
            yield leg, wait, passage
            wait = "scheduling"


def _stages(legs: Sequence[Leg]) -> Iterator[StageTime]:
    last = {node.name for node in legs[-1].route.nodes} if legs else set()
    for node in nodes_of(legs):
        yield StageTime(node, is_lost=node.name not in last)


def spans(passage: Passage, offsets: Sequence[int]) -> list[tuple[str, int, int, int]]:
    """The passage as (part, stage, begin, end), gapless, on the coordinator's clock."""
    tiles = []
    left = None
    for stage, timing in enumerate(passage.timings):
        received, taken, started, computed, sampled, sent = (moment - offsets[stage] for moment in timing)
        if left is not None:
            tiles.append(("wire", stage, left, received))
        compute = "worker compute" if stage else "coordinator compute"
        tiles += [
            ("queue", stage, received, taken),
            ("decode", stage, taken, started),
            (compute, stage, started, computed),
            ("head + sampling", stage, computed, sampled),
            ("encode", stage, sampled, sent),
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
