"""Whether rounding explains that a model, evaluated in another order, chose another token. MLX thread only."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

LEAST, MOST = 1e-8, 1e4  # margins that can be told apart, logits
_FINENESS = 1 + 1 / 4096  # so that a margin is known to a part in four thousand

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


def find_margin(draw: Draw, logits: mx.array, expected: int, found: int, most: float = MOST) -> float:
    """The least rise of `found`'s logit, or fall of `expected`'s, with which `draw` takes `found`; infinite if that is
    more than `most`.

    Asked of the draw itself, so that temperature, noise, penalties and the edges of filters all count as they do there.
    """

    def is_enough(shift: float) -> bool:
        shifted = (logits.at[:, found].add(shift), logits.at[:, expected].add(-shift))
        return any(draw(row) == found for row in shifted)

    if most < LEAST or not is_enough(most):
        return math.inf
    if is_enough(0.0):
        return 0.0
    low, high = LEAST, most
    while high > low * _FINENESS:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def distance(logits: mx.array, other: mx.array) -> float:
    """The largest difference; minus infinity, as of MASK, is equal to itself."""
    apart = mx.where(logits == other, 0.0, mx.abs(logits - other)).max()
    return float(apart.item())  # type: ignore[arg-type]
