"""Whether rounding explains that a model, evaluated in another order, chose another token. MLX thread only."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from coordinator.measure.reference import Reference
from protos.brigade_pb2 import Sampling
from worker.compute.sampling import Sampler

_LENGTHS = (1, 2, 4, 8, 16, 32)  # rows of a window, beside all rows at once: decoders feed few or many, kernels differ
_LEAST, _MOST = 1e-8, 1e4  # logits
_HALVINGS = 12  # so that a margin is known to a part in four thousand

Draw = Callable[[mx.array], int]


@dataclass(frozen=True)
class Rounding:
    """Two figures about the place where two streams of tokens part, both in logits."""

    margin: float  # the least change of one of the two tokens' logits with which the reference takes the other token
    measured: float  # the most that the reference's logits there differ by, its rows fed in windows of several lengths

    @property
    def explains(self) -> bool:
        """False where nothing was measured to differ, or no number came out."""
        return 0 < self.measured < math.inf and self.margin <= self.measured


def measure_rounding(
    reference: Reference, sampling: Sampling, windows: Sequence[Sequence[int]], expected: int, found: int
) -> Rounding:
    """Measure where the reference drew `expected`, after feeding these windows, and the chain came to `found`."""
    tokens = [token for window in windows for token in window]
    logits = reference.logits_after(windows)
    others = [reference.logits_after(cut(tokens, length)) for length in (*_LENGTHS, len(tokens))]
    sampler = Sampler(sampling)

    def draw(row: mx.array) -> int:
        return sampler(row, [len(tokens)], tokens, [len(tokens)]).to_samples(slot=0)[0].token

    return Rounding(find_margin(draw, logits, expected, found), max(_distance(logits, other) for other in others))


def find_margin(draw: Draw, logits: mx.array, expected: int, found: int) -> float:
    """The least rise of `found`'s logit, or fall of `expected`'s, with which `draw` takes `found`; infinite if none.

    Asked of the draw itself, so that temperature, noise, penalties and the edges of filters all count as they do there.
    """

    def is_enough(shift: float) -> bool:
        shifted = (logits.at[:, found].add(shift), logits.at[:, expected].add(-shift))
        return any(draw(row) == found for row in shifted)

    if is_enough(0.0):
        return 0.0
    low, high = 0.0, _LEAST
    while not is_enough(high):
        low, high = high, 2 * high
        if high > _MOST:
            return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def cut(tokens: Sequence[int], length: int) -> list[Sequence[int]]:
    """Windows of `length` tokens, of which the first may be shorter."""
    firsts = range(len(tokens) % length, len(tokens), length)
    head = [tokens[: firsts.start]] if firsts.start else []
    return [*head, *(tokens[first : first + length] for first in firsts)]


def _distance(logits: mx.array, other: mx.array) -> float:
    """The largest difference; minus infinity, as of MASK, is equal to itself."""
    apart = mx.where(logits == other, 0.0, mx.abs(logits - other)).max()
    return float(apart.item())  # type: ignore[arg-type]
