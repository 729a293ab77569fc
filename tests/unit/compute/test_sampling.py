"""The sampler against numpy, and against what mlx-lm's own functions leave to choose from."""

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from protos.brigade_pb2 import Sample, Sampling, Window
from tests.unit.compute.rows import VOCAB, logits_of, numpy_gumbel
from worker.compute.sampling import Draws, Sampler
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


def mlx_lm_draws(sampling: Sampling, num: int = 24, **parameters: float | dict[int, float]) -> list[int]:
    """The same by mlx-lm's functions, each parameter spelt out by the caller, up to the draw itself."""
    chain = {key: parameters[key] for key in ("temp", "top_p", "top_k", "min_p") if key in parameters}
    penalties = {key: value for key, value in parameters.items() if key not in chain}
    choose, processors = make_sampler(**chain), make_logits_processors(**penalties)  # type: ignore[arg-type]
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
    {
        "temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2,
        "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": BIAS,
    },
]  # fmt: skip


@pytest.mark.parametrize("sampling", PARAMETERS, ids=lambda value: "+".join(value) or "greedy")
def test_every_parameter_does_what_it_does_in_mlx_lm(monkeypatch: pytest.MonkeyPatch, sampling: dict) -> None:
    """The same tokens are left with the same logits, and the draw from them is the documented one."""
    beside = {"seed", "logprobs", "grammar"}  # no parameters of what is left to draw from
    assert PARAMETERS[-1].keys() == set(Sampling.DESCRIPTOR.fields_by_name) - beside
    monkeypatch.setattr(sample_utils, "categorical_sampling", lambda logits, temp: logits / temp)
    parameters = {"temp" if name == "temperature" else name: value for name, value in sampling.items()}
    assert draws(Sampling(seed=11, **sampling)) == mlx_lm_draws(Sampling(seed=11), **parameters)


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 3.0}, {"top_p": 0.2}, {"top_k": 2}, {"min_p": 0.5}, {"repetition_penalty": 2.0},
        {"presence_penalty": 4.0}, {"frequency_penalty": 4.0}, {"logit_bias": {3: 8.0}}, {"seed": 12},
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


def test_a_target_that_is_no_token_is_refused() -> None:
    for target in (VOCAB, VOCAB + 1):
        with pytest.raises(FrameError, match=f"below {VOCAB}, got {target}"):
            Sampler(Sampling()).score(logits_of(0), [target])
