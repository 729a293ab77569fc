"""Timing records on made-up clocks: whatever they say, the parts add up to the request's wall time."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from coordinator.planning.plan import Assignment
from coordinator.sessions.output import Answer, Output, Usage
from coordinator.sessions.waterfall import PARTS, Leg, Moments, Passage, Route, Waterfall, make_waterfall, spans

MS = 1_000_000  # nanoseconds
COMPUTE = ("decode", "coordinator compute", "worker compute", "head + sampling", "drafting", "encode")
BETWEEN = ("wire", "return")


def passage(
    start: int,
    stages: Sequence[tuple[int, int, int, int, int]],
    back: int,
    clocks: Sequence[int],
    decoding: int = 0,
    drafting: int = 0,
) -> Passage:
    """A frame that stage 0 received at `start`: per stage a hop into it, a queue, computing, sampling and encoding."""
    timings, now = [], start
    for stage, (hop, queue, computing, sampling, encoding) in enumerate(stages):
        moments = [now := now + hop]
        moments += [now := now + duration for duration in (queue, decoding, computing, sampling, drafting, encoding)]
        timings.append(Moments(*(moment + clocks[stage] for moment in moments)))
    return Passage(timings, now + back)


def leg(
    passages: Sequence[Passage], clocks: Sequence[int], names: Sequence[str] = "abcd", *, is_recovered: bool = False
) -> Leg:
    """What a chain of nodes with these clocks and names did."""
    nodes = [Assignment(name, stage, stage + 1, 0, 0, 0) for stage, name in enumerate(names[: len(clocks)])]
    return Leg(Route(nodes, clocks), list(passages), is_recovered)


def one_chain(passages: Sequence[Passage], clocks: Sequence[int], started: int, ended: int) -> Waterfall:
    return make_waterfall([leg(passages, clocks)], started, ended)


def in_ns(waterfall: Waterfall) -> dict[str, int]:
    """The parts, and that there is no other number behind them than whole nanoseconds."""
    parts = {part: round(ms * MS) for part, ms in waterfall.parts.items()}
    assert all(abs(parts[part] / MS - ms) < 1e-9 for part, ms in waterfall.parts.items())
    return parts


def assert_adds_up(waterfall: Waterfall, started: int, ended: int) -> None:
    assert waterfall.wall_ms == (ended - started) / MS
    assert tuple(waterfall.parts) == PARTS
    assert min(waterfall.parts.values()) >= 0
    assert sum(in_ns(waterfall).values()) == ended - started


THREE = [(0, 1, 20, 0, 2), (5, 3, 30, 0, 1), (7, 0, 40, 10, 4)]


def test_one_passage_is_divided_as_it_was() -> None:
    way = passage(1000, THREE, back=6, clocks=[0, 0, 0], decoding=2)
    found = one_chain([way], [0, 0, 0], started=990, ended=way.returned + 3)
    assert in_ns(found) == {
        "scheduling": 10 + 3,
        "recovery": 0,
        "coordinator compute": 20,
        "wire": 5 + 7,
        "queue": 1 + 3 + 0,
        "decode": 3 * 2,
        "worker compute": 30 + 40,
        "head + sampling": 10,
        "drafting": 0,
        "encode": 2 + 1 + 4,
        "return": 6,
    }
    assert_adds_up(found, 990, way.returned + 3)
    way = passage(0, [tuple(MS * n for n in stage) for stage in THREE], back=6 * MS, clocks=[0, 0, 0])  # type: ignore[misc]
    stages = one_chain([way], [0, 0, 0], 0, way.returned).stages
    assert [stage.compute_ms for stage in stages] == [22, 31, 54]
    assert [stage.queue_ms for stage in stages] == [1, 3, 0]
    assert [stage.wire_ms for stage in stages] == [6, 5, 7], "the coordinator has the way back"
    wall = way.returned / MS
    assert [stage.utilisation for stage in stages] == [22 / wall, 31 / wall, 54 / wall]


def test_a_single_stage_has_no_hop_and_a_request_without_a_frame_is_all_scheduling() -> None:
    way = passage(0, [(0, 2, 30, 5, 1)], back=0, clocks=[0], decoding=3, drafting=4)
    found = one_chain([way], [0], 0, way.returned)
    assert in_ns(found) == dict.fromkeys(PARTS, 0) | {
        "queue": 2, "decode": 3, "coordinator compute": 30, "head + sampling": 5, "drafting": 4, "encode": 1,
    }  # fmt: skip
    assert in_ns(one_chain([], [0], 10, 30)) == dict.fromkeys(PARTS, 0) | {"scheduling": 20}
    assert one_chain([], [0], 10, 10).wall_ms == 0


def random_passages(numbers: random.Random, num_stages: int, clocks: Sequence[int], *, overlap: bool) -> list[Passage]:
    """Frames one after the other, or sent before the result of the one before is back; results stay in order."""
    passages: list[Passage] = []
    start = 1_000
    for _ in range(numbers.randint(1, 12)):
        stages = [tuple(numbers.randint(1, 50) * MS // 10 for _ in range(5)) for _ in range(num_stages)]
        stages[0] = (0, *stages[0][1:])
        way = passage(start, stages, numbers.randint(1, 50) * MS // 10, clocks)  # type: ignore[arg-type]
        if passages and way.returned < passages[-1].returned:
            way = Passage(way.timings, passages[-1].returned + 1)
        passages.append(way)
        start = start + numbers.randint(0, 9) * MS if overlap else way.returned + numbers.randint(0, 5)
    return passages


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_the_parts_add_up_to_the_wall_time_to_the_nanosecond_whatever_the_clocks(seed: int, overlap: bool) -> None:
    """Clocks drift: after an hour a known offset is off by more than a hop takes. The parts must still add up."""
    numbers = random.Random(seed)
    clocks = [0, *(numbers.randint(-(10**12), 10**12) for _ in range(numbers.randint(0, 3)))]
    state = numbers.getstate()
    passages = random_passages(numbers, len(clocks), clocks, overlap=overlap)
    ended = passages[-1].returned + numbers.randint(0, 100)
    found = one_chain(passages, clocks, 900, ended)
    assert_adds_up(found, 900, ended)
    wrong = [0, *(clock + numbers.randint(-20, 20) * MS for clock in clocks[1:])]
    assert_adds_up(one_chain(passages, wrong, 900, ended), 900, ended)
    numbers.setstate(state)
    equal = [0] * len(clocks)
    assert one_chain(random_passages(numbers, len(clocks), equal, overlap=overlap), equal, 900, ended) == found
    whole = one_chain(passages, clocks, 1_000, passages[-1].returned)
    assert all(0 < stage.utilisation <= 1 for stage in whole.stages), "busy for longer than the request took"
    for way in passages:
        tiles = spans(way, clocks)
        assert all(before[3] == after[2] for before, after in pairwise(tiles)), "a gap, or an overlap"
        assert tiles[0][2] == way.timings[0].received and tiles[-1][3] == way.returned


@pytest.mark.parametrize("error", [-40, -1, 1, 40])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_error_in_a_clock_moves_time_between_hops_and_nothing_else(stage: int, error: int) -> None:
    hops = [(0, 1, 20, 0, 2), (50, 3, 30, 0, 1), (50, 0, 40, 10, 4)]
    clocks = [0, 700, -300]
    way = passage(1000, hops, back=50, clocks=clocks)
    wrong = [clock + error * (i == stage) for i, clock in enumerate(clocks)]
    true, found = (one_chain([way], offsets, 1000, way.returned) for offsets in (clocks, wrong))
    kept = [part for part in PARTS if part not in BETWEEN]
    assert {part: found.parts[part] for part in kept} == {part: true.parts[part] for part in kept}
    assert sum(in_ns(found)[part] for part in BETWEEN) == sum(in_ns(true)[part] for part in BETWEEN)
    assert [s.compute_ms for s in found.stages] == [s.compute_ms for s in true.stages]
    assert sum(s.wire_ms for s in found.stages) == pytest.approx(sum(s.wire_ms for s in true.stages))


def test_frames_in_flight_together_are_not_counted_twice() -> None:
    """Two stages of 10 ms, two frames right behind each other: the second one costs what it adds."""
    ways = [passage(10 * i, [(0, 0, 10, 0, 0), (0, 0, 10, 0, 0)], 0, [0, 0]) for i in range(1000)]
    found = one_chain(ways[:2], [0, 0], 0, 30)
    assert in_ns(found) == dict.fromkeys(PARTS, 0) | {"coordinator compute": 10, "worker compute": 20}
    assert [stage.utilisation for stage in found.stages] == pytest.approx([20 / 30, 20 / 30])
    stages = one_chain(ways, [0, 0], 0, ways[-1].returned).stages
    assert all(0.99 < stage.utilisation <= 1 for stage in stages), "a full pipe is busy everywhere"


def test_a_message_that_waits_for_the_step_of_the_node_that_reads_it_is_not_on_the_wire() -> None:
    """Hops of 1 ms; a node reads only between its steps, and stamps what has come then."""
    first = passage(0, [(0, 0, 10, 0, 0), (1, 0, 4, 0, 0)], back=15, clocks=[0, 500])  # waits from 16 for step 2
    second = passage(10, [(0, 0, 20, 0, 0), (1, 0, 4, 0, 0)], back=15, clocks=[0, 500])  # waits from 36 for step 3
    third = passage(30, [(0, 0, 20, 0, 0), (1, 0, 4, 0, 0)], back=1, clocks=[0, 500])
    found = one_chain([first, second, third], [0, 500], 0, third.returned)
    assert in_ns(found) == dict.fromkeys(PARTS, 0) | {
        "coordinator compute": 10 + 15 + 15, "wire": 1 + 1 + 1, "worker compute": 4 + 4 + 4, "return": 1,
    }  # fmt: skip
    assert [round(stage.wire_ms * MS) for stage in found.stages] == [1, 3]


def test_a_moment_in_which_a_stage_computes_and_sends_counts_once() -> None:
    first = passage(0, [(0, 0, 10 * MS, 0, 5 * MS)], back=0, clocks=[0])
    second = passage(10 * MS, [(0, 0, 10 * MS, 0, 5 * MS)], back=0, clocks=[0])
    [stage] = one_chain([first, second], [0], 0, 25 * MS).stages
    assert (stage.compute_ms, stage.utilisation) == (25, 1)


def test_what_passes_between_two_chains_is_recovery() -> None:
    """Whatever was on its way when the first one was lost."""
    first = leg([passage(10, [(0, 0, 10, 0, 0), (0, 0, 10, 0, 0)], back=0, clocks=[0, 50])], [0, 50], "ab")
    replayed = [passage(start, [(0, 0, 10, 0, 0), (5, 0, 10, 0, 0)], back=0, clocks=[0, -7]) for start in (100, 130)]
    found = make_waterfall([first, leg(replayed, [0, -7], "ac", is_recovered=True)], 0, 160)
    assert in_ns(found) == dict.fromkeys(PARTS, 0) | {
        "scheduling": 10 + 5 + 5, "recovery": 70, "coordinator compute": 30, "wire": 10, "worker compute": 30,
    }  # fmt: skip
    assert_adds_up(found, 0, 160)
    way = passage(100, [(0, 0, 10, 0, 0)], back=0, clocks=[0])  # of a chain that was lost before its first result
    found = make_waterfall([leg([way], [0], is_recovered=True)], 0, 110)
    assert in_ns(found) == dict.fromkeys(PARTS, 0) | {"recovery": 100, "coordinator compute": 10}


def test_a_node_has_one_row_however_many_chains_it_was_in_and_lost_ones_come_last() -> None:
    two = [(0, 0, 10, 0, 0), (0, 0, 10, 0, 0)]
    legs = [
        leg([passage(0, two, back=0, clocks=[0, 0])], [0, 0], "ab"),
        leg([passage(100, [*two, two[0]], back=0, clocks=[0, 0, 0])], [0, 0, 0], "acd", is_recovered=True),
        leg([passage(200, two, back=0, clocks=[0, 0])], [0, 0], "ac", is_recovered=True),
    ]
    stages = make_waterfall(legs, 0, 220).stages
    assert [(stage.node.name, stage.is_lost) for stage in stages] == [
        ("a", False), ("c", False), ("d", True), ("b", True),
    ]  # fmt: skip
    assert [round(stage.compute_ms * MS) for stage in stages] == [30, 20, 10, 10]


def test_an_answer_without_tokens_has_a_waterfall_and_times() -> None:
    """A request that only scores its prompt generates none."""
    answer = Answer()
    answer.add(Output("", [], 3_000_000_000))
    answer.add(Output("", [], 5_000_000_000, "length", Usage(4, 1_000_000_000, 0, 1, 4)))
    assert (answer.ttft_s, answer.decode_s, answer.waterfall().wall_ms) == (4.0, 0.0, 4000.0)
