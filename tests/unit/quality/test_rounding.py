"""How far two tokens are from changing places, asked of the sampler itself."""

import math

import mlx.core as mx
import numpy as np
import pytest

from coordinator.quality.replay import find_margin
from coordinator.quality.report import Rounding
from protos.brigade_pb2 import Sampling
from worker.compute.sampling import Sampler, gumbel, random_key

POSITION, V = 5, 40
LOGITS = np.random.default_rng(0).normal(scale=1.5, size=V).astype(np.float32)
ORDER = list(map(int, np.argsort(-LOGITS)))


@pytest.fixture(autouse=True)
def use_uncompiled(uncompiled: None) -> None:
    """Filters compile for a second each otherwise."""


def margin(sampling: Sampling, logits: np.ndarray, expected: int, found: int, history: tuple[int, ...] = ()) -> float:
    sampler = Sampler(sampling)

    def draw(row: mx.array) -> int:
        return int(sampler(row, [POSITION], list(history), [len(history)]).tokens.item())

    row = mx.array(logits)[None]
    assert draw(row) == expected
    return find_margin(draw, row, expected, found)


def drawn_scores(sampling: Sampling) -> np.ndarray:
    return LOGITS / sampling.temperature + np.array(gumbel([random_key(sampling.seed, POSITION)], V)[0])


@pytest.mark.parametrize("rank", [1, 2, 10])
def test_greedy_tokens_are_as_far_apart_as_their_logits(rank: int) -> None:
    expected, found = ORDER[0], ORDER[rank]
    assert margin(Sampling(), LOGITS, expected, found) == pytest.approx(LOGITS[expected] - LOGITS[found], rel=1e-3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_drawn_tokens_are_as_far_apart_as_their_scores_times_the_temperature(temperature: float) -> None:
    sampling = Sampling(seed=3, temperature=temperature)
    scores = drawn_scores(sampling)
    best, second = map(int, np.argsort(-scores)[:2])
    assert margin(sampling, LOGITS, best, second) == pytest.approx(
        temperature * (scores[best] - scores[second]), rel=1e-3
    )


def test_penalties_count_as_they_do_in_the_draw() -> None:
    """The found token's logit is divided by its penalty, so it has twice the way to go."""
    logits = np.array([3.0, 5.0, -1.0, 0.0], np.float32)
    penalised = Sampling(repetition_penalty=2.0)
    assert margin(penalised, logits, expected=0, found=1, history=(1,)) == pytest.approx(
        0.5, rel=1e-3
    )  # expected falls
    logits = np.array([3.0, 2.0, -1.0, 0.0], np.float32)
    assert margin(penalised, logits, expected=0, found=1, history=(1,)) == pytest.approx(2.0, rel=1e-3)


def test_a_token_outside_a_filter_is_as_far_as_the_filters_edge() -> None:
    """Inside it would have been drawn: what moved is the edge, not the race."""
    wide = Sampling(seed=3, temperature=1000.0)
    race = np.argsort(-np.array(gumbel([random_key(3, POSITION)], V)[0]))
    first, second = int(race[0]), int(race[1])
    logits = np.linspace(0, -1, V).astype(np.float32)
    logits[[first, second]] = -2.0, 1.0
    narrow = Sampling(seed=3, temperature=1000.0, top_k=V - 1)
    assert margin(wide, logits, first, second) > 10
    assert margin(narrow, logits, second, first) == pytest.approx(1.0, rel=1e-3), "the least kept is at -1"


def test_a_token_at_the_inner_edge_of_a_filter_gives_way_by_as_little_as_it_stands_inside() -> None:
    race = np.argsort(-np.array(gumbel([random_key(3, POSITION)], V)[0]))
    first, second = int(race[0]), int(race[1])
    logits = np.linspace(0, -1, V).astype(np.float32)
    logits[[first, second]] = -0.98, 1.0
    last = int(np.argmin(logits))
    logits[last] = -0.99
    kept = int((logits >= logits[first]).sum())
    narrow = Sampling(seed=3, temperature=1000.0, top_k=kept)
    assert margin(narrow, logits, first, second) == pytest.approx(float(-0.98 - np.sort(logits)[-kept - 1]), rel=0.01)


def test_no_shift_brings_a_token_without_a_logit() -> None:
    logits = LOGITS.copy()
    logits[7] = -np.inf
    assert margin(Sampling(), logits, int(np.argmax(logits)), 7) == math.inf


def test_what_is_drawn_already_needs_no_shift() -> None:
    assert find_margin(lambda row: 4, mx.array(LOGITS)[None], 3, 4) == 0.0


def test_a_margin_is_not_looked_for_beyond_what_is_asked() -> None:
    def draw(row: mx.array) -> int:
        return int(mx.argmax(row[0]).item())

    row = mx.array([1.0, 3.0, 2.5])[None]
    assert find_margin(draw, row, 1, 2, most=0.6) == pytest.approx(0.5, rel=1e-3)
    assert find_margin(draw, row, 1, 2, most=0.4) == find_margin(draw, row, 1, 2, most=1e-9) == math.inf


def test_tokens_that_tie_are_as_close_as_can_be_told() -> None:
    row = mx.array([1.0, 3.0, 3.0])[None]
    assert find_margin(lambda row: int(mx.argmax(row[0]).item()), row, 1, 2) < 1e-6


@pytest.mark.parametrize(
    ("margin", "measured", "explains"),
    [
        (0.1, 0.2, True),
        (0.2, 0.2, True),
        (0.0, 1e-9, True),
        (0.21, 0.2, False),
        (0.0, 0.0, False),
        (math.inf, 0.2, False),
        (math.inf, math.inf, False),
        (0.1, math.inf, False),
        (0.1, math.nan, False),
    ],
)
def test_rounding_explains_what_is_no_wider_than_it_and_only_where_there_is_some(
    margin: float, measured: float, explains: bool
) -> None:
    assert Rounding(margin, measured).explains is explains
