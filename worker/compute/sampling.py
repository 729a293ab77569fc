"""The sampler of the last stage: mlx-lm's own penalties and filters, then Gumbel-max keyed by (seed, position).

The same seed gives the same token at the same position, whatever the split, the batch, the decoder, or a replay. A
guess for a position is drawn with the same noise as the token there, so that the draws agree where their distributions
do (arXiv 2408.07978). Rounding moves a draw only where two tokens nearly tie. Whether XTC acts at a position is drawn
by the same key. What mlx-lm lacks is as elsewhere: `min_tokens` in vLLM, top-n-sigma and DRY in the functions below.
Shapes: N rows, V vocabulary, n alternatives.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, make_logits_processors

from protos.brigade_pb2 import Alternative, Conditioning, Sample, Sampling, Score, Soft
from worker.errors import FrameError, SamplingError

_GOLDEN = 0x9E3779B97F4A7C15
_STEP = 0xD1B54A32D192ED03
_XTC = 0x94D049BB133111EB  # tells the keys that decide whether XTC acts from those of the noise
_LOW_64 = (1 << 64) - 1
_LOW_32 = (1 << 32) - 1
_HALF_A_STEP = 2.0**-33  # MLX's uniform numbers near 0 are multiples of 2^-32
_CONTEXT = 20  # tokens that penalties look back at by default, as in mlx-lm
_LONGEST_REPETITION = 50  # tokens that DRY counts
_MAX_PENALTY = 1e9  # logits; DRY's grows exponentially


@dataclass(frozen=True)
class Draws:
    """One token for each of N rows, not evaluated yet; the other fields are None unless requested."""

    tokens: mx.array  # [N]
    logprobs: mx.array | None = None  # [N]
    alternatives: tuple[mx.array, mx.array] | None = None  # ids and logprobs, [N, n] each
    entropies: mx.array | None = None  # [N], nats
    likeliest: mx.array | None = None  # [N], tokens
    soft: mx.array | None = None  # [N, D]: expected embeddings, or [N, K]: probabilities of candidates
    candidates: mx.array | None = None  # [N, K], tokens
    together: "Draws | None" = None  # the draws of several slots, read all at once, and which row of them this is
    row: int = 0

    def rows(self) -> "list[Draws]":
        """Split draws that have only tokens into one per row."""
        return [Draws(token, together=self, row=row) for row, token in enumerate(self.tokens.split(self.tokens.size))]

    @cached_property
    def _numbers(self) -> list[int]:
        return [self.together._numbers[self.row]] if self.together else _listed(self.tokens)

    def arrays(self) -> list[mx.array]:
        optional = self.logprobs, *(self.alternatives or ()), self.entropies, self.likeliest, self.soft, self.candidates
        return [self.tokens, *(array for array in optional if array is not None)]

    @staticmethod
    def joined(parts: "Sequence[Draws]") -> "Draws":
        """Return the draws of a canvas, of which these are consecutive rows."""
        if len(parts) == 1:
            return parts[0]
        names = ("tokens", "logprobs", "entropies", "likeliest", "soft", "candidates")
        columns = {name: [getattr(part, name) for part in parts] for name in names}
        joined: dict[str, Any] = {n: mx.concatenate(found) for n, found in columns.items() if found[0] is not None}
        return Draws(**joined)

    def to_soft(self, slot: int, conditioning: Conditioning) -> Soft:
        """Return what the draws hold for the next step of a canvas."""
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
    """How likely N given tokens are, not evaluated yet."""

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
        self.looks_back = max(self._context, dry)  # earlier tokens that a draw depends on, at most; 0: only on logits
        self._first_end = sampling.begins + sampling.min_tokens if sampling.min_tokens else 0  # a position

    @cached_property
    def kind(self) -> bytes | None:
        """A key that is equal for samplers that differ in their seeds only; None if `draw` is not enough for them."""
        return None if self.looks_back or self._sampling.logprobs else self.draw_kind

    @cached_property
    def draw_kind(self) -> bytes:
        """A key that is equal for samplers for which one call of `draw` can draw."""
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
            tokens: the session's tokens; penalties look at the first `known` of them for each row.
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
        """Draw a token for each row of a canvas [N, V] float32, by its position and the step of denoising.

        Entropies are those of the logits, log-probabilities those of the distribution drawn from, or, if the step has a
        temperature of its own (`is_scheduled`), which the logits are divided by already, of the logits too.
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
            FrameError: a token is outside of the vocabulary.
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
        best = mx.argsort(-logprobs, axis=-1)[:, : self._sampling.logprobs - 1]
        return best, mx.take_along_axis(logprobs, best, axis=-1)

    def _without_ends(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Return the logits [N, V] without the tokens that may not end the answer at so early a position."""
        is_early = [position < self._first_end for position in positions]
        if not any(is_early):
            return logits
        is_end = np.zeros(logits.shape[-1], bool)
        is_end[[token for token in self._sampling.ends if token < len(is_end)]] = True
        return mx.where(mx.array(is_early)[:, None] & mx.array(is_end), -mx.inf, logits)

    def _process(self, logits: mx.array, history: list[int]) -> mx.array:
        """Apply to logits [1, V] the penalties that depend on the tokens before them."""
        if self._processors:
            tokens = mx.array(history[-self._context :], mx.int32)
            with _refusals_named():
                for processor in self._processors:
                    logits = processor(tokens, logits)
        if self._sampling.dry_multiplier and (penalties := dry_penalties(history, self._sampling)):
            logits = logits.at[:, mx.array(list(penalties))].subtract(mx.array(list(penalties.values())))
        return logits

    def _draw(self, scaled: mx.array, keys: Sequence[int]) -> mx.array:
        """Draw a token [N] for each row of what `_scaled` returned [N, V], by the row's key."""
        noise = gumbel(keys, scaled.shape[-1]) if self._sampling.temperature else 0.0
        return mx.argmax(scaled + noise, axis=-1)

    def _scaled(self, logprobs: mx.array, keys: Sequence[int]) -> mx.array:
        """Return the logits [N, V] of the distribution that tokens are drawn from; at temperature 0 the model's own.

        Filters come in the order of mlx-lm's `make_sampler`, after top-n-sigma, which looks at the model's logits.
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
        """Apply XTC to those of the rows [N, V] whose keys draw at most its probability; mlx-lm draws once for all."""
        sampling = self._sampling
        special = [token for token in sampling.xtc_special_tokens if token < logprobs.shape[-1]]
        rest = apply_xtc(logprobs, 1.0, sampling.xtc_threshold, special)
        acts = _uniform([key ^ _XTC for key in keys], 1) <= sampling.xtc_probability
        return mx.where(acts, rest, logprobs)


@contextmanager
def _refusals_named() -> Iterator[None]:
    """Turn the ValueError of mlx-lm's own functions into SamplingError. Put nothing else into this context."""
    try:
        yield
    except ValueError as error:
        mx.random.seed(0)  # unused by our draws, but the failed trace may have left a tracer in MLX's own state
        raise SamplingError(f"cannot sample as this request asks: {error}") from error


def gumbel(numbers: Sequence[int], vocab_size: int) -> mx.array:
    """Return noise [N, V] float32, a row per `random_key`: the argmax of logits plus noise draws from their softmax.

    Every backend of MLX makes the same random bits (Threefry-2x32), and each row's depend on its key alone.
    """
    return _gumbel_of(_uniform(numbers, vocab_size))


def _uniform(numbers: Sequence[int], count: int) -> mx.array:
    """Return numbers [N, count] float32 in [0, 1), a row per `random_key`."""
    keys = mx.array([[number >> 32, number & _LOW_32] for number in numbers], mx.uint32)
    return mx.vmap(lambda key: mx.random.uniform(shape=(count,), key=key))(keys)


def _gumbel_of(uniform: mx.array) -> mx.array:
    """Turn numbers in [0, 1) into Gumbel noise, always finite.

    The largest noise comes from the smallest numbers, where float32 is finest, so that tokens of probability 1e-9 are
    drawn as often as they should be.
    """
    return -mx.log(-mx.log1p(-mx.maximum(uniform, _HALF_A_STEP)))


def random_key(seed: int, position: int, step: int = 0) -> int:
    """Return the 64-bit key of one position's draw, different for every position of a seed and step of denoising."""
    return (seed + (position + 1) * _GOLDEN + step * _STEP) & _LOW_64


def apply_top_n_sigma(logits: mx.array, n: float) -> mx.array:
    """Keep of each row [N, V] what is at most `n` standard deviations below its best token.

    Source: Top-n-sigma, arXiv 2411.07641, with llama.cpp's reading of it (`llama_sampler_top_n_sigma_apply`): the
    deviation is that of all tokens that are possible.
    """
    is_possible = logits > -mx.inf
    count = is_possible.sum(axis=-1, keepdims=True)
    mean = mx.where(is_possible, logits, 0.0).sum(axis=-1, keepdims=True) / count
    variance = mx.where(is_possible, mx.square(logits - mean), 0.0).sum(axis=-1, keepdims=True) / count
    return mx.where(logits < logits.max(axis=-1, keepdims=True) - n * mx.sqrt(variance), -mx.inf, logits)


def dry_penalties(history: Sequence[int], sampling: Sampling) -> dict[int, float]:
    """Return what DRY subtracts from the logits of tokens that would go on with a repetition.

    A token that has followed an earlier occurrence of the last n tokens loses multiplier * base^(n - allowed_length),
    by the largest n, from the allowed length on. No repetition goes beyond a breaker, which is not penalised either.
    Source: the processor of its author for text-generation-webui (pull request 5677), which counts 50 tokens at most.
    """
    tokens = np.array(history[-sampling.dry_penalty_last_n :], np.int64)  # all for 0
    breakers = np.isin(tokens, np.array(sampling.dry_breakers, np.int64))
    at = np.flatnonzero(~breakers[1:])  # the last place of an earlier occurrence, before the token that follows it
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
    """Return the entropy [N], in nats, of softmax(logits) [N, V] float32. A logit of minus infinity adds nothing."""
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
