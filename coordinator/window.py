"""How many MASK rows a diffusion window should have: by what steps cost here and by how far drafts hold. Pure."""

from coordinator.costs import StepCosts

_CANDIDATES = (4, 8, 16, 32)
_FIRST = 16
_WEIGHT = 0.2  # of a new observation


class WindowChooser:
    """Chooses a request's window, the one that yields most tokens per second; a fixed one if told so.

    With drafts that hold with probability p each, a window of W yields 1 + p + ... + p^(W-1) tokens per step; its rows
    are the drafts and as many MASK rows, 2 W in all.
    """

    def __init__(self, costs: StepCosts, fixed: int | None = None) -> None:
        self._costs = costs
        self._fixed = fixed
        self._held = 1.0
        self._tried = 1.25  # before anything is known: drafts hold four times in five

    def observe_drafts(self, num_held: int, num_drafts: int) -> None:
        """Of so many drafts so many held, before the first that did not."""
        if num_drafts:
            self._held = (1 - _WEIGHT) * self._held + _WEIGHT * num_held
            self._tried = (1 - _WEIGHT) * self._tried + _WEIGHT * min(num_held + 1, num_drafts)

    def choose(self) -> int:
        """The window for the next step, MASK rows."""
        if self._fixed is not None:
            return self._fixed
        if not self._costs.is_known:
            return _FIRST
        return max(_CANDIDATES, key=lambda window: self._tokens(window) / self._costs.seconds(2 * window))

    def _tokens(self, window: int) -> float:
        held = min(0.995, self._held / self._tried)
        return (1 - held**window) / (1 - held)
