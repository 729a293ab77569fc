"""The trace by the rules of its format: complete slices on named tracks, of which no two of one track cross."""

import json
import random
from collections import defaultdict
from itertools import combinations
from typing import Any

from coordinator.cli.trace import trace_events
from coordinator.sessions.waterfall import PARTS
from tests.unit.sessions.test_waterfall import MS, THREE, leg, passage, random_passages

CLOCKS = (0, 10**9, -(10**9))
NODES = ("coordinator", "mini", "studio")
Event = dict[str, Any]


def trace(num_frames: int, every_ms: int) -> list[Event]:
    """The events of frames that take 129 ms each, sent so often; the second one brings two tokens."""
    stages = [tuple(MS * ms for ms in stage) for stage in THREE]
    ways = [passage(MS * (1000 + every_ms * i), stages, 6 * MS, CLOCKS) for i in range(num_frames)]  # type: ignore[arg-type]
    times = [ways[1].returned] * 2 if num_frames > 1 else []
    return list(json.loads(json.dumps(trace_events([leg(ways, CLOCKS, NODES)], times)))["traceEvents"])


def slices(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def by_track(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in slices(events):
        tracks[event["pid"], event["tid"]].append(event)
    return tracks


def assert_no_two_cross(events: list[Event]) -> None:
    """Viewers nest slices of one track and drop those that begin in another one and end after it."""
    for there in by_track(events).values():
        for one, other in combinations(there, 2):
            first, second = sorted((one, other), key=lambda event: (event["ts"], -event["dur"]))
            end = first["ts"] + first["dur"]
            assert second["ts"] >= end or second["ts"] + second["dur"] <= end, (first, second)


def test_no_two_slices_cross_whatever_the_clocks_say() -> None:
    for every_ms in (5, 30, 60, 200):
        assert_no_two_cross(trace(8, every_ms))
    for seed in range(20):
        numbers = random.Random(seed)
        clocks = [0, *(numbers.randint(-(10**12), 10**12) for _ in range(2))]
        ways = random_passages(numbers, 3, clocks, overlap=True)
        wrong = [0, *(clock + numbers.randint(-20, 20) * MS for clock in clocks[1:])]
        assert_no_two_cross(trace_events([leg(ways, wrong, NODES)], [])["traceEvents"])


def test_every_node_is_a_process_and_every_event_has_what_the_format_asks_for() -> None:
    events = trace(4, 5)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "stage 0: coordinator", 1: "stage 1: mini", 2: "stage 2: studio"}
    assert {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"} == set(by_track(events))
    assert len({track for _, track in by_track(events)}) > 2, "frames at once do not share a track"
    assert {track for _, track in by_track(trace(4, 200))} == {0}, "those that follow each other do"
    for event in events:
        assert event["ph"] in ("X", "M") and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert isinstance(event["ts"], int) and isinstance(event["dur"], int), "viewers round fractions"
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"] in PARTS
    assert slices(trace_events([], [])["traceEvents"]) == []


def test_slices_tell_the_step_its_rows_and_the_tokens_that_it_brought() -> None:
    stages = [tuple(MS * ms for ms in stage) for stage in THREE]
    ways = [passage(MS * 200 * i, stages, 0, CLOCKS) for i in range(2)]  # type: ignore[arg-type]
    ways = [type(way)(way.timings, way.returned, 16 + i, 7 + i) for i, way in enumerate(ways)]
    events = slices(trace_events([leg(ways, CLOCKS, NODES)], [ways[1].returned] * 3)["traceEvents"])
    found = {tuple(event["args"].items()) for event in events}
    assert found == {(("step", 7), ("rows", 16), ("tokens", 0)), (("step", 8), ("rows", 17), ("tokens", 3))}


def test_a_recovery_is_a_slice_of_the_coordinator_and_lost_nodes_keep_theirs() -> None:
    stages = [tuple(MS * ms for ms in stage) for stage in THREE]
    before, after = (passage(MS * at, stages[:2], 0, CLOCKS[:2]) for at in (0, 1000))  # type: ignore[arg-type]
    legs = [
        leg([before], CLOCKS[:2], ("coordinator", "mini")),
        leg([after], CLOCKS[:2], ("coordinator", "studio"), is_recovered=True),
    ]
    events = trace_events(legs, [])["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "stage 0: coordinator", 1: "stage 1: studio", 2: "lost: mini"}
    [recovery] = [event for event in slices(events) if event["name"] == "recovery"]
    assert (recovery["pid"], recovery["ts"], recovery["ts"] + recovery["dur"]) == (0, before.returned // 1000, 10**6)
    assert {event["pid"] for event in slices(events)} == {0, 1, 2}
    assert_no_two_cross(events)
