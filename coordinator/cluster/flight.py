"""Frames in flight, how long they may take, and suspend detection: no worker is blamed for this machine's sleep."""

import asyncio
import time
from dataclasses import dataclass
from typing import NoReturn

from coordinator.planning.costs import ChainCosts
from coordinator.planning.step_timeout import StepKind, StepTimeouts
from protos.brigade_pb2 import Frame, Result
from worker.compute.header import asked_of, num_rows
from worker.errors import StageLost
from worker.platform.machine import SleepWatch, asleep_s

_TICK_S = 0.25
_STILL_S = 3.5  # late by so much: asleep or stopped, not busy; other nodes wait as long before they give one up
_RECENT_S = 30.0  # what breaks so soon after it broke because of it


class SuspendWatch:
    """Notes when this process did not run: the machine slept, or the process was stopped.

    Python's monotonic clock stands still while a machine sleeps, so that time is added.
    """

    def __init__(self) -> None:
        self.woke_at = 0.0  # seconds, monotonic: when it last ran again after that
        self._still_s = 0.0  # how long it had stood still then
        self._last = time.monotonic() + asleep_s()
        self._sleep = SleepWatch(asleep_s())

    async def watch(self) -> NoReturn:
        """Look at the clocks until cancelled. Raises StageLost once the machine has slept: its peers did not wait."""
        while True:
            self._look()
            if self._sleep.look(asleep_s()) and (error := self.blame()):
                raise error
            await asyncio.sleep(_TICK_S)

    def blame(self) -> StageLost | None:
        """The error that whatever broke now comes from, if this process stood still lately."""
        self._look()
        if not self.woke_at or time.monotonic() - self.woke_at > _RECENT_S:
            return None
        return StageLost(
            f"this process stood still for {self._still_s:.0f} s (the machine slept, or it was stopped), and the other "
            "nodes gave it up; keep it awake (a Mac whose lid is closed is not)"
        )

    def _look(self) -> None:
        now = time.monotonic()
        passed_s, self._last = now + asleep_s() - self._last, now + asleep_s()
        if passed_s > _TICK_S + _STILL_S:
            self.woke_at, self._still_s = now, passed_s


_ASK_AGAIN_S = 5.0
_COMPILES_S = 2.0  # after which the first step of a kind is said to compile


@dataclass
class Sent:
    """A frame in flight."""

    num_rows: int
    asked: dict[int, tuple[int, ...]]  # by slot, as `asked_of` counts
    kind: StepKind
    at: float  # seconds, monotonic
    is_alone: bool  # so far
    alternatives: dict[int, int]  # by slot: the most that each sample may have
    is_said_to_compile: bool = False


@dataclass(frozen=True)
class ArrivedResult:
    """A result, and when it came, nanoseconds on the coordinator's monotonic clock."""

    result: Result
    at: int
    num_rows: int  # of the frame
    took_s: float  # since the frame was sent


class Flight:
    """Frames in flight, oldest first. Only the oldest can be late: the others wait behind it."""

    def __init__(self, costs: ChainCosts, suspends: SuspendWatch) -> None:
        """`costs` learn from what lands; `suspends` knows when this process was not there to see it."""
        self.costs = costs
        self._suspends = suspends
        self._timeouts = StepTimeouts()
        self._sent: dict[int, Sent] = {}  # by step
        self._last_result = time.monotonic()  # seconds; until there is one, when this began
        self._moved_at = 0.0  # seconds, monotonic: when an engine was last known to begin a step
        self._logprobs: dict[int, int] = {}  # of the session in each slot, as its sampling says

    def send(self, frame: Frame) -> None:
        """The frame is on its way from now on."""
        for sent in self._sent.values():
            sent.is_alone = False
        kind = self._timeouts.kind_of(frame)
        rows, asked = sum(map(num_rows, frame.windows)), {w.slot: asked_of(w) for w in frame.windows}
        self._logprobs |= {session.slot: session.sampling.logprobs for session in frame.opened}
        alternatives = {slot: logprobs - 1 for slot in asked if (logprobs := self._logprobs.get(slot))}
        self._sent[frame.step] = Sent(rows, asked, kind, time.monotonic(), not self._sent, alternatives)

    @property
    def oldest_step(self) -> int | None:
        return next(iter(self._sent), None)

    def take(self, step: int) -> Sent:
        """What was sent at this step; it is in flight no more."""
        return self._sent.pop(step)

    def land(self, sent: Sent, result: Result) -> ArrivedResult:
        """This is the result, and it is sound."""
        self._timeouts.done(sent.kind)
        self._last_result = time.monotonic()
        arrival = ArrivedResult(result, time.monotonic_ns(), sent.num_rows, self._last_result - sent.at)
        if sent.num_rows:
            stages_s = [(timing.sampled - timing.started) / 1e9 for timing in result.timings]
            self.costs.observe(sent.num_rows, stages_s, arrival.took_s, was_alone=sent.is_alone)
        return arrival

    @property
    def still_since(self) -> float | None:
        """Since when what is in flight has brought no result, seconds, monotonic; None if nothing is."""
        return max(self._last_result, self._oldest().at) if self._sent else None

    @property
    def idle_s(self) -> float:
        """For how long nothing has been in flight, seconds."""
        return 0.0 if self._sent else time.monotonic() - self._last_result

    @property
    def left_s(self) -> float:
        """Seconds until the oldest frame is to be looked after; with nothing in flight, until it is asked again."""
        if not self._sent:
            return _ASK_AGAIN_S
        oldest = self._oldest()
        due_s = _COMPILES_S if self._may_compile(oldest) else self._allowed_s(oldest)
        return max(0.0, due_s - self._silence_s(oldest))

    @property
    def overdue_s(self) -> float | None:
        """How long the oldest has not been heard of, once that is longer than it can take."""
        if not self._sent:
            return None
        oldest = self._oldest()
        silence_s = self._silence_s(oldest)
        return silence_s if silence_s >= self._allowed_s(oldest) else None

    @property
    def allowed_s(self) -> float:
        """How long the oldest may take, and any engine that it waits for."""
        return self._allowed_s(self._oldest())

    def began(self, busy_s: float) -> None:
        """An engine began a step so long ago: silence counts from then, since it has its own time for that."""
        self._moved_at = time.monotonic() - busy_s

    def begins_to_compile(self) -> bool:
        """Whether the oldest takes so long that it seems to compile; true once for each."""
        if not self._sent or not self._may_compile(self._oldest()) or self._silence_s(self._oldest()) < _COMPILES_S:
            return False
        self._oldest().is_said_to_compile = True
        return True

    def _oldest(self) -> Sent:
        return next(iter(self._sent.values()))

    def _may_compile(self, sent: Sent) -> bool:
        """Whether it may, and nobody has been told."""
        return not self._timeouts.is_known(sent.kind) and not sent.is_said_to_compile

    def _allowed_s(self, sent: Sent) -> float:
        return self._timeouts.allowed_s(sent.kind, self.costs.passage_s(sent.num_rows))

    def _silence_s(self, sent: Sent) -> float:
        """How long this frame, the oldest, has not been heard of while this process was there to hear."""
        return time.monotonic() - max(self._last_result, sent.at, self._moved_at, self._suspends.woke_at)
