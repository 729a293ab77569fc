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


def test_tokens_are_as_far_apart_as_their_logits_or_their_scores_times_the_temperature() -> None:
    for rank in (1, 2, 10):
        expected, found = ORDER[0], ORDER[rank]
        assert margin(Sampling(), LOGITS, expected, found) == pytest.approx(LOGITS[expected] - LOGITS[found], rel=1e-3)
    for temperature in (0.5, 1.0, 3.0):
        scores = LOGITS / temperature + np.array(gumbel([random_key(3, POSITION)], V)[0])
        best, second = map(int, np.argsort(-scores)[:2])
        apart = temperature * (scores[best] - scores[second])
        found = margin(Sampling(seed=3, temperature=temperature), LOGITS, best, second)
        assert found == pytest.approx(apart, rel=1e-3)


def test_penalties_count_as_they_do_in_the_draw() -> None:
    """The found token's logit is divided by its penalty, so it has twice the way to go."""
    penalised = Sampling(repetition_penalty=2.0)
    for logit, apart in ((5.0, 0.5), (2.0, 2.0)):  # of the first, the expected token falls
        logits = np.array([3.0, logit, -1.0, 0.0], np.float32)
        assert margin(penalised, logits, expected=0, found=1, history=(1,)) == pytest.approx(apart, rel=1e-3)


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


def test_extremes_of_a_margin() -> None:
    """No shift brings a token without a logit, what is drawn already needs none, and ties are as close as can be."""
    logits = LOGITS.copy()
    logits[7] = -np.inf
    assert margin(Sampling(), logits, int(np.argmax(logits)), 7) == math.inf
    assert find_margin(lambda row: 4, mx.array(LOGITS)[None], 3, 4) == 0.0

    def draw(row: mx.array) -> int:
        return int(mx.argmax(row[0]).item())

    assert find_margin(draw, mx.array([1.0, 3.0, 3.0])[None], 1, 2) < 1e-6
    row = mx.array([1.0, 3.0, 2.5])[None]
    assert find_margin(draw, row, 1, 2, most=0.6) == pytest.approx(0.5, rel=1e-3)
    assert find_margin(draw, row, 1, 2, most=0.4) == find_margin(draw, row, 1, 2, most=1e-9) == math.inf


def test_rounding_explains_what_is_no_wider_than_it_and_only_where_there_is_some() -> None:
    inf, nan = math.inf, math.nan
    assert all(Rounding(*each).explains for each in ((0.1, 0.2), (0.2, 0.2), (0.0, 1e-9)))
    for each in ((0.21, 0.2), (0.0, 0.0), (inf, 0.2), (inf, inf), (0.1, inf), (0.1, nan)):
        assert not Rounding(*each).explains
