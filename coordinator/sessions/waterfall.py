"""Waterfall: a request's wall time by part, from the stages' timing records. Pure.

The records of a frame cover the time from its sending to its result without gaps. With several frames in flight these
times overlap, so each is clipped to the time after the previous result; together they cover the whole request.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    "drafting",
    "encode",
    "return",
)
COMPUTING = ("decode", "coordinator compute", "worker compute", "head + sampling", "drafting", "encode")


class Moments(NamedTuple):
    """When a frame passed one stage, nanoseconds on that stage's clock: the fields of the proto's Timing."""

    received: int
    taken: int
    started: int
    computed: int
    sampled: int
    drafted: int
    sent: int


@dataclass(frozen=True)
class Passage:
    """One frame's way through the chain: its moments by stage, and when its result returned, nanoseconds."""

    timings: Sequence[Moments]
    returned: int
    num_rows: int = 0
    step: int = 0

    @classmethod
    def of(cls, result: Result, returned: int, num_rows: int) -> "Passage":
        """Copy the result's records: a reference to them would keep the whole result message in memory."""
        timings = tuple(Moments(*(getattr(t, name) for name in Moments._fields)) for t in result.timings)
        return cls(timings, returned, num_rows, result.step)


@dataclass(frozen=True)
class Route:
    """A chain's nodes in order, and by how many nanoseconds each one's clock is ahead of the coordinator's.

    A wrong offset only moves time between hops; it cancels over the way out and back.
    """

    nodes: Sequence[Assignment]
    offsets: Sequence[int]


@dataclass(frozen=True)
class Leg:
    """The frames of one chain that carried a request, in the order of their results."""

    route: Route
    passages: list[Passage]
    is_recovered: bool = False  # the request had lost a chain before


@dataclass
class StageTime:
    """One node's sums over a request, in milliseconds."""

    node: Assignment  # its latest one
    is_lost: bool = False  # it is not in the request's last chain
    compute_ms: float = 0.0  # at work on frames of this request; overlapping times count once
    wire_ms: float = 0.0  # of the hop into this stage; on stage 0 the return of results
    queue_ms: float = 0.0
    utilisation: float = 0.0  # compute over wall time

    def as_json(self) -> dict[str, Any]:
        """Return the entry of a node under `stages`."""
        return {
            "node": self.node.name, "start": self.node.start, "end": self.node.end,
            "compute_ms": self.compute_ms, "wire_ms": self.wire_ms, "queue_ms": self.queue_ms,
        }  # fmt: skip


@dataclass
class Waterfall:
    """A request's wall time and its parts, in milliseconds; the parts add up to it."""

    wall_ms: float
    parts: dict[str, float]
    stages: list[StageTime] = field(default_factory=list)

    def as_json(self) -> dict[str, float]:
        """Return the object under `waterfall`: the wall time, then the parts."""
        return {"wall_ms": self.wall_ms, **self.parts}


def make_waterfall(legs: Sequence[Leg], started: int, ended: int) -> Waterfall:
    """Divide the time [started, ended] into parts, and into the work of each node.

    Args:
        started, ended: the request's first and last moment on the coordinator's clock, nanoseconds.
    """
    parts = dict.fromkeys(PARTS, 0)
    last = {node.name for node in legs[-1].route.nodes} if legs else set()
    stages = {node.name: StageTime(node, is_lost=node.name not in last) for node in nodes_of(legs)}
    ways = [(leg, wait, passage, spans(passage, leg.route.offsets)) for leg, wait, passage in _in_order(legs)]
    worked: dict[str, list[tuple[int, int]]] = {name: [] for name in stages}
    for leg, _, _, tiles in ways:
        for part, stage, begin, end in tiles:
            if part in COMPUTING:
                worked[leg.route.nodes[stage].name].append((begin, end))
    busy = {name: joined(intervals) for name, intervals in worked.items()}
    before = started
    for leg, wait, passage, tiles in ways:
        sent = tiles[0][2]
        parts[wait] += max(0, sent - before)
        before = max(before, sent)
        for part, stage, _, end in tiles:
            name = leg.route.nodes[stage].name
            until = max(before, min(end, passage.returned))  # a tile may run backwards where a clock is wrong
            took = until - before
            if part not in COMPUTING:
                # a node reads a message after its step, so a wait for it may be that step; waits count without it
                computed = overlap(busy[name], before, until)
                parts["worker compute" if stage else "coordinator compute"] += computed
                took -= computed
                if part == "queue":
                    stages[name].queue_ms += took / 1e6
                else:
                    stages[name].wire_ms += took / 1e6
            parts[part] += took
            before = until
    parts["scheduling"] += max(0, ended - before)
    wall_ms = (ended - started) / 1e6
    for name, time in stages.items():
        time.compute_ms = sum(end - begin for begin, end in busy[name]) / 1e6
        time.utilisation = time.compute_ms / wall_ms if wall_ms else 0.0
    return Waterfall(wall_ms, {part: value / 1e6 for part, value in parts.items()}, list(stages.values()))


def nodes_of(legs: Sequence[Leg]) -> list[Assignment]:
    """Return every node that took part: those of the last chain in its order, then those that were lost."""
    found: dict[str, Assignment] = {}
    for leg in reversed(legs):
        for node in leg.route.nodes:
            found.setdefault(node.name, node)
    return list(found.values())


def recoveries(legs: Sequence[Leg]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each recovery: from a chain's last result to the first frame on the next one."""
    returned = None
    for _, wait, passage in _in_order(legs):
        if wait == "recovery" and returned is not None:
            yield returned, passage.timings[0].received
        returned = passage.returned


def _in_order(legs: Sequence[Leg]) -> Iterator[tuple[Leg, str, Passage]]:
    """Yield every passage, with the part that the wait before it belongs to."""
    for leg in legs:
        wait = "recovery" if leg.is_recovered else "scheduling"
        for passage in leg.passages:
            yield leg, wait, passage
            wait = "scheduling"


def spans(passage: Passage, offsets: Sequence[int]) -> list[tuple[str, int, int, int]]:
    """Return the passage as gapless tiles (part, stage, begin, end) on the coordinator's clock."""
    tiles = []
    left = None
    for stage, timing in enumerate(passage.timings):
        received, taken, started, computed, sampled, drafted, sent = (moment - offsets[stage] for moment in timing)
        if left is not None:
            tiles.append(("wire", stage, left, received))
        compute = "worker compute" if stage else "coordinator compute"
        tiles += [
            ("queue", stage, received, taken),
            ("decode", stage, taken, started),
            (compute, stage, started, computed),
            ("head + sampling", stage, computed, sampled),
            ("drafting", stage, sampled, drafted),
            ("encode", stage, drafted, sent),
        ]
        left = sent
    assert left is not None
    tiles.append(("return", 0, left, passage.returned))
    return tiles


def joined(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the intervals in order, joined where they overlap: a stage computes while it sends."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif begin < end:
            found.append((begin, end))
    return found


def overlap(intervals: Sequence[tuple[int, int]], begin: int, end: int) -> int:
    """Return how much of [begin, end] the joined intervals cover."""
    covered, at = 0, bisect_right(intervals, begin, key=lambda interval: interval[1])
    while at < len(intervals) and intervals[at][0] < end:
        covered += max(0, min(intervals[at][1], end) - max(intervals[at][0], begin))
        at += 1
    return covered
