"""`--trace FILE`: a request's frames and recoveries as Chrome trace events (chrome://tracing, Perfetto). Pure.

Each node is a process with as many tracks as it had frames at once: viewers drop slices of one track that overlap.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from coordinator.sessions.waterfall import Leg, Passage, nodes_of, recoveries, spans

TraceSpan = tuple[
    str, int, int
]  # part, begin, end, in whole microseconds: viewers cut off fractions, and ends must meet


class Visit(NamedTuple):
    """One frame on one node, or a recovery on the coordinator."""

    node: str
    spans: Sequence[TraceSpan]
    args: dict[str, int]

    @property
    def begin(self) -> int:
        return self.spans[0][1]

    @property
    def end(self) -> int:
        return self.spans[-1][2]


def trace_events(legs: Sequence[Leg], token_times: Sequence[int]) -> dict[str, Any]:
    """Return the trace as the JSON object that viewers read, on the coordinator's clock since the first frame.

    Args:
        token_times: when each token of the answer was known, in nanoseconds.
    """
    num_tokens = Counter(token_times)
    visits: list[Visit] = []
    for leg in legs:
        for passage in leg.passages:
            visits += _visits(leg, passage, num_tokens[passage.returned])
    nodes, num_stages = [node.name for node in nodes_of(legs)], len(legs[-1].route.nodes) if legs else 0
    visits += (Visit(nodes[0], [("recovery", begin // 1000, end // 1000)], {}) for begin, end in recoveries(legs))
    origin = min((visit.begin for visit in visits), default=0)
    events: list[dict[str, Any]] = []
    for number, name in enumerate(nodes):
        tracks = _tracks([visit for visit in visits if visit.node == name])
        place = f"stage {number}" if number < num_stages else "lost"
        events += _names(number, f"{place}: {name}", len(tracks))
        for track, there in enumerate(tracks):
            events += (event for visit in there for event in _slices(visit, number, track, origin))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _visits(leg: Leg, passage: Passage, num_tokens: int) -> Iterator[Visit]:
    args = {"step": passage.step, "rows": passage.num_rows, "tokens": num_tokens}
    for stage, tiles in groupby(spans(passage, leg.route.offsets), key=lambda tile: tile[1]):
        found: list[TraceSpan] = []
        for part, _, begin, end in tiles:
            begin = max(begin // 1000, found[-1][2] if found else begin // 1000)
            found.append((part, begin, max(begin, end // 1000)))  # a tile may be negative because of clock errors
        yield Visit(leg.route.nodes[stage].name, found, args)


def _tracks(visits: Sequence[Visit]) -> list[list[Visit]]:
    """Return the visits on as few tracks as possible without overlap."""
    tracks: list[list[Visit]] = []
    for visit in sorted(visits, key=lambda visit: visit.begin):
        free = next((track for track in tracks if track[-1].end <= visit.begin), None)
        if free is None:
            tracks.append(free := [])
        free.append(visit)
    return tracks


def _names(node: int, name: str, num_tracks: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": node, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": node, "tid": 0, "args": {"sort_index": node}}
    for track in range(num_tracks):
        yield {"ph": "M", "name": "thread_name", "pid": node, "tid": track, "args": {"name": f"frames {track + 1}"}}


def _slices(visit: Visit, node: int, track: int, origin: int) -> Iterator[dict[str, Any]]:
    for part, begin, end in visit.spans:
        yield {
            "ph": "X", "name": part, "cat": "frame", "pid": node, "tid": track,
            "ts": begin - origin, "dur": end - begin, "args": visit.args,
        }  # fmt: skip
