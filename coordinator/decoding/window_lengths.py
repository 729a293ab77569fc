"""Window lengths, and the choice among them by measured costs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import ceil
from operator import add, mul

from coordinator.planning.costs import SURE, DraftingCosts, DraftShares, StepCosts

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 256)  # rows: only a few, so that the costs of all of them are soon measured


def largest_within(num_rows: int) -> int:
    """Return the largest length of at most `num_rows` rows; `num_rows` is at least 1."""
    return max(length for length in LENGTHS if length <= num_rows)


def padded(num_rows: int) -> int:
    """Return the smallest length of at least `num_rows` rows."""
    return next((length for length in LENGTHS if length >= num_rows), num_rows)


def mask_count(num_tokens: int, wanted: int) -> int:
    """Return how many MASK rows fill a window with `num_tokens` token rows: about `wanted`, more than half of it.

    With half of it windows would never grow: as many tokens as the masks yield make the next window.
    """
    rows = largest_within(num_tokens + wanted)
    return (rows if rows - num_tokens > wanted // 2 else padded(num_tokens + wanted)) - num_tokens


@cache
def most_masks(wanted: int) -> int:
    """Return the most MASK rows of a window of about `wanted`, with at most as many token rows."""
    return max(mask_count(num_tokens, wanted) for num_tokens in range(1, wanted + 1))


@cache
def most_padding(num_rows: int) -> int:
    """Return the most rows that padding adds to `num_rows` or fewer rows."""
    return max(padded(rows) - rows for rows in range(1, num_rows + 1))


@dataclass(frozen=True)
class WindowKind:
    """The windows that one source of drafts makes. A window of W tokens holds a known one and W - 1 drafts."""

    windows: tuple[int, ...]  # to choose from, ascending
    rows_per_token: int  # rows of a step per token of its window
    first: int  # the window while nothing is measured

    @property
    def smallest(self) -> int:
        return self.windows[0]


MASK_WINDOWS = WindowKind((4, 8, 16, 32), rows_per_token=2, first=16)  # as many MASK rows beside the tokens
TEXT_WINDOWS = WindowKind((2, 4, 8, 16), rows_per_token=1, first=16)
DRAFTER_WINDOWS = WindowKind((2, 4, 8, 16), rows_per_token=1, first=4)

_LONGEST_PAUSE = 32  # steps
_WEIGHT = 0.2  # of a new observation
_TRIALS = 0.05  # the most of all steps' time that trying windows may take


class WindowChooser:
    """Chooses the window that yields most tokens per second for a request, unless it is fixed.

    If the j-th draft holds in a share s_j of the steps, a window of W tokens yields 1 + s_1 + ... + s_(W-1). Where no
    window pays, none is made: one token per step. Where one would pay with drafts that hold, a small one is tried now
    and then: more rarely each time that its drafts fail, and the more it costs all sessions that share the step.
    """

    def __init__(
        self,
        costs: StepCosts,
        kind: WindowKind = MASK_WINDOWS,
        fixed: int | None = None,
        drafting: DraftingCosts | None = None,
    ) -> None:
        """
        Args:
            costs: of steps without drafting.
            fixed: the window, if it is not to be chosen.
            drafting: what drafts of this source do in all sessions; None if every text is another matter.
        """
        self._costs = costs
        self._drafting = drafting
        self._kind = kind
        self._fixed = fixed
        self._shares = DraftShares(max(self.windows), _WEIGHT, drafting.shares if drafting else None)
        self._failures = 0  # in a row
        self._pause = 0  # steps until a window that does not pay is tried
        self._trials = drafting or DraftingCosts()  # the pause that trials of all sessions keep

    @property
    def windows(self) -> tuple[int, ...]:
        """All windows that it may choose, besides none."""
        return self._kind.windows if self._fixed is None else (self._fixed,)

    @property
    def is_fixed(self) -> bool:
        return self._fixed is not None

    def observe_drafts(self, num_held: int, num_drafts: int) -> None:
        """Record a step's number of drafts, and how many held before the first that did not."""
        self._trials.pause = max(0, self._trials.pause - 1)
        if not num_drafts:
            self._pause = self._pause - 1 if self._pause else 1  # what a tried window guesses is verified first
            return
        for shares in (self._shares, self._drafting.shares) if self._drafting else (self._shares,):
            shares.observe(num_held, num_drafts)
        self._failures += 1
        if num_held > num_drafts // 2:
            self._failures = self._trials.pause = 0
        self._pause = min(_LONGEST_PAUSE, 2**self._failures - 1)

    def choose(self, num_together: int = 1, most: int | None = None, instead: float = 0.0) -> int:
        """Return the window for the next step, at most `most` tokens if that is given; 0 for none.

        Args:
            num_together: how many sessions share the step; all are taken to be alike.
            instead: tokens per second that another source of drafts is expected to bring.
        """
        if self._fixed is not None:
            return self._fixed if most is None else min(self._fixed, most)
        windows = [window for window in self._kind.windows if most is None or window <= most]
        if not windows:
            return 0
        if not self._costs.is_known:
            return min(self._kind.first, windows[-1])
        rows_s = self._rows_s(windows, num_together)
        without_s = self._costs.seconds(num_together)
        without = max(1 / without_s, instead)
        speed, window = self._best(windows, rows_s, num_together)
        if speed > without:
            return window
        # whatever drafting seems to cost: only where it goes on is that measured again
        if self._pause or self._trials.pause or _best([SURE] * max(windows), windows, rows_s)[0] <= without:
            return 0
        trial_s = self._costs.seconds(num_together - 1 + self._kind.rows_per_token * windows[0])
        trial_s += self._drafting_s(windows[0], 1) + self._trials.start_s(num_together) - without_s
        self._trials.pause = ceil(num_together * max(0.0, trial_s) / without_s / _TRIALS)
        return windows[0]

    def speed(self, num_together: int, most: int) -> float:
        """Return a session's tokens per second with the best window of at most `most` tokens; 0 while not known."""
        windows = [window for window in self._kind.windows if window <= most]
        if self._fixed is not None or not self._costs.is_known or not windows:
            return 0.0
        best = self._best(windows, self._rows_s(windows, num_together), num_together)[0]
        return max(best, 1 / self._costs.seconds(num_together))

    def _best(self, windows: Sequence[int], rows_s: Sequence[float], num_together: int) -> tuple[float, int]:
        drafting_s = [self._drafting_s(window, num_together) for window in windows]
        # one session's long window holds up all that share the step: together they choose by what all of them did
        shares = self._drafting.shares if self._drafting and num_together > 1 else self._shares
        return _best(shares.shares(), windows, list(map(add, rows_s, drafting_s)))

    def _rows_s(self, windows: Sequence[int], num_together: int) -> list[float]:
        return [self._costs.seconds(window * self._kind.rows_per_token * num_together) for window in windows]

    def _drafting_s(self, window: int, num_slots: int) -> float:
        return self._drafting.seconds(window - 1, num_slots) if self._drafting else 0.0


def _best(shares: Sequence[float], windows: Sequence[int], step_s: Sequence[float]) -> tuple[float, int]:
    """Return the most tokens per second and its window, if a draft holds with the share of its place."""
    tokens = list(accumulate(accumulate(shares, mul), initial=1.0))
    return max(
        ((tokens[window - 1] / seconds, window) for window, seconds in zip(windows, step_s, strict=True)),
        key=lambda pair: pair[0],
    )
