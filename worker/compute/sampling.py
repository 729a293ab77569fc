"""The sampler of the last stage: mlx-lm's own penalties and filters, then Gumbel-max keyed by (seed, position).

The same seed gives the same token at the same position, for any split, batch or decoder, and in a replay. A guess is
drawn with the same noise as the token at its position, so that both agree if their distributions do (arXiv 2408.07978).
Rounding changes a draw only if two tokens nearly tie. XTC is decided per position, by the same key. Of the parameters
that mlx-lm lacks, `min_tokens` follows vLLM; for top-n-sigma and DRY see the functions below.
Shapes: N rows, V vocabulary, n alternatives.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import sample_utils
from mlx_lm.sample_utils import make_logits_processors

from protos.brigade_pb2 import Alternative, Conditioning, Sample, Sampling, Score, Soft
from worker.errors import FrameError, SamplingError

_GOLDEN = 0x9E3779B97F4A7C15
_STEP = 0xD1B54A32D192ED03
_XTC = 0x94D049BB133111EB  # distinguishes XTC's keys from those of the noise
_LOW_64 = (1 << 64) - 1
_LOW_32 = (1 << 32) - 1
_HALF_A_STEP = 2.0**-33  # MLX's uniform numbers near 0 are multiples of 2^-32
_CONTEXT = 20  # tokens that penalties consider by default, as in mlx-lm
_LONGEST_REPETITION = 50  # tokens, for DRY
_MAX_PENALTY = 1e9  # logits; DRY's grows exponentially


@dataclass(frozen=True)
class Draws:
    """One token for each of N rows, unevaluated; other fields are None unless requested."""

    tokens: mx.array  # [N]
    logprobs: mx.array | None = None  # [N]
    alternatives: tuple[mx.array, mx.array] | None = None  # ids and logprobs, [N, n] each
    entropies: mx.array | None = None  # [N], nats
    likeliest: mx.array | None = None  # [N], tokens
    soft: mx.array | None = None  # [N, D]: expected embeddings, or [N, K]: probabilities of candidates
    candidates: mx.array | None = None  # [N, K], tokens
    together: "Draws | None" = None  # draws of several slots that are read at once; these draws are its row `row`
    row: int = 0

    def rows(self) -> "list[Draws]":
        """Return one Draws per row, of draws that have only tokens."""
        return [Draws(token, together=self, row=row) for row, token in enumerate(self.tokens.split(self.tokens.size))]

    @cached_property
    def _numbers(self) -> list[int]:
        return [self.together._numbers[self.row]] if self.together else _listed(self.tokens)

    def arrays(self) -> list[mx.array]:
        optional = self.logprobs, *(self.alternatives or ()), self.entropies, self.likeliest, self.soft, self.candidates
        return [self.tokens, *(array for array in optional if array is not None)]

    @staticmethod
    def joined(parts: "Sequence[Draws]") -> "Draws":
        """Return the draws of a canvas, given those of its consecutive blocks of rows."""
        if len(parts) == 1:
            return parts[0]
        names = ("tokens", "logprobs", "entropies", "likeliest", "soft", "candidates")
        columns = {name: [getattr(part, name) for part in parts] for name in names}
        joined: dict[str, Any] = {n: mx.concatenate(found) for n, found in columns.items() if found[0] is not None}
        return Draws(**joined)

    def to_soft(self, slot: int, conditioning: Conditioning) -> Soft:
        """Return the conditioning of the canvas's next step."""
        assert self.soft is not None
        soft = Soft(slot=slot, conditioning=conditioning, rows=_bytes(self.soft))
        if self.candidates is not None:
            soft.ids = _bytes(self.candidates)
        return soft

    def to_samples(self, slot: int) -> list[Sample]:
        samples = [Sample(slot=slot, token=token) for token in self._numbers]
        if self.entropies is not None:
            for sample, entropy in zip(samples, _listed(self.entropies), strict=True):
                sample.entropy = entropy
        if self.logprobs is not None and self.likeliest is not None:
            for sample, logprob, token in zip(samples, _listed(self.logprobs), _listed(self.likeliest), strict=True):
                sample.logprob, sample.likeliest = logprob, token
        elif self.logprobs is not None and self.alternatives is not None:
            rows = zip(samples, _listed(self.logprobs), *map(_listed, self.alternatives), strict=True)
            for sample, logprob, tokens, logprobs in rows:
                sample.logprob = logprob
                sample.alternatives.extend(map(_alternative, tokens, logprobs))
        return samples


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of N given tokens, unevaluated."""

    tokens: Sequence[int]
    logprobs: mx.array  # [N]
    are_greedy: mx.array  # [N] bool
    alternatives: tuple[mx.array, mx.array] | None = None  # ids and logprobs, [N, n] each

    def arrays(self) -> list[mx.array]:
        return [self.logprobs, self.are_greedy, *(self.alternatives or ())]

    def to_scores(self, slot: int) -> list[Score]:
        rows = zip(self.tokens, _listed(self.logprobs), _listed(self.are_greedy), strict=True)
        scores = [Score(slot=slot, token=t, logprob=logprob, is_greedy=greedy) for t, logprob, greedy in rows]
        if self.alternatives is not None:
            for score, tokens, logprobs in zip(scores, *map(_listed, self.alternatives), strict=True):
                score.alternatives.extend(map(_alternative, tokens, logprobs))
        return scores


class Sampler:
    """One session's sampling parameters, bound to mlx-lm's functions."""

    def __init__(self, sampling: Sampling) -> None:
        """Raises SamplingError if mlx-lm refuses the parameters."""
        self.seed = sampling.seed
        self._sampling = sampling
        sizes = {
            name: getattr(sampling, name) or _CONTEXT
            for name in ("repetition_context_size", "presence_context_size", "frequency_context_size")
        }
        with _refusals_named():
            self._processors = make_logits_processors(
                logit_bias=dict(sampling.logit_bias),
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                **sizes,
            )
        self._context = max(sizes.values()) if self._processors else 0
        dry = (sampling.dry_penalty_last_n or _LOW_32) if sampling.dry_multiplier else 0
        self.looks_back = max(self._context, dry)  # the most earlier tokens on which a draw depends; 0: only on logits
        self._first_end = sampling.begins + sampling.min_tokens if sampling.min_tokens else 0  # a position

    @cached_property
    def kind(self) -> bytes | None:
        """A key that is equal for samplers that differ only in their seeds; None if `draw` does not suffice."""
        return None if self.looks_back or self._sampling.logprobs else self.draw_kind

    @cached_property
    def draw_kind(self) -> bytes:
        """A key that is equal for samplers whose rows one call of `draw` can draw together."""
        alike = Sampling()
        alike.CopyFrom(self._sampling)
        for field in ("seed", "logprobs", "grammar"):
            alike.ClearField(field)
        return alike.SerializeToString(deterministic=True)

    def draw(self, logits: mx.array, seeds: Sequence[int], positions: Sequence[int]) -> Draws:
        """Draw a token for each row of logits [N, V] float32, by the row's own seed and position."""
        keys = list(map(random_key, seeds, positions))
        return Draws(self._draw(self._scaled(_normalised(self._without_ends(logits, positions)), keys), keys))

    def __call__(
        self,
        logits: mx.array,
        positions: Sequence[int],
        tokens: list[int],
        known: Sequence[int],
        entropy: bool = False,
        allowed: mx.array | None = None,
    ) -> Draws:
        """Choose a token for each row.

        Args:
            logits: [N, V] float32.
            positions: the position of each row's token in the sequence.
            tokens: the session's tokens.
            known: for each row, how many of the tokens precede its token; penalties use only these.
            entropy: whether to report the entropy of each row's raw logits.
            allowed: which tokens may be chosen, [V] or [N, V] bool, at least one per row; None allows all.
        Raises:
            SamplingError: mlx-lm refuses the parameters for this vocabulary.
        """
        entropies = _entropy(logits) if entropy else None
        if allowed is not None:
            logits = mx.where(allowed, logits, -mx.inf)
        logits = self._without_ends(logits, positions)
        if back := self.looks_back:
            rows = zip(logits.split(len(positions)), known, strict=True)
            logits = mx.concatenate(
                [self._process(row, tokens[max(0, length - back) : length]) for row, length in rows]
            )
        logprobs = _normalised(logits)
        keys = [random_key(self.seed, position) for position in positions]
        drawn = self._draw(self._scaled(logprobs, keys), keys)
        if not self._sampling.logprobs:
            return Draws(drawn, entropies=entropies)
        chosen = mx.take_along_axis(logprobs, drawn[:, None], axis=-1)[:, 0]
        return Draws(drawn, chosen, self._likeliest(logprobs), entropies)

    def denoise(self, logits: mx.array, positions: Sequence[int], step: int, *, is_scheduled: bool = False) -> Draws:
        """Draw a token for each row of a canvas, keyed by its position and the denoising step.

        Entropies are computed from the logits; log-probabilities from the scaled distribution that is sampled, or from
        the logits if `is_scheduled`.

        Args:
            logits: [N, V] float32.
            is_scheduled: the step has its own temperature, by which the logits have been divided.
        """
        logprobs = _normalised(logits)
        keys = [random_key(self.seed, position, step) for position in positions]
        scaled = self._scaled(logprobs, keys)
        drawn = self._draw(scaled, keys)
        shown = logprobs if is_scheduled else _normalised(scaled)
        chosen = mx.take_along_axis(shown, drawn[:, None], axis=-1)[:, 0]
        return Draws(drawn, chosen, entropies=_entropy(logits), likeliest=mx.argmax(logits, axis=-1))

    def score(self, logits: mx.array, tokens: Sequence[int]) -> TokenScores:
        """Score each row's given token by the raw logits [N, V] float32, without penalties and temperature.

        Raises:
            FrameError: a token is outside the vocabulary.
        """
        _, V = logits.shape
        if max(tokens) >= V:
            raise FrameError(f"expected targets below {V}, got {max(tokens)}")
        logprobs = _normalised(logits)
        own = mx.take_along_axis(logprobs, mx.array(list(tokens))[:, None], axis=-1)
        are_greedy = own >= logprobs.max(axis=-1, keepdims=True)
        return TokenScores(
            tokens, own[:, 0], are_greedy[:, 0], self._likeliest(logprobs) if self._sampling.logprobs else None
        )

    def _likeliest(self, logprobs: mx.array) -> tuple[mx.array, mx.array]:
        """Return ids and logprobs [N, n] of the alternatives to report."""
        count = self._sampling.logprobs - 1
        best = mx.argsort(-logprobs, axis=-1)[:, :count] if count else mx.zeros((logprobs.shape[0], 0), mx.uint32)
        return best, mx.take_along_axis(logprobs, best, axis=-1)

    def _without_ends(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Return the logits [N, V], with minus infinity for tokens that would end the answer too early."""
        is_early = [position < self._first_end for position in positions]
        if not any(is_early):
            return logits
        is_end = np.zeros(logits.shape[-1], bool)
        is_end[[token for token in self._sampling.ends if token < len(is_end)]] = True
        return mx.where(mx.array(is_early)[:, None] & mx.array(is_end), -mx.inf, logits)

    def _process(self, logits: mx.array, history: list[int]) -> mx.array:
        """Apply the penalties that depend on earlier tokens to logits [1, V]."""
        if self._processors:
            tokens = mx.array(history[-self._context :], mx.int32)
            with _refusals_named():
                for processor in self._processors:
                    logits = processor(tokens, logits)
        if self._sampling.dry_multiplier and (penalties := dry_penalties(history, self._sampling)):
            logits = logits.at[:, mx.array(list(penalties))].subtract(mx.array(list(penalties.values())))
        return logits

    def _draw(self, scaled: mx.array, keys: Sequence[int]) -> mx.array:
        """Draw a token [N] for each row of the result of `_scaled` [N, V], by the row's key."""
        noise = gumbel(keys, scaled.shape[-1]) if self._sampling.temperature else 0.0
        return mx.argmax(scaled + noise, axis=-1)

    def _scaled(self, logprobs: mx.array, keys: Sequence[int]) -> mx.array:
        """Return the logits [N, V] of the sampled distribution; at temperature 0 the input.

        Filters have the order of mlx-lm's `make_sampler`; top-n-sigma precedes them, since it uses the model's logits.
        """
        sampling = self._sampling
        if sampling.temperature == 0:
            return logprobs
        with _refusals_named():
            if sampling.top_n_sigma:
                logprobs = apply_top_n_sigma(logprobs, sampling.top_n_sigma)
            if 0 < sampling.top_p < 1:
                logprobs = apply_top_p(logprobs, sampling.top_p)
            if sampling.min_p:
                logprobs = apply_min_p(logprobs, sampling.min_p)
            if sampling.xtc_probability:
                logprobs = self._without_top(logprobs, keys)
            if sampling.top_k:
                logprobs = apply_top_k(logprobs, sampling.top_k)
        return logprobs / sampling.temperature

    def _without_top(self, logprobs: mx.array, keys: Sequence[int]) -> mx.array:
        """Apply XTC to rows of [N, V] at random, by their keys; mlx-lm would decide once for all rows."""
        sampling = self._sampling
        special = [token for token in sampling.xtc_special_tokens if token < logprobs.shape[-1]]
        rest = apply_xtc(logprobs, 1.0, sampling.xtc_threshold, special)
        acts = _uniform([key ^ _XTC for key in keys], 1) <= sampling.xtc_probability
        return mx.where(acts, rest, logprobs)


def _uncompiled(function: Any) -> Any:
    """Return a function of mlx-lm as it was before `mx.compile`.

    That makes kernels of the numbers of each request, in a step that others wait for, and keeps them for ever.
    """
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)


apply_min_p, apply_top_k, apply_top_p, apply_xtc = map(
    _uncompiled, (sample_utils.apply_min_p, sample_utils.apply_top_k, sample_utils.apply_top_p, sample_utils.apply_xtc)
)


@contextmanager
def _refusals_named() -> Iterator[None]:
    """Turn ValueErrors of mlx-lm's functions into SamplingErrors. Only call these functions in this context."""
    try:
        yield
    except ValueError as error:
        raise SamplingError(f"cannot sample as this request asks: {error}") from error


def gumbel(numbers: Sequence[int], vocab_size: int) -> mx.array:
    """Return noise [N, V] float32, a row per `random_key`: the argmax of logits plus noise samples their softmax.

    All backends of MLX generate the same random bits (Threefry-2x32), which depend only on the row's key.
    """
    return gumbel_of(_uniform(numbers, vocab_size))


def _uniform(numbers: Sequence[int], count: int) -> mx.array:
    """Return numbers [N, count] float32 in [0, 1), a row per `random_key`."""
    keys = mx.array([[number >> 32, number & _LOW_32] for number in numbers], mx.uint32)
    return mx.vmap(lambda key: mx.random.uniform(shape=(count,), key=key))(keys)


def gumbel_of(uniform: mx.array) -> mx.array:
    """Turn numbers in [0, 1) into Gumbel noise, always finite.

    The largest noise comes from the smallest numbers, where float32 is finest, so that tokens of probability 1e-9 are
    drawn as often as they should be.
    """
    return -mx.log(-mx.log1p(-mx.maximum(uniform, _HALF_A_STEP)))


def random_key(seed: int, position: int, step: int = 0) -> int:
    """Return the 64-bit key of a draw, which differs between positions and between denoising steps."""
    return (seed + (position + 1) * _GOLDEN + step * _STEP) & _LOW_64


def apply_top_n_sigma(logits: mx.array, n: float) -> mx.array:
    """Keep only the tokens of each row [N, V] that are at most `n` standard deviations below the row's best token.

    Source: Top-n-sigma, arXiv 2411.07641, as llama.cpp implements it (`llama_sampler_top_n_sigma_apply`): the standard
    deviation is over all tokens with a finite logit.
    """
    is_possible = logits > -mx.inf
    count = is_possible.sum(axis=-1, keepdims=True)
    mean = mx.where(is_possible, logits, 0.0).sum(axis=-1, keepdims=True) / count
    variance = mx.where(is_possible, mx.square(logits - mean), 0.0).sum(axis=-1, keepdims=True) / count
    return mx.where(logits < logits.max(axis=-1, keepdims=True) - n * mx.sqrt(variance), -mx.inf, logits)


def dry_penalties(history: Sequence[int], sampling: Sampling) -> dict[int, float]:
    """Return the penalties, in logits, that DRY subtracts from tokens that would extend a repetition.

    A token that followed an earlier occurrence of the last n tokens gets multiplier * base^(n - allowed_length), with
    the largest such n, if n >= allowed_length. Repetitions end at breakers, which are not penalised.
    Source: the author's processor for text-generation-webui (pull request 5677), which counts at most 50 tokens.
    """
    tokens = np.array(history[-sampling.dry_penalty_last_n :], np.int64)  # 0 means all
    breakers = np.isin(tokens, np.array(sampling.dry_breakers, np.int64))
    at = np.flatnonzero(~breakers[1:])  # indices at which an earlier occurrence may end, with a token after it
    penalties: dict[int, float] = {}
    for length in range(1, min(_LONGEST_REPETITION, len(tokens) - 1) + 1):
        at = at[at >= length - 1]
        at = at[tokens[at - length + 1] == tokens[-length]]
        if breakers[-length] or not len(at):
            break
        if length >= sampling.dry_allowed_length:
            penalty = sampling.dry_multiplier * sampling.dry_base ** (length - sampling.dry_allowed_length)
            penalties |= dict.fromkeys(np.unique(tokens[at + 1]).tolist(), min(penalty, _MAX_PENALTY))
    return penalties


def _entropy(logits: mx.array) -> mx.array:
    """Return the entropy [N], in nats, of the softmax of logits [N, V] float32, which may be minus infinity."""
    logprobs = _normalised(logits)
    return -mx.where(mx.isinf(logprobs), 0.0, mx.exp(logprobs) * logprobs).sum(axis=-1)


def _normalised(logits: mx.array) -> mx.array:
    """Return log-probabilities [N, V]."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _listed(array: mx.array) -> list[Any]:
    return array.tolist()  # type: ignore[return-value]


def _bytes(array: mx.array) -> bytes:
    return memoryview(mx.contiguous(array)).cast("B").tobytes()  # type: ignore[arg-type]


def _alternative(token: int, logprob: float) -> Alternative:
    return Alternative(token=token, logprob=logprob)
