"""Frames in flight, the time that each may take, and suspend detection, so that no worker is blamed for our sleep."""

import asyncio
import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from coordinator.cluster.peer import Peer
from coordinator.planning.costs import ChainCosts
from protos.brigade_pb2 import Frame, Opening, Result, Sampling
from worker.compute.header import Asked, num_rows
from worker.errors import StageLost
from worker.model.model_spec import MOST_DRAFTS
from worker.platform.machine import SleepWatch, asleep_s

_TICK_S = 0.25
_STILL_S = 3.5  # a later tick: this process was suspended; peers drop a silent node as late
_RECENT_S = 30.0  # an error so soon after a standstill is a consequence of it


class SuspendWatch:
    """Notes when this process did not run: the machine slept, or the process was stopped.

    Python's monotonic clock stands still while a machine sleeps, so that time is added.
    """

    def __init__(self) -> None:
        self.woke_at = 0.0  # seconds, monotonic: when it last ran again after a standstill
        self._still_s = 0.0  # the length of that standstill
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
        """Return the cause of an error that occurs now if this process stood still lately, else None."""
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


SILENCE_S = 6.0  # that a step may take beyond its own time
_NOISE = 1.5  # factor on the usual time of a step: machines get warm, and do other work
FIRST_S = 60.0  # for the first step of a kind, which may compile kernels and page weights in

StepKind = frozenset[Hashable]  # the properties of a step that decide which kernels it needs


class StepTimeouts:
    """The kinds of steps that one chain has done, and the time that each kind may take."""

    def __init__(self) -> None:
        self._done: set[Hashable] = set()
        self._traits: dict[int, StepKind] = {}  # of the session in each slot

    def kind_of(self, frame: Frame) -> StepKind:
        """Return the frame's kind: its sizes by powers of two, and the caches and samplers of its sessions."""
        rows = sum(map(num_rows, frame.windows))
        drafts = max((window.to_draft for window in frame.windows), default=0)
        kind: set[Hashable] = {("rows", rows.bit_length()), ("windows", len(frame.windows).bit_length())}
        kind |= {("drafts", drafts.bit_length())} if drafts else set()
        kind |= {("conditioning", window.conditioning) for window in frame.windows if window.canvas}
        for window in frame.windows:
            asked = (window.wanted + window.guessed).bit_length()
            kind |= {(asked, trait) for trait in self._traits.get(window.slot, ())}
        return frozenset(kind) if rows else frozenset()

    def open(self, frame: Frame) -> None:
        """Note the sessions that a frame opens."""
        for session in frame.opened:
            self._traits[session.slot] = _traits(session)

    def done(self, kind: StepKind) -> None:
        """Note that a step of this kind came back."""
        self._done |= kind

    def is_known(self, kind: StepKind) -> bool:
        """Whether every property of this kind has been seen in a step that came back."""
        return kind <= self._done

    def allowed_s(self, kind: StepKind, usual_s: float) -> float:
        """Return the seconds without a result after which a step of this kind and usual time is overdue."""
        allowed_s = SILENCE_S + _NOISE * usual_s
        return allowed_s if self.is_known(kind) else max(FIRST_S, allowed_s)


_SAMPLERS = [field.name for field in Sampling.DESCRIPTOR.fields if field.name != "seed"]


def _traits(session: Opening) -> StepKind:
    """Return the kind of the session's cache, and every part of the sampler that it uses."""
    used = [name for name in _SAMPLERS if getattr(session.sampling, name)]
    used += ["drafted"] if session.drafted else []
    return frozenset([("cache", session.cache.kind), "sampler", *used])


ASK_AGAIN_S = 1.0  # less than any of the limits
COMPILES_S = 2.0  # beyond its usual time, after which the first step of a kind is reported to compile


@dataclass
class Sent:
    """A frame in flight."""

    num_rows: int
    length: int  # tokens of the longest slot with these rows
    asked: Asked
    kind: StepKind
    at: float  # seconds, monotonic
    is_alone: bool  # so far
    num_drafts: int = 0  # that its largest window asks for
    num_read: int = 0  # tokens whose rows the stages read from their disks
    num_drafting: int = 0  # windows that ask for drafts


@dataclass(frozen=True)
class ArrivedResult:
    """A result, its time of arrival, nanoseconds on the coordinator's monotonic clock, and its frame."""

    result: Result
    at: int
    sent: Sent

    @property
    def took_s(self) -> float:
        """Seconds since the frame was sent."""
        return self.at / 1e9 - self.sent.at


@dataclass(frozen=True)
class Awaited:
    """The oldest frame in flight, published for the main loop, which watches it."""

    step: int
    since: float  # seconds, monotonic: when it was sent, or became the oldest
    allowed_s: float  # how long it may take, and any engine that it waits for
    compiles_s: float | None  # after which the first frame of a kind is reported to compile; None for others


class Flight:
    """Frames in flight, oldest first. Only the oldest can be late: the others wait behind it.

    `send`, `take` and `learn` are for the loop of the chain's results; the rest only reads what they publish.
    """

    def __init__(self, costs: ChainCosts, suspends: SuspendWatch, peers: Sequence[Peer] = ()) -> None:
        """`costs` learn from each result; `suspends` knows when this process did not run; frames pass the `peers`."""
        self.costs = costs
        self.peers = peers
        self.awaited: Awaited | None = None
        self._suspends = suspends
        self._timeouts = StepTimeouts()
        self._sent: dict[int, Sent] = {}  # by step
        self._last_result = time.monotonic()  # seconds; before the first result, when this began
        self._moved_at = 0.0  # seconds, monotonic: when an engine was last known to begin a step
        self._compiling_step = -1  # reported to compile
        self._caches: dict[int, int] = {}  # the kind of the cache in each slot
        self._logprobs: dict[int, int] = {}  # of the session in each slot, as its sampling says

    def open(self, frame: Frame) -> None:
        """Note the sessions that a frame opens, of any flight of the chain: frames of this one may go on with them."""
        self._timeouts.open(frame)
        self._caches |= {session.slot: session.cache.kind for session in frame.opened}
        self._logprobs |= {session.slot: session.sampling.logprobs for session in frame.opened}

    def send(self, frame: Frame) -> None:
        """Note that the frame, which was opened, is on its way."""
        for sent in self._sent.values():
            sent.is_alone = False
        drafts = [window.to_draft for window in frame.windows if window.to_draft]
        self._sent[frame.step] = Sent(
            num_rows=sum(map(num_rows, frame.windows)),
            length=max((window.base + num_rows(window) for window in frame.windows), default=0),
            asked=Asked.of(frame, self._logprobs),
            kind=self._timeouts.kind_of(frame),
            at=time.monotonic(),
            is_alone=not self._sent,
            num_drafts=max(drafts, default=0),
            num_drafting=len(drafts),
            num_read=sum(len(window.tokens) for window in frame.windows if window.stored),
        )
        if self.awaited is None:
            self._publish()

    @property
    def oldest_step(self) -> int | None:
        return next(iter(self._sent), None)

    def take(self, step: int) -> Sent:
        """Remove and return the frame of this step."""
        return self._sent.pop(step)

    def learn(self, arrival: ArrivedResult) -> None:
        """Learn from the times of a checked result. It can wait until the next frame is on its way."""
        sent, slots = arrival.sent, list(arrival.sent.asked.answers)
        self._timeouts.done(sent.kind)
        self._last_result = arrival.at / 1e9
        stages_s = [(timing.sampled - timing.started) / 1e9 for timing in arrival.result.timings]
        if sent.num_read and not arrival.result.failures:
            self.costs.observe_read(sent.num_read, sum(stages_s))
        if sent.num_rows:
            drafting_ns = sum(max(0, timing.drafted - timing.sampled) for timing in arrival.result.timings)
            drafting_s = min(drafting_ns / 1e9, arrival.took_s)
            lost_s = 0.0
            if sent.num_drafts and sent.is_alone and sent.num_rows == len(slots) and self.costs.steps.is_known:
                lost_s = max(0.0, arrival.took_s - drafting_s - self.costs.steps.seconds(sent.num_rows))
                self.costs.drafting.observe_start(sent.num_rows, lost_s)
            # else a chain that drafts would take its steps without drafts for slow, and never try them again
            beside_s = drafting_s + lost_s
            self.costs.observe(sent.num_rows, stages_s, arrival.took_s, beside_s, was_alone=sent.is_alone)
            for scratch, timing in zip(self.costs.scratch, arrival.result.timings, strict=True):
                if timing.scratch_bytes and len(slots) == 1:
                    scratch.observe(self._caches[slots[0]], sent.num_rows, sent.length, timing.scratch_bytes)
            if sent.num_drafts and sent.num_rows <= (1 + MOST_DRAFTS) * sent.num_drafting:  # else it read a prompt
                self.costs.drafting.observe(sent.num_drafts, sent.num_drafting, drafting_s)
        self._publish()

    def _publish(self) -> None:
        if not self._sent:
            self.awaited = None
            return
        step, sent = next(iter(self._sent.items()))
        drafting_s = self.costs.drafting.seconds(sent.num_drafts, sent.num_drafting)
        usual_s = self.costs.passage_s(sent.num_rows) + drafting_s
        allowed_s = self._timeouts.allowed_s(sent.kind, usual_s)
        compiles_s = None if self._timeouts.is_known(sent.kind) else usual_s * _NOISE + COMPILES_S
        self.awaited = Awaited(step, max(self._last_result, sent.at), allowed_s, compiles_s)

    @property
    def still_since(self) -> float | None:
        """Since when the frames in flight have brought no result, seconds, monotonic; None without any."""
        awaited = self.awaited
        return awaited.since if awaited else None

    @property
    def idle_s(self) -> float:
        """For how long nothing has been in flight, seconds."""
        return 0.0 if self.awaited else time.monotonic() - self._last_result

    @property
    def left_s(self) -> float:
        """Seconds until the oldest frame needs a look; without frames, until this should be read again."""
        if (awaited := self.awaited) is None:
            return ASK_AGAIN_S
        return max(0.0, self._compiles_s(awaited, awaited.allowed_s) - self._silence_s(awaited))

    def overdue(self) -> tuple[float, float] | None:
        """Return for how long the oldest frame is silent, once that is longer than it may be, and how long it may."""
        awaited = self.awaited
        if awaited is None or (silence_s := self._silence_s(awaited)) < awaited.allowed_s:
            return None
        return silence_s, awaited.allowed_s

    def began(self, busy_s: float) -> None:
        """Note that an engine began a step so long ago: silence counts from then, for each engine has its own time."""
        self._moved_at = time.monotonic() - busy_s

    def begins_to_compile(self) -> bool:
        """Whether the oldest frame is slow enough to be compiling; True once for each frame."""
        awaited = self.awaited
        if awaited is None or self._silence_s(awaited) < self._compiles_s(awaited, math.inf):
            return False
        self._compiling_step = awaited.step
        return True

    def _compiles_s(self, awaited: Awaited, otherwise_s: float) -> float:
        """Return after how long the oldest frame is to be reported to compile, or `otherwise_s` if it is not."""
        if awaited.compiles_s is None or awaited.step == self._compiling_step:
            return otherwise_s
        return awaited.compiles_s

    def _silence_s(self, awaited: Awaited) -> float:
        """For how long the oldest frame has brought no result while this process was there to receive it."""
        return time.monotonic() - max(awaited.since, self._moved_at, self._suspends.woke_at)
