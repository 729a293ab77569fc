"""The sampler of the last stage: mlx-lm's own functions, with randomness keyed by (seed, position).

The same seed gives the same token at the same position, whatever the split, the batch, the decoder, or a replay. A
guess for a position is drawn with the key that the token there will be drawn with, so that where model and guess agree
the two agree on the draw as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from protos.brigade_pb2 import Alternative, Sample, Sampling

_GOLDEN = 0x9E3779B97F4A7C15
_LOW_64 = (1 << 64) - 1


@dataclass(frozen=True)
class Draws:
    """One token for each of N rows, not evaluated yet; the rest is None unless it was asked for."""

    tokens: mx.array  # [N]
    logprobs: mx.array | None = None  # [N]
    alternatives: tuple[mx.array, mx.array] | None = None  # ids and logprobs, [N, n] each
    entropies: mx.array | None = None  # [N], nats

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.tokens, self.logprobs, *(self.alternatives or ()), self.entropies) if a is not None]

    def to_samples(self, slot: int) -> list[Sample]:
        samples = [Sample(slot=slot, token=token) for token in _listed(self.tokens)]
        if self.entropies is not None:
            for sample, entropy in zip(samples, _listed(self.entropies), strict=True):
                sample.entropy = entropy
        if self.logprobs is not None and self.alternatives is not None:
            rows = zip(samples, _listed(self.logprobs), *map(_listed, self.alternatives), strict=True)
            for sample, logprob, tokens, logprobs in rows:
                sample.logprob = logprob
                sample.alternatives.extend(map(_alternative, tokens, logprobs))
        return samples


class Sampler:
    """One session's sampling parameters, bound to mlx-lm's sampler chain."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._choose = make_sampler(
            temp=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p
        )
        self._processors = make_logits_processors(
            logit_bias=dict(sampling.logit_bias),
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
        )

    def __call__(
        self, logits: mx.array, positions: Sequence[int], tokens: list[int], known: Sequence[int], entropy: bool = False
    ) -> Draws:
        """Choose a token for each row.

        Args:
            logits: [N, V] float32.
            positions: where each row's token would stand in the sequence.
            tokens: the session's tokens, of which penalties look at the first `known` for each row.
            entropy: whether to report the entropy of each row's raw logits.
        """
        entropies = _entropy(logits) if entropy else None
        if self._processors:
            rows = zip(logits.split(len(positions)), known, strict=True)
            logits = mx.concatenate([self._process(row, tokens[:length]) for row, length in rows])
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        drawn = self._draw(logprobs, positions)
        if not self._sampling.logprobs:
            return Draws(drawn, entropies=entropies)
        best = mx.argsort(-logprobs, axis=-1)[:, : self._sampling.logprobs - 1]
        chosen = mx.take_along_axis(logprobs, drawn[:, None], axis=-1)[:, 0]
        return Draws(drawn, chosen, (best, mx.take_along_axis(logprobs, best, axis=-1)), entropies)

    def _process(self, logits: mx.array, history: list[int]) -> mx.array:
        tokens = mx.array(history, mx.int32)
        for processor in self._processors:
            logits = processor(tokens, logits)
        return logits

    def _draw(self, logprobs: mx.array, positions: Sequence[int]) -> mx.array:
        if self._sampling.temperature == 0:
            return self._choose(logprobs)
        tokens = []
        for row, position in zip(logprobs.split(len(positions)), positions, strict=True):
            mx.random.seed(random_key(self._sampling.seed, position))
            tokens.append(self._choose(row))
        return mx.concatenate(tokens)


def random_key(seed: int, position: int) -> int:
    """The key of one position's draw: 64 bits, different for every position of a seed."""
    return (seed + (position + 1) * _GOLDEN) & _LOW_64


def _entropy(logits: mx.array) -> mx.array:
    """Entropy in nats of softmax(logits), row by row: [N, V] float32 to [N]. A logit of minus infinity adds nothing."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return -mx.where(mx.isinf(logprobs), 0.0, mx.exp(logprobs) * logprobs).sum(axis=-1)


def _listed(array: mx.array) -> list[Any]:
    return array.tolist()  # type: ignore[return-value]


def _alternative(token: int, logprob: float) -> Alternative:
    return Alternative(token=token, logprob=logprob)
