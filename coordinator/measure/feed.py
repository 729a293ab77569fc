"""Feed: tokens that a model is to read in these windows, and who takes the logits of which rows."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Feed:
    """`take` gets the number of each wanted row, counted over all windows, and its logits [1, V] float32."""

    windows: Sequence[Sequence[int]]
    wanted: Collection[int]
    take: Callable[[int, mx.array], None]

    def is_wanted(self, first: int, num_rows: int) -> bool:
        """Whether any row of a window that begins at row `first` is."""
        return any(row in self.wanted for row in range(first, first + num_rows))

    def hand_over(self, first: int, logits: mx.array) -> None:
        """The logits [L, V] of a window that begins at row `first`."""
        for number, row in enumerate(range(first, first + len(logits))):
            if row in self.wanted:
                self.take(row, logits[number : number + 1])


def chunks(prompt: Sequence[int], chunk: int) -> list[Sequence[int]]:
    """The windows in which a session feeds its prompt."""
    return [prompt[first : first + chunk] for first in range(0, len(prompt), chunk)]


def cut(tokens: Sequence[int], length: int) -> list[Sequence[int]]:
    """Windows of `length` tokens, of which the first may be shorter."""
    firsts = range(len(tokens) % length, len(tokens), length)
    head = [tokens[: firsts.start]] if firsts.start else []
    return [*head, *(tokens[first : first + length] for first in firsts)]
