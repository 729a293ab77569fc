"""Engine: one stage's model work, a frame in, a frame or a result out. Runs on the MLX thread; knows no sockets."""

import time
from collections.abc import Sequence

import mlx.core as mx

from protos.brigade_pb2 import DType, Frame, Result, Session, Timing, Window
from worker.cache import LayerCache
from worker.errors import CacheMismatch, FrameError
from worker.history import History
from worker.sampling import Draws, Sampler
from worker.shard import Shard
from worker.wire import dtype_name, from_array, to_array


class Slot:
    """A session's row on this stage: its tokens, its caches and, on the last stage, its sampler."""

    def __init__(self, caches: Sequence[LayerCache], session: Session) -> None:
        self.caches = caches
        self.history = History()
        self.sampler = Sampler(session.sampling)

    def begin(self, window: Window) -> None:
        """Cut to the window's base and take its tokens.

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


class Engine:
    """The slots of one stage and its shard."""

    def __init__(self, shard: Shard, stage: int, dtype: DType) -> None:
        self._shard = shard
        self._stage = stage
        self._dtype = dtype
        self._slots: dict[int, Slot] = {}

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
        """Run one frame through this stage.

        Args:
            frame: as the previous stage sent it; its `hidden` is [1, sum L, D], absent on the first stage.
            received: when it arrived, nanoseconds on this node's monotonic clock.
        Returns:
            The frame for the next stage, or on the last stage the result; `sent` is still open in its last timing.
        Raises:
            FrameError: the hidden states are not of the expected shape and dtype, or a slot is not open.
            CacheMismatch: a slot does not hold the prefix that its window continues.
        """
        timing = Timing(stage=self._stage, received=received, started=time.monotonic_ns())
        for number in frame.closed:
            self._slots.pop(number, None)
        for session in frame.opened:
            self._slots[session.slot] = Slot(self._shard.make_caches(session.cache), session)
        outputs = [self._run(window, x) for window, x in zip(frame.windows, self._inputs(frame), strict=True)]
        return self._sample(frame, outputs, timing) if self._shard.is_last else self._pass_on(frame, outputs, timing)

    def _inputs(self, frame: Frame) -> list[mx.array]:
        """Each window's token ids [1, L] or hidden states [1, L, D]."""
        for window in frame.windows:
            _check(window, frame.step)
        if self._shard.is_first:
            return [self._ids(window) for window in frame.windows]
        if not frame.windows:
            return []
        lengths = [num_rows(window) for window in frame.windows]
        expected = [1, sum(lengths), self._shard.args.hidden_size], self._dtype
        found = list(frame.hidden.shape), frame.hidden.dtype
        if found != expected:
            raise FrameError(
                f"expected hidden {expected[0]} {dtype_name(expected[1])} from stage {self._stage - 1}, "
                f"got {found[0]} {dtype_name(found[1])} (step {frame.step})"
            )
        hidden = to_array(frame.hidden)
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        return [hidden[:, end - L : end] for end, L in zip(ends, lengths, strict=True)]

    def _ids(self, window: Window) -> mx.array:
        mask = self._shard.mask_token or 0  # a model without a MASK token is only ever given padding
        return mx.array([[*window.tokens, *[mask] * window.masks]], mx.int32)

    def _run(self, window: Window, x: mx.array) -> mx.array:
        slot = self._slots.get(window.slot)
        if slot is None:
            raise FrameError(f"slot {window.slot} is not open")
        slot.begin(window)
        positions = mx.array(list(window.positions), mx.int32) if window.positions else None
        return self._shard(x, slot.caches, positions)

    def _pass_on(self, frame: Frame, outputs: list[mx.array], timing: Timing) -> Frame:
        mx.eval(outputs)
        timing.computed = timing.sampled = time.monotonic_ns()
        passed = Frame(epoch=frame.epoch, step=frame.step, closed=frame.closed, opened=frame.opened)
        passed.windows.extend(frame.windows)
        if outputs:
            passed.hidden.CopyFrom(from_array(outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)))
        passed.timings.extend([*frame.timings, timing])
        return passed

    def _sample(self, frame: Frame, outputs: list[mx.array], timing: Timing) -> Result:
        windows = list(zip(frame.windows, outputs, strict=True))
        # a prompt chunk's rows end in the caches: what the last layer makes of them is never computed
        asked = [(window, h) for window, h in windows if window.wanted or window.guessed]
        ready = [h for _, h in asked]
        ready += [array for w, _ in windows if not (w.wanted or w.guessed) for array in self._cached(w)]
        mx.async_eval(ready)  # the device works while the sampling graph is built
        draws = [(window, self._draw(window, h)) for window, h in asked]
        mx.async_eval([array for _, draw in draws for array in draw.arrays()])
        mx.eval(ready)
        timing.computed = time.monotonic_ns()
        result = Result(epoch=frame.epoch, step=frame.step)
        for window, draw in draws:
            samples = draw.to_samples(window.slot)
            result.samples.extend(samples[: window.wanted])
            result.guesses.extend(samples[window.wanted :])
        timing.sampled = time.monotonic_ns()
        result.timings.extend([*frame.timings, timing])
        return result

    def _cached(self, window: Window) -> list[mx.array]:
        return [array for cache in self._slots[window.slot].caches for array in cache.arrays()]

    def _draw(self, window: Window, h: mx.array) -> Draws:
        """A token for each wanted and each guessed row, in that order; other rows never reach the head."""
        slot, num_tokens = self._slots[window.slot], len(window.tokens)
        first, end = num_tokens - window.wanted, num_tokens + window.guessed
        at = window.positions or range(window.base, window.base + end)
        # a token row tells what comes next, a MASK row what stands in its own place
        positions = [at[row] + (row < num_tokens) for row in range(first, end)]
        known = [window.base + min(row + 1, num_tokens) for row in range(first, end)]
        logits = self._shard.logits(h[:, first:end])
        # verified guesses need no entropy: only a window that fills goes by it
        return slot.sampler(logits, positions, slot.history.tokens, known, entropy=window.wanted == 0)


def num_rows(window: Window) -> int:
    """A window's length: its tokens and its MASK rows."""
    return len(window.tokens) + window.masks


def _check(window: Window, step: int) -> None:
    """Raise FrameError unless the window's numbers fit together."""
    found = f"in the window of slot {window.slot} (step {step})"
    if len(window.tokens) < max(1, window.wanted):
        raise FrameError(f"expected at least {max(1, window.wanted)} tokens, got {len(window.tokens)} {found}")
    if window.guessed > window.masks:
        raise FrameError(f"expected at most {window.masks} guesses, as many as MASK rows, got {window.guessed} {found}")
    if len(window.positions) not in (0, num_rows(window)):
        raise FrameError(f"expected {num_rows(window)} positions or none, got {len(window.positions)} {found}")
