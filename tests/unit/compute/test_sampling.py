"""The sampler against numpy, and against what mlx-lm's own functions leave to choose from."""

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from protos.brigade_pb2 import Sample, Sampling, Window
from tests.unit.compute.rows import VOCAB, in_rows, logits_of, numpy_gumbel
from worker.compute.drafting import DraftRequest, draw_drafts
from worker.compute.sampling import Draws, Sampler, apply_top_n_sigma, dry_penalties
from worker.compute.slot import Slot
from worker.errors import FrameError
from worker.memory.history import History

pytestmark = pytest.mark.usefixtures("uncompiled")

HISTORY = [5, 5, 5, 9, 12, 30, 31, 32, 5, 9]


def after(sampler: Sampler, logits: mx.array, tokens: list[int]) -> Draws:
    """The draw for the token that follows `tokens`; logits [1, V]."""
    return sampler(logits, [len(tokens)], tokens, [len(tokens)])


def draw(sampling: Sampling, logits: mx.array, tokens: list[int] = HISTORY) -> int:
    return int(after(Sampler(sampling), mx.array(logits), tokens).tokens.item())


def draws(sampling: Sampling, num: int = 24) -> list[int]:
    """The tokens at `num` positions, each over logits of its own."""
    sampler = Sampler(sampling)
    numbers = random.Random(0)
    histories = [[numbers.randrange(VOCAB) for _ in range(n)] for n in range(1, num + 1)]
    return [int(after(sampler, logits_of(n), history).tokens.item()) for n, history in enumerate(histories)]


def mlx_lm_draws(sampling: Sampling, num: int = 24, **parameters: Any) -> list[int]:
    """The same by mlx-lm's functions, each parameter spelt out by the caller, up to the draw itself."""
    names = ("temp", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold", "xtc_special_tokens")
    chain = {key: parameters[key] for key in names if key in parameters}
    penalties = {key: value for key, value in parameters.items() if key not in chain}
    choose, processors = make_sampler(**chain), make_logits_processors(**penalties)
    numbers = random.Random(0)
    histories = [[numbers.randrange(VOCAB) for _ in range(n)] for n in range(1, num + 1)]
    found = []
    for n, history in enumerate(histories):
        logits = logits_of(n)
        for processor in processors:
            logits = processor(mx.array(history), logits)
        chosen = choose(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        if chosen.dtype == mx.float32:  # what is left to choose from
            chosen = mx.array(np.array(chosen) + numpy_gumbel(sampling.seed, len(history), VOCAB)).argmax(axis=-1)
        found.append(int(chosen.item()))
    return found


BIAS = {3: 4.0, 40: 3.5, 7: -2.0}
PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_p": 0.4},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "min_p": 0.3},
    *({"temperature": 1.0} | off for off in ({"top_p": 1.0}, {"top_p": 0.0}, {"min_p": 0.0})),
    {"repetition_penalty": 1.0},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 3.0},
    {"frequency_penalty": 2.0},
    {"logit_bias": BIAS},
    {"repetition_penalty": 1.8, "repetition_context_size": 3},
    {"presence_penalty": 3.0, "presence_context_size": 100, "repetition_penalty": 1.3},
    {"frequency_penalty": 2.0, "frequency_context_size": 1},
    {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.04},
    {
        "temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2,
        "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": BIAS, "repetition_context_size": 8,
        "presence_context_size": 2, "frequency_context_size": 30, "xtc_probability": 1.0, "xtc_threshold": 0.02,
        "xtc_special_tokens": [5, 11, 17],
    },
]  # fmt: skip


@pytest.mark.parametrize("sampling", PARAMETERS, ids=lambda value: "+".join(value) or "greedy")
def test_every_parameter_does_what_it_does_in_mlx_lm(monkeypatch: pytest.MonkeyPatch, sampling: dict) -> None:
    """The same tokens are left with the same logits, and the draw from them is the documented one."""
    beside = {"seed", "logprobs", "grammar"}  # no parameters of what is left to draw from
    others = {"top_n_sigma", "min_tokens", "begins", "ends"}  # than mlx-lm's
    named = {name for name in Sampling.DESCRIPTOR.fields_by_name if not name.startswith("dry_")}
    assert PARAMETERS[-1].keys() == named - beside - others
    monkeypatch.setattr(sample_utils, "categorical_sampling", lambda logits, temp: logits / temp)
    parameters = {"temp" if name == "temperature" else name: value for name, value in sampling.items()}
    assert draws(Sampling(seed=11, **sampling)) == mlx_lm_draws(Sampling(seed=11), **parameters)


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 3.0}, {"top_p": 0.2}, {"top_k": 2}, {"min_p": 0.5}, {"repetition_penalty": 2.0},
        {"presence_penalty": 4.0}, {"frequency_penalty": 4.0}, {"logit_bias": {3: 8.0}}, {"seed": 12},
        {"xtc_probability": 1.0, "xtc_threshold": 0.04}, {"top_n_sigma": 0.5},
        {"min_tokens": 9, "ends": range(0, VOCAB, 2)},
    ],
    ids=lambda value: next(iter(value)),
)  # fmt: skip
def test_every_parameter_matters(changed: dict) -> None:
    """Or the test above would hold for a parameter that both sides ignore."""
    usual = {"seed": 11, "temperature": 1.0}
    assert draws(Sampling(**usual | changed)) != draws(Sampling(**usual))


@pytest.mark.parametrize("num", [0, 1, 5, VOCAB - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_distribution_and_alternatives_its_best(temperature: float, num: int) -> None:
    exact = np.array(logits_of(5)[0], np.float64)
    exact -= np.log(np.exp(exact).sum())
    sampling = Sampling(seed=2, temperature=temperature, logprobs=num + 1)
    [sample] = after(Sampler(sampling), logits_of(5), HISTORY).to_samples(slot=3)
    order = np.argsort(-exact)[:num].tolist()
    assert sample.slot == 3 and sample.logprob == pytest.approx(exact[sample.token], abs=1e-5)
    assert [other.token for other in sample.alternatives] == order
    assert [other.logprob for other in sample.alternatives] == pytest.approx(exact[order].tolist(), abs=1e-5)


def test_logprobs_count_penalties_and_bias_but_neither_temperature_nor_filters() -> None:
    """As mlx-lm reports them; asking for them changes no token, and without asking nothing is computed for them."""

    def sample(**sampling: Any) -> Sample:
        return after(Sampler(Sampling(**sampling)), logits_of(5), HISTORY).to_samples(0)[0]

    exact = np.array(logits_of(5)[0], np.float64)
    exact[4] += 2.0
    exact -= np.log(np.exp(exact).sum())
    assert sample(logit_bias={4: 2.0}, logprobs=1).logprob == pytest.approx(exact.max(), abs=1e-5)
    filtered = sample(seed=2, temperature=3.0, top_k=2, top_p=0.3, logprobs=4)
    assert list(filtered.alternatives) == list(sample(logprobs=4).alternatives)
    for usual in ({"seed": 4, "temperature": 0.0}, {"seed": 4, "temperature": 1.0}):
        assert draws(Sampling(**usual, logprobs=6)) == draws(Sampling(**usual))
    drawn = after(Sampler(Sampling(seed=4, temperature=1.0)), logits_of(1), HISTORY)
    assert len(drawn.arrays()) == 1
    [plain] = drawn.to_samples(0)
    assert plain.logprob == 0 and not plain.alternatives


def test_two_sessions_share_nothing_and_penalties_leave_the_logits_of_the_caller_as_they_are() -> None:
    logits = logits_of(1)
    before = np.array(logits)
    best = int(np.argmax(before))
    assert draw(Sampling(presence_penalty=50.0), logits, [best]) != best == draw(Sampling(), logits, [best])
    all_of_them = Sampling(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0, logit_bias=BIAS)
    after(Sampler(all_of_them), logits, HISTORY).to_samples(0)
    np.testing.assert_array_equal(np.array(logits), before)


def test_a_guess_is_drawn_with_the_noise_of_the_token_at_its_position() -> None:
    nothing: Any = None  # a draw uses no caches
    slot = Slot(nothing, History(), Sampling(temperature=1.0, seed=3))
    window = Window(tokens=[5], masks=2, wanted=1, guessed=2)  # rows for positions 1, 1 and 2
    token, guess, later = slot.draw(window, mx.zeros((3, 1000))).tokens.tolist()
    assert token == guess != later


def test_rows_of_a_canvas_are_drawn_alike_in_one_block_and_in_several() -> None:
    nothing: Any = None
    slot = Slot(nothing, History(), Sampling(temperature=1.0, seed=3))
    window = Window(tokens=[5], canvas=range(6), guessed=6, canvas_step=2)
    logits = mx.zeros((6, 1000))
    whole = slot.draw(window, logits).tokens.tolist()
    parts = [slot.draw(window, logits[at : at + 2], at).tokens.tolist() for at in range(0, 6, 2)]
    assert [token for part in parts for token in part] == whole and len(set(whole)) > 3


def test_a_draft_is_drawn_with_all_tokens_that_dry_looks_back_at() -> None:
    """The text before the drafts repeats itself from further back than 20 tokens."""
    nothing: Any = None
    text = [1, 2, 3, 4, *range(20, 60), 1, 2, 3]
    sampling = Sampling(dry_multiplier=50.0, dry_base=2.0, dry_allowed_length=1, dry_penalty_last_n=100)
    slot = Slot(nothing, History(text), sampling)
    logits = mx.zeros((1, 64))
    logits[0, 4], logits[0, 7] = 9.0, 8.0
    request = DraftRequest(slot, len(text), [], 1, False, nothing, 0, len(text))
    assert draw_drafts([request], [[]], logits).tolist() == [7]
    assert draw_drafts([replace(request, slot=Slot(nothing, History(text), Sampling()))], [[]], logits).item() == 4


@pytest.mark.parametrize("n", [0.5, 1.0, 2.5])
def test_top_n_sigma_keeps_what_is_so_many_deviations_below_the_best_possible_token(n: float) -> None:
    logits = np.array(logits_of(3))
    logits[0, ::5] = -np.inf
    possible = logits[np.isfinite(logits)]
    kept = np.isfinite(np.array(apply_top_n_sigma(mx.array(logits), n)))
    assert kept.tolist() == (logits >= possible.max() - n * possible.std()).tolist() and 0 < kept.sum() < len(possible)


def naive_dry(history: list[int], sampling: Sampling) -> dict[int, float]:
    """DRY by its definition, over every pair of places."""
    tokens, found = history[-sampling.dry_penalty_last_n or 0 :], dict[int, float]()
    for at, token in enumerate(tokens[1:], start=1):
        length = 0
        while length < min(at, 50) and tokens[at - 1 - length] == tokens[len(tokens) - 1 - length]:
            if tokens[at - 1 - length] in sampling.dry_breakers:
                break
            length += 1
        if token not in sampling.dry_breakers and length >= max(1, sampling.dry_allowed_length):
            penalty = sampling.dry_multiplier * sampling.dry_base ** (length - sampling.dry_allowed_length)
            found[token] = max(found.get(token, 0.0), min(penalty, 1e9))
    return found


def test_dry_penalises_what_would_go_on_with_a_repetition_up_to_a_breaker() -> None:
    numbers, found = random.Random(3), list[float]()
    for case in range(300):
        sampling = Sampling(
            dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=numbers.randrange(1, 4),
            dry_penalty_last_n=numbers.choice((0, 0, 7)), dry_breakers=numbers.sample(range(4), case % 3),
        )  # fmt: skip
        history = [numbers.randrange(2 + case % 4) for _ in range(numbers.randrange(90))]
        expected = naive_dry(history, sampling)
        assert dry_penalties(history, sampling) == pytest.approx(expected), (history, sampling)
        found += expected.values()
    assert len(found) > 200 and max(found) > 50
    repeated = Sampling(dry_multiplier=1.0, dry_base=1.75, dry_allowed_length=2)
    assert draw(repeated, mx.where(mx.arange(VOCAB) == 3, 1.0, 0.0)[None], [1, 2, 3, 9, 1, 2]) != 3


def test_xtc_acts_as_often_as_it_is_asked_to_by_the_key_of_each_position() -> None:
    sampling = Sampling(seed=7, temperature=1.0, xtc_probability=0.3, xtc_threshold=0.1)
    logits = mx.repeat(mx.log(mx.array([[0.5, 0.3, 0.2]])), 3000, axis=0)
    together = in_rows(sampling, logits, range(3000))
    shares = np.bincount(together, minlength=3) / 3000
    assert shares == pytest.approx([0.35, 0.21, 0.44], abs=0.035)
    assert together[100:140] == [in_rows(sampling, logits[:1], [position])[0] for position in range(100, 140)]


def test_no_token_ends_an_answer_before_its_least_length_whatever_draws_it() -> None:
    """Alone, with others, as a guess, and also where a penalty or a bias would have it."""
    sampling = Sampling(min_tokens=3, begins=4, ends=[2, 500], logit_bias={2: 50.0})
    assert [in_rows(sampling, logits_of(1), [position])[0] == 2 for position in range(4, 9)] == [False] * 3 + [True] * 2
    plain, logits = Sampling(min_tokens=3, begins=4, ends=[2]), mx.where(mx.arange(VOCAB) == 2, 9.0, logits_of(1))
    drawn = Sampler(plain).draw(mx.repeat(logits, 2, axis=0), [1, 2], [6, 7])
    assert [token == 2 for token in drawn.tokens.tolist()] == [False, True]


def test_a_target_that_is_no_token_is_refused() -> None:
    for target in (VOCAB, VOCAB + 1):
        with pytest.raises(FrameError, match=f"below {VOCAB}, got {target}"):
            Sampler(Sampling()).score(logits_of(0), [target])
