"""The scheduler on a clock of its own: what a chain with given times can do, and what one request costs another."""

from dataclasses import replace
from itertools import pairwise

import pytest

from coordinator.bench.simulate import Hop, Pipeline, SecondsByRows, SimulatedLoad, aggregate_tokens_per_s, simulate
from coordinator.planning.costs import ChainCosts

FLAT = ((1, 0.010),)  # a step takes 10 ms however many rows it has
PER_ROW = ((1, 0.010), (2, 0.020))  # rows are all that costs
HERE = Hop(0.0)


def equal(num_stages: int, times: SecondsByRows = FLAT, hop: Hop = HERE) -> Pipeline:
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
        assert Pipeline((points,), (HERE,)).stage_s(0, num_rows) == pytest.approx(seconds)
    assert Hop(0.02).seconds(1000) == 0.02
    assert Hop(0.02, 1e6, 2000).seconds(5) == pytest.approx(0.02 + 0.01)


def test_one_request_alone_waits_for_every_stage_and_hop_once_per_token() -> None:
    pipeline = Pipeline(
        (((1, 0.01),), ((1, 0.03),), ((1, 0.02),)),
        (Hop(0.005), Hop(0.0), Hop(0.002, 1000, 4)),
    )
    found = simulate(pipeline, at_once(1, num_tokens=50))
    assert found.ttft_s == [pytest.approx(0.071)]
    assert len(found.gaps_s) == 49 and found.gaps_s == pytest.approx([0.071] * 49)
    assert found.tokens_per_s == pytest.approx(1 / 0.071)
    assert found.utilisation == pytest.approx([0.01 / 0.071, 0.03 / 0.071, 0.02 / 0.071])


def test_n_requests_on_n_equal_stages_have_n_times_the_throughput_of_one() -> None:
    for num_stages in (1, 2, 3, 8):
        one = simulate(equal(num_stages, PER_ROW), at_once(1))
        many = simulate(equal(num_stages, PER_ROW), at_once(num_stages))
        assert many.tokens_per_s == pytest.approx(num_stages * one.tokens_per_s, rel=0.01)
        assert max(many.gaps_s) == pytest.approx(max(one.gaps_s)), "and none of them is slower than alone"


def test_a_thin_link_makes_every_row_wait_for_those_before_it() -> None:
    """2 ms per row: a prompt of 64 rows needs 128 ms on every link, a token 2 ms."""
    thin = equal(2, hop=Hop(0.001, 1e6, 2000))
    found = simulate(thin, at_once(1, num_prompt=64, num_tokens=3))
    assert found.ttft_s == [pytest.approx(2 * (0.010 + 0.001) + 0.128 + 0.002)], "back go answers only"
    assert found.gaps_s == pytest.approx([2 * (0.010 + 0.001 + 0.002)] * 2)
    many = simulate(thin, at_once(40, num_tokens=100))  # 20 rows in a lane: the link is what limits
    assert many.tokens_per_s == pytest.approx(1 / 0.002, rel=0.05)


def test_a_prompt_in_chunks_is_at_work_on_all_stages_at_once() -> None:
    """c chunks on n stages take (c + n - 1) / n of the time that they would take one after another."""
    found = simulate(equal(4), at_once(1, num_prompt=64 * 12, num_tokens=1))
    assert found.ttft_s == [pytest.approx((12 + 4 - 1) * 0.010)]
    whole = simulate(equal(4), at_once(1, num_prompt=64 * 12, num_tokens=1, chunk=64 * 12))
    assert whole.ttft_s == [pytest.approx(4 * 0.010)]  # free rows: chunks are not


def test_a_chain_is_as_fast_as_its_slowest_stage() -> None:
    slow = Pipeline((PER_ROW, ((1, 0.040), (2, 0.080)), PER_ROW), (HERE,) * 3)
    found = simulate(slow, at_once(3, num_tokens=300))
    assert found.tokens_per_s == pytest.approx(1 / 0.040, rel=0.02)
    assert found.utilisation[1] > 0.97 and found.utilisation[0] == pytest.approx(0.25, rel=0.05)


def test_an_8k_prompt_beside_a_stream_uses_all_nodes_and_hardly_slows_the_stream_down() -> None:
    """Four nodes with a quarter of a model each, on which a row takes 20 ms and a chunk of 128 rows 120 ms."""
    pipeline = equal(4, ((1, 0.020), (128, 0.120)), Hop(0.0005))
    stream = simulate(pipeline, SimulatedLoad((0.0,), 8192, 400)).token_times[0]
    found = simulate(pipeline, SimulatedLoad((0.0, stream[0] + 1), 8192, 400))
    first = found.token_times[1][0]
    gaps = sorted(b - a for a, b in pairwise(found.token_times[0]) if stream[0] + 1 <= b <= first)
    assert found.ttft_s[1] <= 10, "one chunk at a time would take 30.8 s"
    assert gaps[len(gaps) // 2] <= 0.520 and gaps[-1] <= 0.610


def roofline(read_gb: float, touched: float, active_params: float, num_nodes: int) -> SecondsByRows:
    """An equal part of a mixture of experts on an M4 Max (546 GB/s, 25 TFLOP/s).

    Of the weights 5 % are read for every frame, the rest as far as one of its rows goes to them: `touched` by each.
    """

    def seconds(rows: int) -> float:
        gigabytes = read_gb * (0.05 + 0.95 * (1 - (1 - touched) ** rows))
        return max(gigabytes / 546, 2 * active_params * rows / 25e12) / num_nodes + 0.001

    return tuple((rows, seconds(rows)) for rows in (*range(1, 512), *range(512, 4097, 8)))


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
    [slow] = simulate(equal(2, ((16, 0.016), (32, 0.032))), load).token_times
    # the prompt's token, or a finished canvas, goes with the first step of each canvas
    assert slow[::16] == pytest.approx([0.13 + 0.16 * number for number in range(4)])
    both = simulate(equal(2), replace(load, arrivals_s=(0.0, 0.0))).token_times
    # in one lane, since its rows are free: the second prompt's frame is all that either waits for
    assert max(each[-1] for each in both) == pytest.approx(0.32 + 0.02)
