"""Replay: a reference reads a cluster's answer, and draws a token at each of its positions for comparison.

The reference always reads the cluster's tokens, so positions after a difference are compared, too.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from coordinator.quality.report import ComparedAnswer, Rounding
from coordinator.sessions.request import Request
from worker.compute.sampling import Sampler

CHUNK = 16  # rows: small, so that short prompts have several chunks
_LENGTHS = (1, 2, 4, 8, 16, 32)  # rows of a window, beside all rows at once: kernels differ by them
_MAX_MEASURED = 8  # differences of a case for which logits are kept; more are no rounding
_MIN_MARGIN, _MAX_MARGIN = 1e-8, 1e4  # limits of a margin, logits
_FINENESS = 1 + 1 / 4096  # relative precision of a margin


@dataclass(frozen=True)
class ForcedPass:
    """Tokens that a model reads in given windows.

    `take` gets the number of each wanted row, counted over all windows, and its logits [1, V] float32.
    """

    windows: Sequence[Sequence[int]]
    wanted: Collection[int]
    take: Callable[[int, mx.array], None]

    def is_wanted(self, first: int, num_rows: int) -> bool:
        """Return whether any row of a window that begins at row `first` is wanted."""
        return any(row in self.wanted for row in range(first, first + num_rows))

    def hand_over(self, first: int, logits: mx.array) -> None:
        """Pass the wanted rows of the logits [L, V] of a window that begins at row `first` to `take`."""
        for number, row in enumerate(range(first, first + len(logits))):
            if row in self.wanted:
                self.take(row, logits[number : number + 1])


def prompt_chunks(prompt: Sequence[int], chunk: int) -> list[Sequence[int]]:
    """Return the windows in which a session feeds its prompt; the last may be shorter."""
    return [prompt[first : first + chunk] for first in range(0, len(prompt), chunk)]


def full_windows(tokens: Sequence[int], length: int) -> list[Sequence[int]]:
    """Return windows of `length` tokens; the first may be shorter."""
    firsts = range(len(tokens) % length, len(tokens), length)
    head = [tokens[: firsts.start]] if firsts.start else []
    return [*head, *(tokens[first : first + length] for first in firsts)]


class Replay:
    """One request and the cluster's answer to it; gets logits from passes, on the MLX thread."""

    def __init__(self, name: str, request: Request, found: Sequence[int]) -> None:
        self.name = name
        self._num_prompt = len(request.prompt)
        self._found = list(found)
        self._tokens = [*request.prompt, *found[: request.max_tokens - 1]]
        self._sampler = Sampler(request.sampling)
        self._expected: list[int] = []
        self._smallest = math.inf  # margin so far
        self._logits: dict[int, mx.array] = {}  # [1, V] by row, where the reference draws another token
        self._roundings: dict[int, Rounding] = {}  # by the same rows

    def decode_pass(self) -> ForcedPass:
        """Return the pass of one-token decoding: the prompt in chunks, then the answer token by token."""
        prompt, answer = self._tokens[: self._num_prompt], self._tokens[self._num_prompt :]
        windows = [*prompt_chunks(prompt, CHUNK), *([token] for token in answer)]
        return ForcedPass(windows, range(self._num_prompt - 1, len(self._tokens)), self._compare)

    def rounding_passes(self) -> list[ForcedPass]:
        """Return passes with windows of other lengths, to measure rounding; none if all tokens are equal."""
        if not self._logits:
            return []
        tokens = self._tokens[: max(self._logits) + 1]
        lengths = (*_LENGTHS, len(tokens))
        return [ForcedPass(full_windows(tokens, length), self._logits, self._measure) for length in lengths]

    def case(self) -> ComparedAnswer:
        """Return the comparison; call it after the passes."""
        roundings = {row - self._num_prompt + 1: rounding for row, rounding in self._roundings.items()}
        smallest = self._smallest if self._expected else None
        return ComparedAnswer(self.name, self._expected, self._found, smallest, roundings)

    def _compare(self, row: int, logits: mx.array) -> None:
        """Draw the token after `row`. Rows come in order."""
        expected, at = self._draw(row, logits), len(self._expected)
        self._expected.append(expected)
        second = self._draw(row, logits, mx.arange(logits.shape[-1]) != expected)
        self._smallest = min(self._smallest, self._margin(row, logits, expected, second, self._smallest))
        if at < len(self._found) and self._found[at] != expected and len(self._logits) < _MAX_MEASURED:
            self._logits[row] = logits
            self._roundings[row] = Rounding(self._margin(row, logits, expected, self._found[at]), measured=0.0)

    def _measure(self, row: int, logits: mx.array) -> None:
        """Note the largest difference to the logits of decoding; equal infinities do not differ."""
        kept = self._logits[row]
        distance = mx.where(kept == logits, 0.0, mx.abs(kept - logits)).max()
        found = self._roundings[row]
        measured = max(found.measured, float(distance.item()))  # type: ignore[arg-type]
        self._roundings[row] = replace(found, measured=measured)

    def _margin(self, row: int, logits: mx.array, expected: int, found: int, most: float = _MAX_MARGIN) -> float:
        return find_margin(lambda shifted: self._draw(row, shifted), logits, expected, found, min(most, _MAX_MARGIN))

    def _draw(self, row: int, logits: mx.array, allowed: mx.array | None = None) -> int:
        draws = self._sampler(logits, [row + 1], self._tokens, [row + 1], allowed=allowed)
        return draws.to_samples(slot=0)[0].token


def find_margin(
    draw: Callable[[mx.array], int], logits: mx.array, expected: int, found: int, most: float = _MAX_MARGIN
) -> float:
    """Return the least rise of the logit of `found`, or fall of that of `expected`, with which `draw` takes `found`.

    It is found with the draw itself, so temperature, noise, penalties and filters have their usual effect.

    Args:
        logits: [1, V] float32.
        most: larger margins are returned as infinity.
    """

    def is_enough(shift: float) -> bool:
        shifted = (logits.at[:, found].add(shift), logits.at[:, expected].add(-shift))
        return any(draw(row) == found for row in shifted)

    if most < _MIN_MARGIN or not is_enough(most):
        return math.inf
    if is_enough(0.0):
        return 0.0
    low, high = _MIN_MARGIN, most
    while high > low * _FINENESS:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
