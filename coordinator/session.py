"""Session: one request's tokens and how far the chain has been fed. No I/O, no MLX, no clock."""

from collections.abc import Sequence

from protos.brigade_pb2 import Window
from worker.history import History


class Session:
    """One sequence. Known tokens are fed in windows; the last known token's row yields the next one."""

    def __init__(self, prompt: Sequence[int], max_tokens: int, eos: frozenset[int] = frozenset()) -> None:
        self.slot = -1
        self.fed = 0  # leading tokens that windows have carried so far
        self.num_prompt = len(prompt)
        self.finish_reason: str | None = None
        self._history = History(prompt)
        self._max_tokens = max_tokens
        self._eos = eos

    @property
    def generated(self) -> list[int]:
        return self._history.tokens[self.num_prompt :]

    @property
    def is_ready(self) -> bool:
        """Whether there are known tokens that no window has carried yet."""
        return self.finish_reason is None and self.fed < len(self._history)

    def next_window(self, budget: int) -> Window:
        """The next known tokens, at most `budget` of them: a prompt chunk, or the last token."""
        base, end = self.fed, min(self.fed + budget, len(self._history))
        self.fed = end
        return Window(
            slot=self.slot,
            base=base,
            prefix_hash=self._history.prefix_hash(base),
            tokens=self._history.tokens[base:end],
            wanted=int(end == len(self._history)),
        )

    def commit(self, token: int) -> None:
        """Take the token that follows everything fed; sets `finish_reason` when it is the last one."""
        self._history.extend([token])
        if token in self._eos:
            self.finish_reason = "stop"
        elif len(self.generated) >= self._max_tokens:
            self.finish_reason = "length"

    def stop(self) -> None:
        """End here: a stop string matched, or the client left."""
        self.finish_reason = "stop"
