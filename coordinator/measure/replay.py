"""Replay: a cluster's answer led through a reference, to see at each position what the reference would have drawn.

As the reference always reads the cluster's tokens, every position is compared, also those after a difference.
"""

import math
from collections.abc import Sequence

import mlx.core as mx

from coordinator.measure.feed import Feed, chunks, cut
from coordinator.measure.rounding import MOST, Rounding, distance, find_margin
from coordinator.measure.verdict import Case
from coordinator.sessions.request import Request
from worker.compute.sampling import Sampler

CHUNK = 16  # rows: small, so that prompts of a few dozen tokens already cross chunks
_LENGTHS = (1, 2, 4, 8, 16, 32)  # rows of a window, beside all rows at once: decoders feed few or many, kernels differ
_MOST_MEASURED = 8  # differences of a case, whose logits are kept meanwhile: any more are no rounding


class Replay:
    """One request and what the cluster made of it. Its feeds hand it logits on the MLX thread."""

    def __init__(self, name: str, request: Request, found: Sequence[int]) -> None:
        self.name = name
        self._num_prompt = len(request.prompt)
        self._found = list(found)
        self._tokens = [*request.prompt, *found[: request.max_tokens - 1]]  # after them all is drawn
        self._sampler = Sampler(request.sampling)
        self._expected: list[int] = []
        self._smallest = math.inf  # margin so far
        self._logits: dict[int, mx.array] = {}  # [1, V] by row, where the reference takes another token
        self._margins: dict[int, float] = {}  # there
        self._measured: dict[int, float] = {}  # there

    def feed(self) -> Feed:
        """The prompt and the answer, a token at a time, as one process would decode them."""
        prompt, answer = self._tokens[: self._num_prompt], self._tokens[self._num_prompt :]
        windows = [*chunks(prompt, CHUNK), *([token] for token in answer)]
        return Feed(windows, range(self._num_prompt - 1, len(self._tokens)), self._compare)

    def other_feeds(self) -> list[Feed]:
        """The same in windows of other lengths, to measure what rounding makes where tokens differ; none otherwise."""
        if not self._logits:
            return []
        tokens = self._tokens[: max(self._logits) + 1]
        return [Feed(cut(tokens, length), self._logits, self._measure) for length in (*_LENGTHS, len(tokens))]

    def case(self) -> Case:
        """What came of it."""
        roundings = {
            row - self._num_prompt + 1: Rounding(self._margins[row], measured)
            for row, measured in self._measured.items()
        }
        smallest = self._smallest if self._expected else None
        return Case(self.name, self._expected, self._found, smallest, roundings)

    def _compare(self, row: int, logits: mx.array) -> None:
        """Draw the token after `row`. Rows come in order."""
        expected, at = self._draw(row, logits), len(self._expected)
        self._expected.append(expected)
        second = self._draw(row, logits, mx.arange(logits.shape[-1]) != expected)
        self._smallest = min(self._smallest, self._margin(row, logits, expected, second, self._smallest))
        if at < len(self._found) and self._found[at] != expected and len(self._logits) < _MOST_MEASURED:
            self._logits[row] = logits
            self._margins[row] = self._margin(row, logits, expected, self._found[at])

    def _measure(self, row: int, logits: mx.array) -> None:
        self._measured[row] = max(self._measured.get(row, 0.0), distance(self._logits[row], logits))

    def _margin(self, row: int, logits: mx.array, expected: int, found: int, most: float = MOST) -> float:
        return find_margin(lambda shifted: self._draw(row, shifted), logits, expected, found, min(most, MOST))

    def _draw(self, row: int, logits: mx.array, allowed: mx.array | None = None) -> int:
        draws = self._sampler(logits, [row + 1], self._tokens, [row + 1], allowed=allowed)
        return draws.to_samples(slot=0)[0].token
