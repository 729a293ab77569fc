"""The sampler of the last stage: mlx-lm's own functions, with randomness keyed by (seed, position).

The same seed gives the same token at the same position, whatever the split, the batch, or a replay.
"""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from protos.brigade_pb2 import Alternative, Sample, Sampling

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Draw:
    """One sampled token, not evaluated yet; the last two are None unless logprobs were asked for."""

    token: mx.array  # [1]
    logprob: mx.array | None = None  # [1]
    alternatives: tuple[mx.array, mx.array] | None = None  # ids and logprobs, [n] each

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.token, self.logprob, *(self.alternatives or ())) if a is not None]

    def to_sample(self, slot: int) -> Sample:
        sample = Sample(slot=slot, token=cast(int, self.token.item()))
        if self.logprob is not None:
            sample.logprob = cast(float, self.logprob.item())
        for token, logprob in zip(*(a.tolist() for a in self.alternatives or ()), strict=True):
            sample.alternatives.append(Alternative(token=token, logprob=logprob))
        return sample


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

    def __call__(self, logits: mx.array, tokens: list[int]) -> Draw:
        """Choose the token that follows `tokens`.

        Args:
            logits: [1, V] float32, the last row's.
            tokens: the session's tokens so far; the new token's position is their number.
        """
        if self._processors:
            history = mx.array(tokens)
            for processor in self._processors:
                logits = processor(history, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self._sampling.temperature > 0:
            mx.random.seed(random_key(self._sampling.seed, len(tokens)))
        token = self._choose(logprobs)
        if not self._sampling.logprobs:
            return Draw(token)
        best = mx.argsort(-logprobs[0])[: self._sampling.logprobs - 1]
        return Draw(token, logprobs[0][token], (best, logprobs[0][best]))


def random_key(seed: int, position: int) -> int:
    """The key of one position's draw: 64 bits, different for every position of a seed."""
    return (seed + (position + 1) * _GOLDEN) & _MASK
