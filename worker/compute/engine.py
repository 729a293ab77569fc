"""Engine: one stage's model work, a frame in, a frame or a result out. Runs on the MLX thread; knows no sockets."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import mlx.core as mx

from protos.brigade_pb2 import DType, Frame, Result, Sampling, Session, Timing, Window
from worker.compute.sampling import Draws, Sampler
from worker.compute.shard import Shard
from worker.compute.tensors import dtype_name, from_array, to_array
from worker.errors import CacheMismatch, FrameError
from worker.memory.cache import LayerCache
from worker.memory.history import History
from worker.memory.lane import Place

_SHORT_BEGIN = 0.5
_WEIGHT = 0.2  # of a new observation


class Slot:
    """A session's row on this stage: its tokens, its caches and, on the last stage, its sampler."""

    def __init__(self, caches: Sequence[LayerCache], history: History, sampling: Sampling) -> None:
        self.caches = caches
        self.history = history
        self.sampler = Sampler(sampling)

    def fork(self, length: int, sampling: Sampling) -> "Slot":
        """Another slot that goes on from the first `length` tokens. Raises CacheMismatch if that cannot be."""
        return Slot([cache.fork(length) for cache in self.caches], self.history.fork(length), sampling)

    def close(self) -> None:
        for cache in self.caches:
            cache.close()

    def begin(self, window: Window) -> Place:
        """Cut to the window's base and take its tokens; returns where its rows go.

        Raises:
            CacheMismatch: the slot does not hold the prefix that the window continues.
        """
        base, held = window.base, len(self.history)
        if base > held or self.history.prefix_hash(base) != window.prefix_hash:
            found = f"only {held} tokens" if base > held else "another prefix"
            raise CacheMismatch(f"slot {window.slot} was to continue at {base} tokens but holds {found}")
        self.history.cut(base)
        for cache in self.caches:
            cache.cut(base)
        self.history.extend(window.tokens)
        positions = mx.array(list(window.positions), mx.int32) if window.positions else None
        return Place(self.caches, base, num_rows(window), positions)


@dataclass
class Step:
    """A frame that the device is at: when `ready` is evaluated its layers are done, then come its draws."""

    frame: Frame
    timing: Timing
    begun: int = 0  # when `begin` returned, nanoseconds
    ready: list[mx.array] = field(default_factory=list)
    draws: list[tuple[Window, Draws]] = field(default_factory=list)


class Engine:
    """The slots of one stage and its shard.

    `begin` starts a frame on the device, `finish` waits for it. Where it `runs_ahead` the next frame should begin
    between the two, so that the device has work while graphs are built and results are copied out.
    """

    def __init__(self, shard: Shard, stage: int, dtype: DType) -> None:
        self._shard = shard
        self._stage = stage
        self._dtype = dtype
        self._slots: dict[int, Slot] = {}
        self._idle_since = 0  # when the device had done all that it was given, nanoseconds
        self._begin_share = 1.0  # of a step's time that `begin` takes

    @property
    def runs_ahead(self) -> bool:
        """Whether the device is at a step long after `begin` has returned: then the next one can begin meanwhile.

        Elsewhere (on a CPU `async_eval` computes before it returns) that would only delay the result.
        """
        return self._begin_share < _SHORT_BEGIN

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def weight_bytes(self) -> int:
        return self._shard.nbytes

    @property
    def cache_bytes(self) -> int:
        slots = list(self._slots.values())  # asked from another thread: a step may open or close slots meanwhile
        return sum(cache.nbytes for slot in slots for cache in slot.caches)

    def step(self, frame: Frame, received: int) -> Frame | Result:
        """`begin` and `finish` in one."""
        return self.finish(self.begin(frame, received))

    def begin(self, frame: Frame, received: int) -> Step:
        """Start one frame on the device.

        Args:
            frame: as the previous stage sent it; its `hidden` is [1, sum L, D], absent on the first stage.
            received: when it arrived, nanoseconds on this node's monotonic clock.
        Raises:
            FrameError: the hidden states are not of the expected shape and dtype, or a slot is not open.
            CacheMismatch: a slot does not hold the prefix that its window continues.
        """
        step = Step(frame, Timing(stage=self._stage, received=received, started=time.monotonic_ns()))
        self._open_and_close(frame)
        _check_windows(frame)
        self._check_hidden(frame)
        if not frame.windows:
            return step
        places = [self._slot(window).begin(window) for window in frame.windows]
        h = self._shard(self._input(frame), places)
        if self._shard.is_last:
            self._begin_sampling(step, h)
        else:
            step.ready = [h]
            mx.async_eval(h)
        step.begun = time.monotonic_ns()
        return step

    def finish(self, step: Step) -> Frame | Result:
        """Wait for a step that has begun: steps end in the order in which they began.

        Returns:
            The frame for the next stage, or on the last stage the result; `sent` is still open in its last timing.
        """
        mx.eval(step.ready)
        step.timing.computed = time.monotonic_ns()
        if step.begun:
            share = (step.begun - step.timing.started) / (step.timing.computed - step.timing.started)
            self._begin_share += _WEIGHT * (share - self._begin_share)
        step.timing.started = max(step.timing.started, self._idle_since)  # until then the device was at another step
        output = self._result(step) if self._shard.is_last else self._passed_on(step)
        step.timing.sampled = time.monotonic_ns() if self._shard.is_last else step.timing.computed
        self._idle_since = step.timing.sampled
        output.timings.extend([*step.frame.timings, step.timing])
        return output

    def _open_and_close(self, frame: Frame) -> None:
        bases = {window.slot: window.base for window in frame.windows}
        forks = {s.slot: self._fork(s, bases.get(s.slot, 0)) for s in frame.opened if s.HasField("fork_of")}
        for number in frame.closed:
            if slot := self._slots.pop(number, None):
                slot.close()
        for session in frame.opened:
            fresh = forks.get(session.slot) or self._make_slot(session)
            if replaced := self._slots.get(session.slot):
                replaced.close()
            self._slots[session.slot] = fresh

    def _make_slot(self, session: Session) -> Slot:
        return Slot(self._shard.make_caches(session.cache), History(), session.sampling)

    def _fork(self, session: Session, length: int) -> Slot:
        source = self._slots.get(session.fork_of)
        if source is None:
            raise FrameError(f"slot {session.fork_of}, to be copied to slot {session.slot}, is not open")
        if length > (held := len(source.history)):
            raise CacheMismatch(f"slot {session.fork_of}, of which {length} tokens are to be copied, holds only {held}")
        return source.fork(length, session.sampling)

    def _slot(self, window: Window) -> Slot:
        if window.slot not in self._slots:
            raise FrameError(f"slot {window.slot} is not open")
        return self._slots[window.slot]

    def _check_hidden(self, frame: Frame) -> None:
        """Raise FrameError unless the frame brings a hidden state for every row, where it has to bring any."""
        if self._shard.is_first or not frame.windows:
            return
        expected = [1, sum(map(num_rows, frame.windows)), self._shard.args.hidden_size], self._dtype
        found = list(frame.hidden.shape), frame.hidden.dtype
        if found != expected:
            raise FrameError(
                f"expected hidden {expected[0]} {dtype_name(expected[1])} from stage {self._stage - 1}, "
                f"got {found[0]} {dtype_name(found[1])} (step {frame.step})"
            )

    def _input(self, frame: Frame) -> mx.array:
        """The token ids [1, sum L] of all windows or their hidden states [1, sum L, D]."""
        if not self._shard.is_first:
            return to_array(frame.hidden)
        mask = self._shard.mask_token or 0  # a model without a MASK token is only ever given padding
        return mx.array([[id for w in frame.windows for id in (*w.tokens, *[mask] * w.masks)]], mx.int32)

    def _begin_sampling(self, step: Step, h: mx.array) -> None:
        """Choose a token for every row that is asked about; no other row reaches the head."""
        windows = step.frame.windows
        firsts = list(accumulate(map(num_rows, windows), initial=0))[:-1]
        asked = [window for window in windows if _asked_rows(window)]
        rows = [row for window, first in zip(windows, firsts, strict=True) for row in _asked_rows(window, first)]
        # A prompt chunk's rows end in the caches, the last layer's of which depend on all others; what the last layer
        # makes of them is never computed.
        chunks = [self._slots[window.slot] for window in windows if not _asked_rows(window)]
        step.ready = [array for slot in chunks for array in slot.caches[-1].arrays()]
        if asked:
            step.ready.append(h if len(rows) == h.shape[1] else h[:, mx.array(rows)])
        mx.async_eval(step.ready)  # the device works while the sampling graph is built
        if asked:
            counts = [len(_asked_rows(window)) for window in asked]
            logits = self._shard.logits(step.ready[-1]).split(tuple(accumulate(counts[:-1])))
            step.draws = [(window, self._draw(window, own)) for window, own in zip(asked, logits, strict=True)]
            mx.async_eval([array for _, draws in step.draws for array in draws.arrays()])

    def _draw(self, window: Window, logits: mx.array) -> Draws:
        """A token for each wanted and each guessed row of a window, in that order, by their logits [N, V]."""
        slot, num_tokens = self._slots[window.slot], len(window.tokens)
        rows = _asked_rows(window)
        at = window.positions or range(window.base, window.base + num_rows(window))
        # a token row tells what comes next, a MASK row what stands in its own place
        positions = [at[row] + (row < num_tokens) for row in rows]
        known = [window.base + min(row + 1, num_tokens) for row in rows]
        # verified guesses need no entropy: only a window that fills goes by it
        return slot.sampler(logits, positions, slot.history.tokens, known, entropy=window.wanted == 0)

    def _passed_on(self, step: Step) -> Frame:
        frame = step.frame
        passed = Frame(epoch=frame.epoch, step=frame.step, closed=frame.closed, opened=frame.opened)
        passed.windows.extend(frame.windows)
        if frame.windows:
            passed.hidden.CopyFrom(from_array(step.ready[0]))
        return passed

    def _result(self, step: Step) -> Result:
        result = Result(epoch=step.frame.epoch, step=step.frame.step)
        for window, draws in step.draws:
            samples = draws.to_samples(window.slot)
            result.samples.extend(samples[: window.wanted])
            result.guesses.extend(samples[window.wanted :])
        return result


def _asked_rows(window: Window, first: int = 0) -> range:
    """The rows that the last stage samples, wanted ones before guessed ones, if the window begins at row `first`."""
    num_tokens = len(window.tokens)
    return range(first + num_tokens - window.wanted, first + num_tokens + window.guessed)


def num_rows(window: Window) -> int:
    """A window's length: its tokens and its MASK rows."""
    return len(window.tokens) + window.masks


def _check_windows(frame: Frame) -> None:
    """Raise FrameError unless every window's numbers fit together and each has a slot of its own."""
    slots = [window.slot for window in frame.windows]
    if len(set(slots)) < len(slots):
        raise FrameError(f"expected one window per slot, got slots {slots} (step {frame.step})")
    for window in frame.windows:
        _check(window, frame.step)


def _check(window: Window, step: int) -> None:
    found = f"in the window of slot {window.slot} (step {step})"
    if len(window.tokens) < max(1, window.wanted):
        raise FrameError(f"expected at least {max(1, window.wanted)} tokens, got {len(window.tokens)} {found}")
    if window.guessed > window.masks:
        raise FrameError(f"expected at most {window.masks} guesses, as many as MASK rows, got {window.guessed} {found}")
    if len(window.positions) not in (0, num_rows(window)):
        raise FrameError(f"expected {num_rows(window)} positions or none, got {len(window.positions)} {found}")
