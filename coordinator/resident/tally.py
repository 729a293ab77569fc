"""Tally: what one server has answered so far, in plain numbers: a few additions per step, and no node is asked."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from coordinator.cluster.timeline import Recovered
from coordinator.resident.frontend import Task
from coordinator.resident.tally_flow import Flow
from coordinator.sessions.answer import Piece
from worker.errors import BrigadeError, ContextExceeded, InputError, NodeBusy, QueueFull, WaitedTooLong

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # of what the present task answers
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = tuple(float(2**power) for power in range(18))
RATES_S = 120  # for which rates are kept
_RECENT = 24
_REFUSALS = (QueueFull, WaitedTooLong, NodeBusy, ContextExceeded, InputError)  # it was never run


class Histogram:
    """Observations by upper bound, as Prometheus counts them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one is of what exceeds all bounds
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Rates:
    """Tokens and steps by second, for the last two minutes."""

    def __init__(self) -> None:
        self._seconds: dict[int, list[int]] = {}

    def add(self, second: int, num_tokens: int) -> None:
        """Readers are not all equally quick: a second may come after later ones."""
        counts = self._seconds.setdefault(second, [0, 0])
        counts[0] += num_tokens
        counts[1] += 1
        if len(self._seconds) > RATES_S + 1:  # with the one that is not over
            del self._seconds[min(self._seconds)]

    def until(self, second: int) -> list[tuple[int, int]]:
        """(tokens, steps) of each of the seconds before this one, the oldest first."""
        zero = [0, 0]
        return [(at[0], at[1]) for at in (self._seconds.get(second - ago, zero) for ago in range(RATES_S, 0, -1))]


@dataclass(frozen=True)
class Ended:
    """A request that has ended, and what became of it. Times in seconds; None for what it did not come to."""

    id: str
    decoder: str
    num_prompt: int
    num_generated: int
    num_steps: int
    finish_reason: str  # "stop", "length", "abort", "error" or "refused"
    why: str  # of an error
    ended_at: float  # since 1970
    total_s: float
    first_token_s: float | None
    queue_s: float | None
    num_recoveries: int
    num_reused: int
    parts_ms: dict[str, float]


@dataclass
class Tally:
    """One server's. It outlives the model, which may be loaded anew."""

    started: float = field(default_factory=time.monotonic)
    on_end: Callable[[Ended], None] = lambda ended: None
    flow: Flow = field(default_factory=Flow)
    rates: Rates = field(default_factory=Rates)
    under_way: list["Watched"] = field(default_factory=list)
    recent: deque[Ended] = field(default_factory=lambda: deque(maxlen=_RECENT))
    recovered: deque[tuple[float, Recovered]] = field(default_factory=lambda: deque(maxlen=_RECENT))  # since 1970
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    finished: Counter[str] = field(default_factory=Counter)  # by reason
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    recoveries: Counter[str] = field(default_factory=Counter)  # by cause
    decoder_tokens: Counter[str] = field(default_factory=Counter)
    decoder_steps: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Histogram] = field(default_factory=lambda: _histograms())

    @property
    def now_s(self) -> float:
        """On the clock of the rates."""
        return time.monotonic()

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self.started

    def watch(self, task: Task) -> "Watched":
        """What takes note of one request; to be used as a context manager around its answer."""
        return Watched(self, task, REQUEST_ID.get())

    def refuse(self, error: BrigadeError) -> None:
        """Count a request that was refused before it was one to watch."""
        self.refused[type(error).__name__] += 1

    def recover(self, found: Recovered) -> None:
        self.recoveries[found.cause] += 1
        self.histograms["recovery_seconds"].observe(found.took_s)
        self.recovered.append((time.time(), found))


class Watched:
    """One request under way."""

    def __init__(self, tally: Tally, task: Task, request_id: str) -> None:
        self.id = request_id
        self.request = task.request
        self.num_generated = 0
        self.started = time.monotonic_ns()
        self._tally = tally
        self._num_pieces = 0  # that brought tokens
        self._first_at = self._last_at = 0  # nanoseconds, monotonic
        self._last: Piece | None = None
        self._parts: dict[str, int] = {}

    @property
    def decoder(self) -> str:
        return self.request.decode.kind

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    def __enter__(self) -> Self:
        if not self._tally.under_way:
            self._tally.flow.rest(self.started)
        self._parts = dict(self._tally.flow.parts)
        self._tally.under_way.append(self)
        return self

    def take(self, piece: Piece) -> None:
        """Count one step's tokens."""
        num_tokens = len(piece.tokens)
        if num_tokens:
            tally = self._tally
            if not self._first_at:
                self._first_at = piece.at
                tally.prompt_tokens += self.num_prompt
                num_later = num_tokens - 1
            else:
                num_later = num_tokens
            if num_later:
                gap_s = (piece.at - self._last_at) / 1e9 / num_tokens if self._last_at else 0.0
                tally.histograms["inter_token_latency_seconds"].observe(gap_s, num_later)
            self._last_at = piece.at
            self._num_pieces += 1
            self.num_generated += num_tokens
            tally.generation_tokens += num_tokens
            tally.rates.add(piece.at // 1_000_000_000, num_tokens)
        if piece.finish_reason is not None:
            self._last = piece

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tally = self._tally
        tally.under_way.remove(self)
        if self._last is None and isinstance(error, _REFUSALS) and not self.num_generated:
            tally.refuse(error)
            reason = "refused"
        else:
            reason = self._reason(error)
            tally.finished[reason] += 1
        ended = self._ended(reason, str(error) if isinstance(error, BrigadeError) else "")
        if reason != "refused":
            self._observe(ended)
        tally.recent.append(ended)
        tally.on_end(ended)

    def _reason(self, error: BaseException | None) -> str:
        if self._last is not None and self._last.finish_reason is not None:
            return self._last.finish_reason
        return "error" if isinstance(error, Exception) else "abort"

    def _ended(self, reason: str, why: str) -> Ended:
        now = time.monotonic_ns()
        usage = self._last.usage if self._last else None
        before, parts = self._parts, self._tally.flow.parts
        return Ended(
            id=self.id,
            decoder=self.decoder,
            num_prompt=self.num_prompt,
            num_generated=self.num_generated,
            num_steps=usage.num_steps if usage else self._num_pieces,
            finish_reason=reason,
            why=why,
            ended_at=time.time(),
            total_s=(now - self.started) / 1e9,
            first_token_s=(self._first_at - self.started) / 1e9 if self._first_at else None,
            queue_s=max(0, usage.begun - self.started) / 1e9 if usage and usage.begun else None,
            num_recoveries=usage.num_recoveries if usage else 0,
            num_reused=min(usage.num_reused, self.num_prompt) if usage else 0,
            parts_ms={part: (value - before[part]) / 1e6 for part, value in parts.items()},
        )

    def _observe(self, ended: Ended) -> None:
        tally, observe = self._tally, self._tally.histograms
        tally.decoder_tokens[ended.decoder] += ended.num_generated
        tally.decoder_steps[ended.decoder] += ended.num_steps
        observe["e2e_request_latency_seconds"].observe(ended.total_s)
        observe["request_prompt_tokens"].observe(ended.num_prompt)
        observe["request_generation_tokens"].observe(ended.num_generated)
        if ended.first_token_s is not None:
            observe["time_to_first_token_seconds"].observe(ended.first_token_s)
        if ended.queue_s is None or ended.first_token_s is None:
            return
        tally.prefix_queries += ended.num_prompt
        tally.prefix_hits += ended.num_reused
        observe["request_queue_time_seconds"].observe(ended.queue_s)
        observe["request_prefill_time_seconds"].observe(max(0.0, ended.first_token_s - ended.queue_s))
        observe["request_decode_time_seconds"].observe((self._last_at - self._first_at) / 1e9)


def _histograms() -> dict[str, Histogram]:
    seconds = (
        "time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time",
        "request_prefill_time", "request_decode_time", "recovery",
    )  # fmt: skip
    tokens = ("request_prompt_tokens", "request_generation_tokens")
    return {f"{name}_seconds": Histogram(SECONDS) for name in seconds} | {name: Histogram(TOKENS) for name in tokens}
