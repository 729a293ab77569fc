"""What frames cost, as it is learned, and what follows from it: how many lanes, how long a prompt's chunks."""

import random

import pytest

from coordinator.planning.costs import (
    ChainCosts,
    DraftingCosts,
    DraftShares,
    LaneChooser,
    ScratchCosts,
    StagesSeconds,
    chunk_size,
    on_lines,
)


def observed(num_stages: int, *frames: tuple[int, float, int]) -> ChainCosts:
    """After so many frames of so many rows, for which each stage took so many seconds; hops took none."""
    costs = ChainCosts(num_stages)
    for rows, stage_s, times in frames:
        for _ in range(times):
            costs.observe(rows, [stage_s] * num_stages, num_stages * stage_s, was_alone=False)
    return costs


def stages(*first_and_row: tuple[float, float]) -> StagesSeconds:
    """Stages that take so many milliseconds for a row and so many for each further one."""
    return lambda rows: [(first + more * (rows - 1)) / 1e3 for first, more in first_and_row]


@pytest.mark.parametrize(
    ("num_sessions", "stages_s", "hops_ms", "expected"),
    [
        (8, stages((5, 1.5), (5, 1.5)), 1, 2),  # rows cost: one lane per stage
        (8, stages((5, 1.5), (5, 1.5), (5, 1.5), (5, 1.5)), 1, 4),
        (8, stages((26.5, 0), (6.5, 0)), 3, 1),  # rows are free and one stage does most: all in one
        (8, stages((5, 5), (5, 5)), 60, 8),  # hops hold frames: more lanes than stages
        (8, stages((5, 5)), 60, 1),  # one stage has no hops: steps that were launched ahead only look like it
        (1, stages((5, 1.5), (5, 1.5)), 1, 2),  # a single one makes no lanes
        (3, stages((5, 1.5), (5, 1.5), (5, 1.5), (5, 1.5)), 1, 3),  # never more than sessions
        (8, stages((10.0, 0), (10.0, 0)), 0, 1),  # rows are free: a second lane would make nothing faster
        (8, stages((10.0, 0.3), (10.0, 0.3)), 0, 1),  # nor is a tenth worth the gap of a change
    ],
)
def test_lanes_follow_from_costs(num_sessions: int, stages_s: StagesSeconds, hops_ms: float, expected: int) -> None:
    chooser = LaneChooser(len(stages_s(1)), stages_s, lambda rows: hops_ms / 1e3)
    assert chooser.choose(num_sessions, 1) == expected
    assert LaneChooser(3, lambda rows: [], lambda rows: 0.0).choose(8, 1) == 3, "while nothing is known"
    assert 1 <= LaneChooser(2, lambda rows: [0.0, 0.0], lambda rows: 0.0).choose(8, 1) <= 2
    free = LaneChooser(2, lambda rows: [0.03 + max(0, rows - 64) / 1e3, 0.005 + max(0, rows - 64) / 1e3], lambda _: 0.0)
    assert [free.choose(16, rows_each) for rows_each in (1, 64)] == [1, 2], "up to 64 rows cost nothing"


@pytest.mark.parametrize(
    ("num_prompt", "stages_s", "beside_streams", "expected"),
    [
        (1000, stages((5, 1.5), (5, 1.5)), False, 32),  # a row costs what it costs: many small chunks overlap
        (1000, stages((5, 0.001), (5, 0.001)), False, 2048),  # weights are all that counts: the whole prompt at once
        (10_000, stages((5, 0.001), (5, 0.001)), False, 2048),
        (20, stages((5, 0.001), (5, 0.001)), False, 32),  # no longer than the prompt
        (1000, stages((5, 1.5)), False, 32),  # one stage: nothing to overlap, and rows cost alike in any chunk
        (1000, lambda rows: [], False, 32),
        (10_000, stages((100, 0.1), (100, 0.1)), False, 2048),
        (10_000, stages((100, 0.1), (100, 0.1)), True, 512),  # 302 ms: streams may wait no longer
        (10_000, stages((300, 0.1), (300, 0.1)), True, 32),
    ],
)
def test_chunks_follow_costs(num_prompt: int, stages_s: StagesSeconds, beside_streams: bool, expected: int) -> None:
    assert chunk_size(num_prompt, stages_s, beside_streams=beside_streams) == expected


def mixture(num_rows: int) -> float:
    """Seconds of a stage of gpt-oss-120b on two M4 Max: it reads the experts that any row goes to, or computes."""
    touched = 1 - (1 - 4 / 128) ** num_rows
    return max(65e9 * (0.05 + 0.95 * touched) / 546e9, 2 * 5.1e9 * num_rows / 25e12) / 2 + 0.001


def test_a_chain_tries_long_chunks_though_short_ones_say_that_every_row_costs() -> None:
    """64 rows read most experts: on the line through 1 and 64 rows, 512 would take 4 times as long as they do."""
    costs = ChainCosts(2)
    for rows in (64, 64, 1, 1):  # a warm-up
        costs.observe(rows, [mixture(rows)] * 2, 0.0, was_alone=True)
    chunks = []
    for _ in range(8):
        chunks.append(costs.chunk_size(30_000, beside_streams=False))
        costs.observe(chunks[-1], [mixture(chunks[-1])] * 2, 0.0, was_alone=True)
    assert chunks == [512] * 8
    assert costs.chunk_size(100, beside_streams=False) < 512


def test_what_nodes_measured_holds_until_frames_of_that_size_say_otherwise() -> None:
    costs = ChainCosts(2, {rows: [mixture(rows)] * 2 for rows in (64, 512)})
    for _ in range(2):
        costs.observe(1, [mixture(1)] * 2, 0.0, was_alone=True)
    assert costs.stages_s(512) == pytest.approx([mixture(512)] * 2)
    assert costs.chunk_size(30_000, beside_streams=False) == 512
    assert costs.chunk_size(30_000, beside_streams=True) == 512  # 210 ms
    for _ in range(20):
        costs.observe(512, [9.0, 9.0], 18.0, was_alone=False)
    assert costs.stages_s(512)[0] > 7 and costs.chunk_size(30_000, beside_streams=True) < 512


def test_beside_streams_a_chunk_is_not_much_larger_than_what_is_known() -> None:
    """One token takes 10 ms here, and so would 2,048, as far as one knows."""
    costs = ChainCosts(1)
    sizes = []
    for rows in (1, 9, 32, 128, 512):
        for _ in range(2):
            costs.observe(rows, [0.01], 0.01, was_alone=True)
        sizes.append(costs.chunk_size(5000, beside_streams=True))
    assert sizes == [32, 32, 128, 512, 2048]


def test_chunks_are_chosen_by_what_their_caches_take_back_too_but_no_stream_waits_for_that() -> None:
    """Small chunks are as fast as long ones on these stages, and each takes as long on its way back."""
    costs = ChainCosts(2, {rows: [rows * 4e-4] * 2 for rows in (1, 32, 128, 512)})
    assert costs.chunk_size(30_000, beside_streams=False) == 32
    for _ in range(3):
        for rows in (32, 128, 512):
            costs.observe_return(rows, 0.1)
    assert costs.chunk_size(30_000, beside_streams=False) == 512
    assert costs.chunk_size(30_000, beside_streams=True) == 512  # 410 ms for streams


def test_noise_of_a_few_percent_does_not_change_the_chunk() -> None:
    """Or the same command would round differently from run to run."""
    numbers = random.Random(1)
    for exact in (stages((5, 1.5), (5, 1.5)), stages((5, 0.001), (5, 0.001))):
        found = {
            chunk_size(900, lambda rows, exact=exact: [s * numbers.uniform(0.98, 1.02) for s in exact(rows)])
            for _ in range(50)
        }
        assert len(found) == 1


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 1.0), (2, 2.0), (3, 3.0), (16, 3.0), (64, 3.0), (100, 3.0 + 36 * 2 / 63), (0, 0.5)]
)
def test_costs_lie_on_lines_between_measurements_and_never_fall_beyond_them(rows: int, expected: float) -> None:
    assert on_lines([(1, 1.0), (3, 3.0), (64, 3.0)], rows) == pytest.approx(expected)


def test_a_chain_learns_stages_from_every_frame_and_hops_from_lone_ones() -> None:
    costs = ChainCosts(2)
    for _ in range(3):
        costs.observe(4, [0.010, 0.020], 0.5, was_alone=False)
    assert costs.stages_s(4) == pytest.approx([0.010, 0.020])
    assert costs.hops_s(4) == 0.0 and not costs.steps.is_known
    for _ in range(3):
        costs.observe(1, [0.005, 0.006], 0.013, was_alone=True)
    assert costs.hops_s(1) == pytest.approx(0.002) and costs.steps.seconds(1) == pytest.approx(0.013)


def test_the_transfer_of_long_prompts_does_not_count_for_single_rows() -> None:
    """A row passes the hops in 2 ms, the 2,048 rows of a prompt in 400."""
    costs = ChainCosts(1)
    for _ in range(10):
        costs.observe(2048, [0.5], 0.9, was_alone=True)
        costs.observe(1, [0.005], 0.007, was_alone=True)
    assert costs.hops_s(1) == pytest.approx(0.002) and costs.hops_s(2048) == pytest.approx(0.4)
    assert costs.hops_s(1025) == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize(
    ("num_stages", "rows", "row_s", "expected"),
    [
        (2, 512, 0.00001, 512),
        (2, 512, 0.005, 64),
        (4, 512, 0.005, 32),
        (2, 2048, 1.0, 32),
        (2, 24, 1.0, 24),
        (1, 512, 0, 512),
    ],
)
def test_signs_of_life_wait_behind_prompts_for_less_than_a_second(
    num_stages: int, rows: int, row_s: float, expected: int
) -> None:
    """As many chunks as there are stages may wait for a link."""
    costs = ChainCosts(num_stages)
    assert costs.carried_rows(rows) == rows, "nothing is known"
    for size in (512, 1, 64, 1, 64):
        pause_s = 9.0 if size == 512 else 0.0  # a single slow frame says nothing
        costs.observe(size, [0.01] * num_stages, 0.01 * num_stages + size * row_s + pause_s, was_alone=True)
    assert costs.carried_rows(rows) == expected


def test_chunks_follow_links_that_change_and_grow_again() -> None:
    costs = ChainCosts(2)

    def observe(rows: int, hops_s: float) -> None:
        costs.observe(rows, [0.01, 0.01], 0.02 + hops_s, was_alone=True)

    for rows in (1, 64, 1, 64):
        observe(rows, 0.001)
    observe(512, 2.0)
    assert costs.carried_rows(512) == 512, "nor does the first one of its size"
    for rows in (512, 512, 512):
        observe(rows, 0.001)
    observe(512, 2.0)
    assert costs.carried_rows(512) == 512, "a single frame says nothing"
    observe(512, 2.0)
    observe(512, 2.0)
    assert costs.carried_rows(512) == 128
    for _ in range(3):
        observe(128, 0.002)
    assert costs.carried_rows(512) == 512
    for rows in (512, 512, 512):
        observe(rows, 2.0)
    for _ in range(5):
        observe(128, 0.5)
    assert costs.carried_rows(512) == 128


def test_one_slow_frame_hardly_counts_and_a_fast_one_does() -> None:
    costs = observed(1, (1, 9.0, 1), (1, 0.010, 2), (1, 0.100, 1))  # the first compiles: it never counts
    assert costs.stages_s(1)[0] < 0.020
    for _ in range(6):
        costs.observe(1, [0.005], 0.005, was_alone=False)
    assert costs.stages_s(1)[0] < 0.006


def test_one_slow_frame_of_a_size_does_not_keep_lanes_from_that_size_for_ever() -> None:
    """Eight sessions on two stages: lanes of four are best, though the first ones ever seen were held up by a chunk."""
    costs = observed(2, (1, 0.005, 20), (8, 0.015, 20), (32, 0.040, 20), (4, 0.039, 3))
    assert LaneChooser(2, costs.stages_s, costs.hops_s).choose(8, 1) == 2
    assert costs.stages_s(4)[0] < 0.010
    for _ in range(20):
        costs.observe(4, [0.008] * 2, 0.016, was_alone=False)
    assert costs.stages_s(4)[0] == pytest.approx(0.008, rel=0.01), "once it is well known it counts"


def test_a_size_beyond_all_others_counts_at_once() -> None:
    costs = observed(1, (1, 0.005, 20), (2, 0.006, 20), (512, 0.020, 2))
    assert costs.stages_s(512) == [0.020], "a line through small ones could be all noise there"


@pytest.mark.parametrize(
    ("seen", "num_drafts", "num_slots", "expected"),
    [
        ({}, 3, 1, 0.0),
        ({(3, 1): 0.03}, 0, 1, 0.0),
        ({(3, 1): 0.03}, 3, 1, 0.03),
        ({(3, 1): 0.03}, 1, 1, 0.01),  # of one number of drafts, each costs the same
        ({(3, 1): 0.03}, 15, 8, 0.15),  # the nearest number of slots
        ({(1, 1): 0.01, (3, 1): 0.01}, 2, 1, 0.01),  # all at once
        ({(1, 1): 0.01, (3, 1): 0.01}, 15, 1, 0.01),
        ({(1, 1): 0.01, (3, 1): 0.02}, 7, 1, 0.04),
        ({(1, 1): 0.01, (3, 8): 0.06}, 1, 6, 0.02),
        ({(1, 1): 0.01, (3, 8): 0.06}, 3, 2, 0.03),
    ],
)
def test_drafting_costs_follow_from_numbers_of_drafts_and_of_slots(
    seen: dict[tuple[int, int], float], num_drafts: int, num_slots: int, expected: float
) -> None:
    costs = DraftingCosts()
    for (drafts, slots), seconds in seen.items():
        costs.observe(drafts, slots, 60.0)  # compiles
        assert costs.seconds(drafts, slots) != 60.0
        costs.observe(drafts, slots, seconds)
    assert costs.seconds(num_drafts, num_slots) == pytest.approx(expected)


def test_shares_are_by_place_begin_with_the_usual_and_fade() -> None:
    shares = DraftShares(4, 0.2)
    assert shares.shares() == pytest.approx([0.8] * 4)
    for _ in range(60):
        shares.observe(2, 4)
    assert shares.shares()[0] > 0.9 > 0.2 > shares.shares()[2]
    assert DraftShares(4, 0.2, shares).shares() == pytest.approx(shares.shares(), abs=0.3)
    assert DraftShares(8, 0.2, shares).shares()[:2] == pytest.approx(shares.shares()[:2], abs=0.3)
    for _ in range(60):
        shares.observe(0, 4)
    assert shares.shares()[0] < 0.1


def test_frames_among_others_count_as_steps_without_their_waits() -> None:
    costs = ChainCosts(2)
    for _ in range(2):
        costs.observe(1, [0.010, 0.020], 0.035, was_alone=True)
    for _ in range(2):
        costs.observe(8, [0.020, 0.030], 0.5, 0.1, was_alone=False)
    assert costs.steps.seconds(1) == pytest.approx(0.035) and costs.steps.seconds(8) == pytest.approx(0.055)


def test_a_prompt_is_computed_by_all_where_that_pays_though_what_it_leaves_has_to_come_back() -> None:
    costs = ChainCosts(2)
    assert costs.pays_apart(100, 100, 0.5), "nothing is known: it is tried"
    for _ in range(3):
        for rows in (1, 512):
            costs.observe(rows, [rows * 1e-3] * 2, rows * 2e-3, was_alone=True)
    assert costs.pays_apart(5000, 5000, 0.5) and not costs.pays_apart(32, 32, 0.5), "one chunk overlaps with nothing"
    assert not costs.pays_apart(1000, 5000, 0.5), "the first node holds most of it already"
    for return_ms, pays in ((0.5, True), (3.0, False)):
        for _ in range(20):
            costs.observe_return(64, 64 * return_ms * 1e-3)
        assert costs.pays_apart(5000, 5000, 0.5) == pays


def test_rows_are_read_from_disks_where_that_is_quicker_than_to_compute_them() -> None:
    costs = ChainCosts(2)
    assert costs.pays_to_read(5000), "nothing is known: it is tried"
    for _ in range(3):
        for rows in (1, 512):
            costs.observe(rows, [rows * 1e-3] * 2, rows * 2e-3, was_alone=True)
    assert costs.pays_to_read(5000)
    for read_ms, pays in ((0.5, True), (3.0, False), (0.5, True)):
        for _ in range(40):
            costs.observe_read(512, 512 * read_ms * 1e-3)
        assert costs.pays_to_read(5000) == pays


def test_chunks_are_as_long_as_memory_allows_by_what_earlier_ones_took() -> None:
    """A row takes 1,000 bytes, and 10 for each token before it; the first chunk is as short as the warm-up."""
    scratch = ScratchCosts()
    assert scratch.most_rows(0, 0, 1) == 2048, "nothing is known"
    before, num_rows = 0, 64
    for _ in range(20):
        needed = num_rows * (1000 + 10 * (before + num_rows))
        assert needed <= 40 * 2**20
        scratch.observe(0, num_rows, before + num_rows, needed)
        before += num_rows
        num_rows = scratch.most_rows(0, before, 40 * 2**20)
    assert before > 4000 and num_rows >= 256
    assert scratch.most_rows(0, 0, 1) == scratch.most_rows(0, 10**9, 2**30) == 4, "a prompt goes on in any case"
    assert scratch.most_rows(1, before, 40 * 2**20) == num_rows, "nothing is known yet of another kind of cache"
    scratch.observe(1, 64, 64, 64)
    assert scratch.most_rows(1, before, 40 * 2**20) == 2048
