"""The scheduler on a clock of its own: what a chain with given times can do, and what one request costs another."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from coordinator.bench.simulate import (
    Hop,
    Pipeline,
    Simulated,
    SimulatedLoad,
    SimulatedStage,
    aggregate_tokens_per_s,
    simulate,
)
from coordinator.planning.costs import ChainCosts

FLAT = SimulatedStage(((1, 0.010),))  # a step takes 10 ms however many rows it has
PER_ROW = SimulatedStage(((1, 0.010), (2, 0.020)))  # rows are all that costs
HERE = Hop(0.0)


def equal(num_stages: int, times: SimulatedStage = FLAT, hop: Hop = HERE) -> Pipeline:
    return Pipeline((times,) * num_stages, (hop,) * num_stages)


def at_once(num_requests: int, *, num_prompt: int = 1, num_tokens: int = 200, chunk: int = 64) -> SimulatedLoad:
    return SimulatedLoad((0.0,) * num_requests, num_prompt, num_tokens, chunk)


def test_a_stage_takes_what_the_lines_between_its_points_say() -> None:
    one, two, three = ((1, 0.01),), ((1, 0.01), (11, 0.02)), ((1, 0.01), (4, 0.01), (8, 0.05))
    for points, num_rows, seconds in (
        (one, 1, 0.01),
        (one, 99, 0.01),
        (two, 0, 0.0),  # a frame that only closes slots
        (two, 1, 0.01),
        (two, 6, 0.015),
        (two, 11, 0.02),
        (two, 21, 0.03),  # beyond: on the last line
        (((5, 0.01), (10, 0.02)), 4, 0.008),  # before: on the first
        (((5, 0.01), (6, 0.02)), 1, 0.005),  # never less than half of what is known
        (three, 3, 0.01),
        (three, 6, 0.03),
        (three, 10, 0.07),
    ):
        assert SimulatedStage(points).seconds(num_rows) == pytest.approx(seconds)
    assert Hop(0.02).seconds(1000) == 0.02
    assert Hop(0.02, 1e6, 2000).seconds(5) == pytest.approx(0.02 + 0.01)


def test_one_request_alone_waits_for_every_stage_and_hop_once_per_token() -> None:
    pipeline = Pipeline(
        (SimulatedStage(((1, 0.01),)), SimulatedStage(((1, 0.03),)), SimulatedStage(((1, 0.02),))),
        (Hop(0.005), Hop(0.0), Hop(0.002, 1000, 4)),
    )
    found = simulate(pipeline, at_once(1, num_tokens=50))
    assert found.ttft_s == [pytest.approx(0.071)]
    assert len(found.gaps_s) == 49 and found.gaps_s == pytest.approx([0.071] * 49)
    assert found.tokens_per_s == pytest.approx(1 / 0.071)
    assert found.utilisation == pytest.approx([0.01 / 0.071, 0.03 / 0.071, 0.02 / 0.071])


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_n_requests_on_n_equal_stages_have_n_times_the_throughput_of_one(num_stages: int) -> None:
    one = simulate(equal(num_stages, PER_ROW), at_once(1))
    many = simulate(equal(num_stages, PER_ROW), at_once(num_stages))
    assert many.tokens_per_s == pytest.approx(num_stages * one.tokens_per_s, rel=0.01)
    assert max(many.gaps_s) == pytest.approx(max(one.gaps_s)), "and none of them is slower than alone"


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_no_request_is_faster_than_its_latency(num_stages: int) -> None:
    for num_requests in (1, 2, 5, 16):
        found = simulate(equal(num_stages, hop=Hop(0.003)), at_once(num_requests, num_prompt=20, num_tokens=40))
        assert min([*found.gaps_s, *found.ttft_s]) >= num_stages * 0.013 - 1e-9


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_with_enough_requests_every_stage_is_always_at_work(num_stages: int) -> None:
    for per_stage in (1, 2, 5):
        found = simulate(equal(num_stages, PER_ROW), at_once(num_stages * per_stage, num_tokens=200))
        assert min(found.utilisation) > 0.97 and max(found.utilisation) <= 1 + 1e-9


def test_a_chain_is_as_fast_as_its_slowest_stage_and_requests_are_timed_from_their_arrival() -> None:
    slow = Pipeline((PER_ROW, SimulatedStage(((1, 0.040), (2, 0.080))), PER_ROW), (HERE,) * 3)
    found = simulate(slow, at_once(3, num_tokens=300))
    assert found.tokens_per_s == pytest.approx(1 / 0.040, rel=0.02)
    assert found.utilisation[1] > 0.97 and found.utilisation[0] == pytest.approx(0.25, rel=0.05)
    found = simulate(equal(2), SimulatedLoad((0.0, 5.0), 1, 3, 64))
    assert found.ttft_s == pytest.approx([0.020, 0.020]) and found.gaps_s == pytest.approx([0.020] * 4)
    assert [len(times) for times in found.token_times] == [3, 3]


def test_more_requests_than_stages_gain_only_where_rows_are_free() -> None:
    """Twelve requests on three stages, at the price of three: in lanes of four, or all in one lane."""
    found = simulate(equal(3), at_once(12, num_tokens=300))
    assert found.tokens_per_s == pytest.approx(4 * 100, rel=0.03)
    three, twelve = (simulate(equal(3, PER_ROW), at_once(n, num_tokens=300)).tokens_per_s for n in (3, 12))
    assert twelve == pytest.approx(three, rel=0.03)


def test_slow_hops_are_hidden_by_more_requests() -> None:
    """One lane per stage, each with half of its time on the way: stages are busy for the other half."""
    found = simulate(equal(2, hop=Hop(0.010)), at_once(2, num_tokens=300))
    assert found.tokens_per_s == pytest.approx(2 / 0.040, rel=0.02)
    assert found.utilisation == pytest.approx([0.5, 0.5], rel=0.02)
    more = simulate(equal(2, hop=Hop(0.010)), at_once(8, num_tokens=300))
    assert more.tokens_per_s == pytest.approx(8 / 0.040, rel=0.02)


def test_a_thin_link_makes_every_row_wait_for_those_before_it() -> None:
    """2 ms per row: a prompt of 64 rows needs 128 ms on every link, a token 2 ms."""
    thin = equal(2, hop=Hop(0.001, 1e6, 2000))
    found = simulate(thin, at_once(1, num_prompt=64, num_tokens=3))
    assert found.ttft_s == [pytest.approx(2 * (0.010 + 0.001 + 0.128))]
    assert found.gaps_s == pytest.approx([2 * (0.010 + 0.001 + 0.002)] * 2)
    many = simulate(thin, at_once(40, num_tokens=100))  # 20 rows in a lane: the link is what limits
    assert many.tokens_per_s == pytest.approx(1 / 0.002, rel=0.05)


def test_a_prompt_in_chunks_is_at_work_on_all_stages_at_once() -> None:
    """c chunks on n stages take (c + n - 1) / n of the time that they would take one after another."""
    found = simulate(equal(4), at_once(1, num_prompt=64 * 12, num_tokens=1))
    assert found.ttft_s == [pytest.approx((12 + 4 - 1) * 0.010)]
    whole = simulate(equal(4), at_once(1, num_prompt=64 * 12, num_tokens=1, chunk=64 * 12))
    assert whole.ttft_s == [pytest.approx(4 * 0.010)]  # free rows: chunks are not


TIMES = SimulatedStage(((1, 0.010), (64, 0.050)))


def among_streams(pipeline: Pipeline, num_streams: int, num_prompt: int, chunk: int = 64) -> tuple[Simulated, float]:
    """Requests with the same long prompt, so many at the start and one more while all of those stream."""
    alone = simulate(pipeline, SimulatedLoad((0.0,) * num_streams, num_prompt, 400, chunk))
    late = max(times[0] for times in alone.token_times) + 1.0
    return simulate(pipeline, SimulatedLoad((*(0.0,) * num_streams, late), num_prompt, 400, chunk)), late


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_streams", [1, 5])
@pytest.mark.parametrize("hop_s", [0.0, 0.02])
def test_a_long_prompt_adds_no_more_than_a_chunk_per_stage_and_one_more_to_any_gap_between_tokens(
    num_streams: int, num_stages: int, hop_s: float
) -> None:
    pipeline = equal(num_stages, TIMES, Hop(hop_s))
    found, late = among_streams(pipeline, num_streams, 4096)
    passage = num_stages * (TIMES.seconds(64) + hop_s)
    disturbed = [
        after - before
        for times in found.token_times[:-1]
        for before, after in pairwise(times)
        if late <= after <= found.token_times[-1][0]  # while it is in the chain
    ]
    undisturbed = num_stages * (TIMES.seconds(math.ceil(num_streams / num_stages)) + hop_s)
    assert disturbed and max(disturbed) <= undisturbed + passage + TIMES.seconds(64) + 1e-9
    if num_stages > 1:
        assert found.token_times[-1][0] - late < 64 * passage / num_stages * 1.6, "its chunks are on all stages at once"


def test_a_chunk_that_holds_streams_up_holds_them_up_on_one_stage_at_a_time() -> None:
    pipeline = equal(4, TIMES)
    found, late = among_streams(pipeline, 4, 4096)
    gaps = [b - a for times in found.token_times[:-1] for a, b in pairwise(times) if a > late]
    assert max(gaps) <= 4 * TIMES.seconds(1) + 5 * TIMES.seconds(64) + 1e-9
    assert sum(gaps) / len(gaps) < 3 * 4 * TIMES.seconds(1)


def test_an_8k_prompt_beside_a_stream_uses_all_nodes_and_hardly_slows_the_stream_down() -> None:
    """Four nodes with a quarter of a model each, on which a row takes 20 ms and a chunk of 128 rows 120 ms."""
    pipeline = equal(4, SimulatedStage(((1, 0.020), (128, 0.120))), Hop(0.0005))
    stream = simulate(pipeline, SimulatedLoad((0.0,), 8192, 400)).token_times[0]
    found = simulate(pipeline, SimulatedLoad((0.0, stream[0] + 1), 8192, 400))
    first = found.token_times[1][0]
    gaps = sorted(b - a for a, b in pairwise(found.token_times[0]) if stream[0] + 1 <= b <= first)
    assert found.ttft_s[1] <= 10, "one chunk at a time would take 30.8 s"
    assert gaps[len(gaps) // 2] <= 0.520 and gaps[-1] <= 0.610


def roofline(read_gb: float, touched: float, active_params: float, num_nodes: int) -> SimulatedStage:
    """An equal part of a mixture of experts on an M4 Max (546 GB/s, 25 TFLOP/s).

    Of the weights 5 % are read for every frame, the rest as far as one of its rows goes to them: `touched` by each.
    """

    def seconds(rows: int) -> float:
        gigabytes = read_gb * (0.05 + 0.95 * (1 - (1 - touched) ** rows))
        return max(gigabytes / 546, 2 * active_params * rows / 25e12) / num_nodes + 0.001

    return SimulatedStage(tuple((rows, seconds(rows)) for rows in (*range(1, 512), *range(512, 4097, 8))))


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize(
    ("model", "num_nodes", "most_s"),
    [((65, 4 / 128, 5.1e9), 2, 7), ((199, 8 / 160, 32e9), 4, 24)],
    ids=["gpt-oss-120b", "GLM-4.7"],
)
def test_a_30k_prompt_goes_in_chunks_that_suit_the_model_from_the_first_one_on(
    model: tuple[float, float, float], num_nodes: int, most_s: float, is_measured: bool
) -> None:
    """With chunks that the line through 1 and 64 rows suggests they would take 14 and 71 s."""
    pipeline = equal(num_nodes, roofline(*model, num_nodes))
    measured = {rows: pipeline.stages_s(rows) for rows in (64, 512)} if is_measured else {}
    costs = ChainCosts(num_nodes, measured)
    for rows in (64, 64, 1, 1):  # a warm-up
        costs.observe(rows, pipeline.stages_s(rows), 0.0, was_alone=True)
    found = simulate(pipeline, SimulatedLoad((0.0,), 30_000, 1), costs)
    assert found.ttft_s[0] <= most_s


def test_the_rate_of_all_together_is_taken_while_all_decode() -> None:
    assert aggregate_tokens_per_s([[0.0, 1.0, 2.0, 3.0, 4.0]]) == 1
    assert aggregate_tokens_per_s([[0.0, 1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0]]) == 2
    assert aggregate_tokens_per_s([[0.0, 1.0], [2.0, 4.0]]) == pytest.approx(3 / 4)  # never at once: of the whole time
    assert aggregate_tokens_per_s([[0.0, 1.0, 2.0, 3.0], [2.9, 4.0]]) == pytest.approx(5 / 4)  # hardly ever: the same


def test_a_canvas_takes_as_many_steps_of_its_rows_as_it_says_and_two_requests_share_two_stages() -> None:
    load = replace(at_once(1, num_tokens=64), canvas=(16, 4))
    [times] = simulate(equal(2), load).token_times
    assert times[::16] == pytest.approx([0.08 * number for number in range(1, 5)])
    assert all(len(set(times[at : at + 16])) == 1 for at in range(0, 64, 16))
    [slow] = simulate(equal(2, SimulatedStage(((16, 0.016), (32, 0.032)))), load).token_times
    # the prompt's token, or a finished canvas, goes with the first step of each canvas
    assert slow[::16] == pytest.approx([0.13 + 0.16 * number for number in range(4)])
    both = simulate(equal(2), replace(load, arrivals_s=(0.0, 0.0))).token_times
    assert max(each[-1] for each in both) == pytest.approx(0.32 + 0.01)
