"""The sampler of the last stage: mlx-lm's own penalties and filters, then Gumbel-max keyed by (seed, position).

The same seed gives the same token at the same position, whatever the split, the batch, the decoder, or a replay. A
guess for a position is drawn with the same noise as the token there, so that the draws agree where their distributions
do (arXiv 2408.07978). Rounding moves a draw only where two tokens nearly tie.
Shapes: N rows, V vocabulary, n alternatives.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from protos.brigade_pb2 import Alternative, Conditioning, Sample, Sampling, Score, Soft
from worker.errors import FrameError, SamplingError

_GOLDEN = 0x9E3779B97F4A7C15
_STEP = 0xD1B54A32D192ED03
_LOW_64 = (1 << 64) - 1
_LOW_32 = (1 << 32) - 1
_HALF_A_STEP = 2.0**-33  # MLX's uniform numbers near 0 are multiples of 2^-32
CONTEXT = 20  # tokens that penalties look back at, as in mlx-lm


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
        self._filters = _filters(sampling)
        with _refusals_named():
            self._processors = make_logits_processors(
                logit_bias=dict(sampling.logit_bias),
                repetition_penalty=sampling.repetition_penalty,
                repetition_context_size=CONTEXT,
                presence_penalty=sampling.presence_penalty,
                presence_context_size=CONTEXT,
                frequency_penalty=sampling.frequency_penalty,
                frequency_context_size=CONTEXT,
            )

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on earlier tokens, not only on the logits."""
        return bool(self._processors)

    @cached_property
    def kind(self) -> bytes | None:
        """A key that is equal for samplers that differ in their seeds only; None if `draw` is not enough for them."""
        return None if self._processors or self._sampling.logprobs else self.draw_kind

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
        return Draws(self._draw(self._scaled(_normalised(logits)), list(map(random_key, seeds, positions))))

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
        if self._processors:
            rows = zip(logits.split(len(positions)), known, strict=True)
            logits = mx.concatenate(
                [self._process(row, tokens[max(0, length - CONTEXT) : length]) for row, length in rows]
            )
        logprobs = _normalised(logits)
        drawn = self._draw(self._scaled(logprobs), [random_key(self.seed, position) for position in positions])
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
        scaled = self._scaled(logprobs)
        drawn = self._draw(scaled, [random_key(self.seed, position, step) for position in positions])
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

    def _process(self, logits: mx.array, history: list[int]) -> mx.array:
        tokens = mx.array(history, mx.int32)
        with _refusals_named():
            for processor in self._processors:
                logits = processor(tokens, logits)
        return logits

    def _draw(self, scaled: mx.array, keys: Sequence[int]) -> mx.array:
        """Draw a token [N] for each row of what `_scaled` returned [N, V], by the row's key."""
        noise = gumbel(keys, scaled.shape[-1]) if self._sampling.temperature else 0.0
        return mx.argmax(scaled + noise, axis=-1)

    def _scaled(self, logprobs: mx.array) -> mx.array:
        """Return the logits [N, V] of the distribution that tokens are drawn from; at temperature 0 the model's own."""
        temperature = self._sampling.temperature
        if temperature == 0:
            return logprobs
        with _refusals_named():
            for keep in self._filters:
                logprobs = keep(logprobs)
        return logprobs / temperature


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
    keys = mx.array([[number >> 32, number & _LOW_32] for number in numbers], mx.uint32)
    return _gumbel_of(mx.vmap(lambda key: mx.random.uniform(shape=(vocab_size,), key=key))(keys))


def _gumbel_of(uniform: mx.array) -> mx.array:
    """Turn numbers in [0, 1) into Gumbel noise, always finite.

    The largest noise comes from the smallest numbers, where float32 is finest, so that tokens of probability 1e-9 are
    drawn as often as they should be.
    """
    return -mx.log(-mx.log1p(-mx.maximum(uniform, _HALF_A_STEP)))


def random_key(seed: int, position: int, step: int = 0) -> int:
    """Return the 64-bit key of one position's draw, different for every position of a seed and step of denoising."""
    return (seed + (position + 1) * _GOLDEN + step * _STEP) & _LOW_64


def _filters(sampling: Sampling) -> list[Callable[[mx.array], mx.array]]:
    """Return mlx-lm's filters that are on, in the order of its `make_sampler`."""
    filters: list[Callable[[mx.array], mx.array]] = []
    if 0 < sampling.top_p < 1:
        filters.append(lambda logprobs: apply_top_p(logprobs, sampling.top_p))
    if sampling.min_p:
        filters.append(lambda logprobs: apply_min_p(logprobs, sampling.min_p))
    if sampling.top_k:
        filters.append(lambda logprobs: apply_top_k(logprobs, sampling.top_k))
    return filters


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
