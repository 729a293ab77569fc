"""Window lengths: only a few, so that the costs of all of them are soon measured. Pure."""

from collections.abc import Mapping
from functools import cache

from coordinator.planning.costs import StepCosts

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 256)  # rows


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


_CANDIDATES = (4, 8, 16, 32)
_FIRST = 16
_LONGEST_PAUSE = 32  # steps
_SURE = 0.995  # drafts that always hold
_WEIGHT = 0.2  # of a new observation

SMALLEST = _CANDIDATES[0]


class WindowChooser:
    """Chooses the window that yields most tokens per second for a request, unless it is fixed.

    With drafts that hold with probability p each, a window of W yields 1 + p + ... + p^(W-1) tokens per step; its rows
    are the drafts and as many MASK rows, 2 W in all. Where no window pays, none is made: one token per step. Where one
    would pay with drafts that hold, a small one is tried now and then, more rarely each time that its drafts fail.
    """

    def __init__(self, costs: StepCosts, fixed: int | None = None) -> None:
        self._costs = costs
        self._fixed = fixed
        self._held = 0.8 * _WEIGHT
        self._tried = 1.0 * _WEIGHT  # before anything is known: of one draft, four fifths held
        self._failures = 0  # in a row
        self._pause = 0  # steps until a window that does not pay is tried

    @property
    def windows(self) -> tuple[int, ...]:
        """All windows that it may choose, besides none."""
        return _CANDIDATES if self._fixed is None else (self._fixed,)

    def observe_drafts(self, num_held: int, num_drafts: int) -> None:
        """Record a step's number of drafts, and how many held before the first that did not."""
        if not num_drafts:
            self._pause = self._pause - 1 if self._pause else 1  # what a tried window guesses is verified first
            return
        self._held = (1 - _WEIGHT) * self._held + _WEIGHT * num_held
        self._tried = (1 - _WEIGHT) * self._tried + _WEIGHT * min(num_held + 1, num_drafts)
        self._failures = 0 if num_held > num_drafts // 2 else self._failures + 1
        self._pause = min(_LONGEST_PAUSE, 2**self._failures - 1)

    def choose(self, num_together: int = 1) -> int:
        """Return the window for the next step in MASK rows; 0 for none.

        `num_together` sessions share the step, and all are taken to be alike.
        """
        if self._fixed is not None:
            return self._fixed
        if not self._costs.is_known:
            return _FIRST
        without = 1 / self._costs.seconds(num_together)
        step_s = {window: self._costs.seconds(2 * window * num_together) for window in _CANDIDATES}
        speed, window = _best(min(_SURE, self._held / self._tried), step_s)
        if speed > without:
            return window
        may_pay = _best(_SURE, step_s)[0] > without
        return SMALLEST if may_pay and not self._pause else 0


def _best(held: float, step_s: Mapping[int, float]) -> tuple[float, int]:
    """Return the most tokens per second and its window, if a draft holds with probability `held`."""
    speeds = ((1 - held**window) / (1 - held) / seconds for window, seconds in step_s.items())
    return max(zip(speeds, step_s, strict=True), key=lambda pair: pair[0])
