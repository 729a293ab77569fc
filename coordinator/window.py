"""How many MASK rows a diffusion window should have: by what steps cost here and by how far drafts hold. Pure."""

_CANDIDATES = (4, 8, 16, 32)
_FIRST = 16
_WEIGHT = 0.2  # of a new observation


class WindowChooser:
    """Chooses the window that yields most tokens per second; a fixed one if told so.

    With drafts that hold with probability p each, a window of W yields 1 + p + ... + p^(W-1) tokens per step; its rows
    are the drafts and as many MASK rows, 2 W in all.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self._seen: set[int] = set()  # numbers of rows
        self._step_s: dict[int, float] = {}  # seconds by number of rows
        self._held = 1.0
        self._tried = 1.25  # before anything is known: drafts hold four times in five

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows took so long, alone in the chain."""
        if num_rows not in self._seen:
            self._seen.add(num_rows)  # the first of a size compiles its kernels: it says nothing of the next
            return
        known = self._step_s.get(num_rows)
        self._step_s[num_rows] = seconds if known is None else known + _WEIGHT * (seconds - known)

    def observe_drafts(self, num_held: int, num_drafts: int) -> None:
        """Of so many drafts so many held, before the first that did not."""
        if num_drafts:
            self._held = (1 - _WEIGHT) * self._held + _WEIGHT * num_held
            self._tried = (1 - _WEIGHT) * self._tried + _WEIGHT * min(num_held + 1, num_drafts)

    def choose(self) -> int:
        """The window for the next step, MASK rows."""
        if self._fixed is not None:
            return self._fixed
        if not self._step_s:
            return _FIRST
        return max(_CANDIDATES, key=lambda window: self._tokens(window) / self._seconds(2 * window))

    def _tokens(self, window: int) -> float:
        held = min(0.995, self._held / self._tried)
        return (1 - held**window) / (1 - held)

    def _seconds(self, num_rows: int) -> float:
        """What so many rows cost: measured, or on the line through the two nearest measurements."""
        if num_rows in self._step_s:
            return self._step_s[num_rows]
        near = sorted(self._step_s, key=lambda rows: abs(rows - num_rows))[:2]
        if len(near) == 1:
            return self._step_s[near[0]]
        (a, b), (at, bt) = near, (self._step_s[rows] for rows in near)
        slope = max(0.0, (bt - at) / (b - a))
        return max(at + slope * (num_rows - a), min(self._step_s.values()) / 2)
