"""The draw itself: Gumbel-max by (seed, position), for one row or many, among all tokens or the allowed ones."""

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from protos.brigade_pb2 import Sampling
from tests.unit.compute.rows import ALL_FILTERS, VOCAB, in_rows, logits_of, numpy_gumbel
from worker.compute import sampling as module
from worker.compute.sampling import Sampler, gumbel, random_key

pytestmark = pytest.mark.usefixtures("uncompiled")


def chi_squared(tokens: Sequence[int], probabilities: np.ndarray) -> float:
    expected = len(tokens) * probabilities
    return float(((np.bincount(tokens, minlength=len(probabilities)) - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("by_seed", [False, True], ids=["positions of a seed", "seeds at a position"])
def test_draws_follow_the_distribution(by_seed: bool) -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.1, 0.025])
    logits, num = mx.log(mx.array(probabilities, mx.float32))[None], 2000
    if by_seed:
        tokens = [in_rows(Sampling(seed=seed, temperature=1.0), logits, [17])[0] for seed in range(num)]
    else:
        tokens = in_rows(Sampling(seed=3, temperature=1.0), mx.repeat(logits, num, axis=0), range(num))
    assert chi_squared(tokens, probabilities) < 18.47, "one in a thousand by chance, with four degrees of freedom"
    colder = probabilities**1.25 / (probabilities**1.25).sum()
    assert chi_squared(tokens, colder) > 18.47, "the test could not tell"


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 7}], ids=["all", "some"])
def test_slots_that_sample_alike_draw_together_what_each_draws_alone(filters: dict[str, float]) -> None:
    seeds, positions = range(40, 48), [9, 9, 17, 17, 3, 9, 17, 4]
    samplings = [Sampling(seed=seed, temperature=1.3, **filters) for seed in seeds]  # type: ignore[arg-type]
    logits = mx.concatenate([logits_of(seed % 3) for seed in seeds])
    together = Sampler(samplings[0]).draw(logits, seeds, positions)
    alone = [
        in_rows(sampling, logits[row : row + 1], [position])[0]
        for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True))
    ]
    assert together.tokens.tolist() == alone == [row.tokens.item() for row in together.rows()]
    assert len(set(alone)) > 4 and len({Sampler(sampling).kind for sampling in samplings}) == 1
    kinds = [Sampler(Sampling(temperature=t, top_k=k)).kind for t in (0.0, 0.5, 1.0) for k in (0, 5)]
    assert len(set(kinds)) == len(kinds) and None not in kinds, "other parameters are another kind"
    needs_more = Sampling(repetition_penalty=1.2), Sampling(logprobs=3)  # than logits and positions, or tells more
    assert [Sampler(each).kind for each in needs_more] == [None, None]


def test_the_noise_is_threefrys_bits_as_published() -> None:
    """So it is that of every backend and every release of MLX that keeps to them: a seed's tokens do not change."""
    for vocab_size in (1, 2, 8, 97, 1000):
        for seed, position in ((0, 0), (7, 31), (2**64 - 1, 2**20)):
            expected = numpy_gumbel(seed, position, vocab_size)
            np.testing.assert_allclose(
                np.array(gumbel([random_key(seed, position)], vocab_size)[0]), expected, atol=2e-5, rtol=2e-6
            )


def test_the_noise_has_the_moments_of_gumbels_distribution_and_its_tail_and_is_finite() -> None:
    noise = np.array(gumbel([random_key(1, position) for position in range(8)], 100_000), np.float64).ravel()
    assert noise.mean() == pytest.approx(0.5772, abs=5 * 1.2825 / len(noise) ** 0.5)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.02)
    for x in (-1.5, 0.0, 3.0, 8.0):
        share = np.exp(-np.exp(-x))
        assert (noise < x).mean() == pytest.approx(share, abs=5 * (share * (1 - share) / len(noise)) ** 0.5)
    ends = np.array(module.gumbel_of(mx.array([0.0, 2.0**-32, 0.5, 1 - 2.0**-24])))
    assert np.isfinite(ends).all() and (np.diff(ends) < 0).all()
    assert ends[0] > 22, "the rarest noise lifts a token of probability 1e-9 above the likeliest"


@pytest.mark.parametrize("filters", [{}, ALL_FILTERS], ids=["plain", "all filters"])
def test_rows_drawn_at_once_are_those_drawn_alone(filters: dict) -> None:
    """Equal for [1, V] and [N, V], in any order: the rows of a window are verified at once."""
    sampling, N = Sampling(seed=5, temperature=1.3, **filters), 12
    logits, positions = mx.concatenate([logits_of(n) for n in range(N)]), [3 * n + 1 for n in range(N)]
    alone = [in_rows(sampling, logits[n : n + 1], [positions[n]])[0] for n in range(N)]
    assert len(set(alone)) > 5
    assert in_rows(sampling, logits, positions) == alone
    assert in_rows(sampling, logits[::-1], positions[::-1]) == alone[::-1]


def test_a_draw_uses_neither_mlx_s_categorical_nor_its_global_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **others: object) -> None:
        raise AssertionError("called")

    sampling = Sampling(seed=11, temperature=1.0, **ALL_FILTERS)
    logits = mx.concatenate([logits_of(n) for n in range(9)])
    expected = in_rows(sampling, logits, range(9))
    for name in ("categorical", "gumbel", "seed"):
        monkeypatch.setattr(mx.random, name, refuse)
    before = np.array(mx.random.state[0])
    assert in_rows(sampling, logits, range(9)) == expected
    np.testing.assert_array_equal(np.array(mx.random.state[0]), before)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1000.0])
@pytest.mark.parametrize("filters", [{}, ALL_FILTERS], ids=["plain", "all filters"])
def test_a_token_of_no_probability_is_never_drawn(temperature: float, filters: dict) -> None:
    """Such as MASK, whose logit is minus infinity."""
    logits = mx.zeros((300, 25))
    logits[:, 5:] = -mx.inf
    tokens = in_rows(Sampling(seed=1, temperature=temperature, **filters), logits, range(300))
    assert set(tokens) <= {0, 1, 2, 3, 4}
    assert temperature == 0 or set(tokens) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("more", [{}, ALL_FILTERS, {"logit_bias": {0: 9.0}, "repetition_penalty": 1.5}], ids=str)
def test_only_allowed_tokens_are_drawn_as_if_there_were_no_others(temperature: float, more: dict) -> None:
    N, kept = 40, [3, 8, 20, 21, 22, 23, 50, 77, 90, 91, 92, 93, 94, 95, 96, 4, 5, 6, 7, 9, 10]
    sampling = Sampling(seed=2, temperature=temperature, **more)
    logits = mx.concatenate([logits_of(n) for n in range(N)])
    allowed = mx.zeros(VOCAB, mx.bool_)
    allowed[mx.array(kept)] = True
    expected = in_rows(sampling, mx.where(allowed, logits, -mx.inf), range(N))
    found = in_rows(sampling, logits, range(N), allowed)
    assert found == expected and set(found) <= set(kept)
    assert found != in_rows(sampling, logits, range(N))
    assert found == in_rows(sampling, logits, range(N), mx.repeat(allowed[None], N, axis=0))


def test_every_row_may_have_an_own_mask_and_all_allowed_is_as_none() -> None:
    N, sampling = 30, Sampling(seed=2, temperature=5.0, **ALL_FILTERS)
    logits = mx.concatenate([logits_of(n) for n in range(N)])
    each = mx.arange(VOCAB)[None] == (7 * mx.arange(N) % VOCAB)[:, None]
    assert in_rows(sampling, logits, range(N), each) == [7 * n % VOCAB for n in range(N)]
    free = in_rows(sampling, logits, range(N))
    assert in_rows(sampling, logits, range(N), mx.ones(VOCAB, mx.bool_)) == free


def test_logprobs_under_a_mask_are_those_among_the_allowed() -> None:
    allowed = mx.arange(VOCAB) < 10
    drawn = Sampler(Sampling(logprobs=4))(logits_of(5), [0], [], [0], allowed=allowed).to_samples(0)[0]
    exact = np.array(logits_of(5)[0, :10], np.float64)
    exact -= np.log(np.exp(exact).sum())
    assert drawn.logprob == pytest.approx(exact.max(), abs=1e-5)
    assert [other.token for other in drawn.alternatives] == np.argsort(-exact)[:3].tolist()


def test_no_two_positions_of_any_32_bit_seeds_share_a_key() -> None:
    """Two keys are equal only where a multiple of the step equals the seeds' difference, and the step's multiples stay
    further than 2^32 from 0 for a million positions: they come closest at Fibonacci numbers, as it is the golden ratio.
    """
    seeds = [*range(40), 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    positions = [*range(200), 2**17, 2**20]
    keys = {random_key(seed, position) for seed in seeds for position in positions}
    assert len(keys) == len(seeds) * len(positions) and all(0 <= key < 2**64 for key in keys)
    step = (random_key(0, 1) - random_key(0, 0)) % 2**64
    fibonacci = [1, 2]
    while fibonacci[-1] < 2**20:
        fibonacci.append(fibonacci[-2] + fibonacci[-1])
    nearest = [min(k * step % 2**64, -k * step % 2**64) for k in fibonacci]
    assert all(a > b for a, b in pairwise(nearest)), "the best approximations are these"
    assert min(nearest) > 2**32
