"""Deadlines follow from what such steps took before: tight for known kinds at any size, a minute for the first."""

import pytest

from coordinator.cluster.step_timeouts import StepTimeouts
from coordinator.planning.costs import ChainCosts
from protos.brigade_pb2 import CACHE_INT8, Cache, Frame, Opening, Sampling, Window

FIRST_S, SILENCE_S = 60.0, 6.0


def costs_of(seconds_per_row: float) -> ChainCosts:
    """Two stages, half each, with hops of 10 ms."""
    costs = ChainCosts(2)
    for num_rows in (1, 64, 2048):
        half = seconds_per_row * num_rows / 2
        for _ in range(2):
            costs.observe(num_rows, [half, half], 2 * half + 0.01, was_alone=True)
    return costs


def rows(count: int, *, wanted: int = 0, slots: int = 1) -> Frame:
    return Frame(windows=[Window(slot=slot, tokens=[0] * count, wanted=wanted) for slot in range(slots)])


def known(timeouts: StepTimeouts, frame: Frame) -> bool:
    timeouts.open(frame)
    return timeouts.is_known(timeouts.kind_of(frame))


def do(timeouts: StepTimeouts, *frames: Frame) -> None:
    for frame in frames:
        timeouts.open(frame)
        timeouts.done(timeouts.kind_of(frame))


OPENED = Frame(opened=[Opening(slot=slot) for slot in range(16)])


@pytest.mark.parametrize("num_rows", [1, 16, 64, 256, 512])
def test_a_step_as_there_were_some_is_overdue_within_ten_seconds_whatever_its_size(num_rows: int) -> None:
    timeouts, unknown = StepTimeouts(), ChainCosts(2)
    assert known(timeouts, Frame(closed=[1])), "a frame without rows needs no kernels"
    assert timeouts.allowed_s(frozenset(), unknown.passage_s(0)) == SILENCE_S
    do(timeouts, OPENED, rows(num_rows))
    kind = timeouts.kind_of(rows(num_rows))
    assert SILENCE_S <= timeouts.allowed_s(kind, costs_of(0.005).passage_s(num_rows)) <= 10
    assert timeouts.allowed_s(kind, unknown.passage_s(num_rows)) == SILENCE_S


def test_the_largest_chunks_on_slow_nodes_are_not_waited_for_by_minutes() -> None:
    """36 ms per row: a chunk of 2,048 takes 74 s; three in flight were given 448 s once."""
    timeouts, costs = StepTimeouts(), costs_of(0.036)
    do(timeouts, OPENED, rows(2048))
    allowed_s = timeouts.allowed_s(timeouts.kind_of(rows(2048)), costs.passage_s(2048))
    assert 74 < allowed_s < 74 * 1.6 + SILENCE_S
    do(timeouts, rows(1, wanted=1))
    usual_s = costs.passage_s(1)
    assert timeouts.allowed_s(timeouts.kind_of(rows(1, wanted=1)), usual_s) < 7, (
        "a token behind them waits for itself only"
    )


def test_the_first_step_of_a_size_gets_a_minute_and_sizes_and_lanes_count_by_powers_of_two() -> None:
    timeouts = StepTimeouts()
    do(timeouts, OPENED, rows(64))
    assert known(timeouts, rows(64)) and known(timeouts, rows(127))
    for num_rows in (63, 128):
        kind = timeouts.kind_of(rows(num_rows))
        assert not timeouts.is_known(kind) and timeouts.allowed_s(kind, 0.2) == FIRST_S
    do(timeouts, rows(1, wanted=1, slots=8), rows(12, slots=1))
    assert known(timeouts, rows(1, wanted=1, slots=9))
    assert not known(timeouts, rows(3, wanted=1, slots=3))


@pytest.mark.parametrize(
    "opening",
    [
        *(
            Opening(slot=0, sampling=Sampling(**{field: value}))  # type: ignore[arg-type]
            for field, value in {
                "temperature": 1.0, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2,
                "presence_penalty": 1.2, "frequency_penalty": 1.2, "logit_bias": {3: 1.0}, "logprobs": 4,
            }.items()
        ),
        Opening(slot=0, cache=Cache(kind=CACHE_INT8)),
    ],
    ids=lambda opening: str(opening.ListFields()[-1][1])[:20],
)  # fmt: skip
def test_the_first_use_of_a_sampler_or_a_cache_gets_a_minute(opening: Opening) -> None:
    timeouts = StepTimeouts()
    greedy = rows(1, wanted=1)
    do(timeouts, OPENED, greedy, Frame(opened=[Opening(slot=0, sampling=Sampling(seed=7))]))
    assert known(timeouts, greedy)
    do(timeouts, Frame(opened=[opening]))
    assert not known(timeouts, greedy)
    do(timeouts, greedy)
    assert known(timeouts, greedy)


def repeated(*took_s: float, rows_each: int = 64, alone: bool = True) -> float:
    """What one more step of a size may take on a chain of two stages, after such steps took so long."""
    timeouts, costs = StepTimeouts(), ChainCosts(2)
    do(timeouts, OPENED, rows(rows_each))
    for seconds in took_s:
        costs.observe(rows_each, [seconds / 2] * 2, seconds if alone else 10 * seconds, was_alone=alone)
    return timeouts.allowed_s(timeouts.kind_of(rows(rows_each)), costs.passage_s(rows_each))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("first_s", [0.1, 6.5, 20.0, 45.0])
def test_the_second_step_of_a_kind_may_take_half_as_long_again_as_the_first(first_s: float, alone: bool) -> None:
    assert repeated(first_s, alone=alone) == pytest.approx(SILENCE_S + 1.5 * first_s)


@pytest.mark.parametrize("took_s", [(5, 9, 14, 22), (20, 8, 20, 8, 20), (20, 5, 13), (1, 1, 1, 6, 9, 14, 20)], ids=str)
def test_a_node_that_gets_slower_or_is_slow_now_and_then_is_waited_for(took_s: tuple[float, ...]) -> None:
    for done in range(1, len(took_s)):
        assert repeated(*took_s[:done]) > took_s[done]


def test_what_one_step_took_is_soon_forgotten() -> None:
    """A kernel that compiled for 40 s, then a tenth of a second each: a hung engine is to be found within 10 s."""
    assert repeated(40.0, *[0.1] * 4) < 10
    assert repeated(40.0, *[0.1] * 12) == pytest.approx(SILENCE_S + 0.15, abs=0.02)
    costs = ChainCosts(2)
    costs.observe(64, [10, 10], 20.0, was_alone=True)
    assert costs.passage_s(1) == 0.0, "what a chunk took says nothing of a token"
