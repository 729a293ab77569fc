"""Executor: runs one stage's shard on the MLX thread, from a frame to the next stage's frame or a result.

Shapes: B slots, L window length, D hidden, V vocabulary, N rows with logits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import mlx.core as mx
import numpy as np

from protos.brigade_pb2 import (
    CONDITIONING_EXACT,
    CONDITIONING_TOP,
    DType,
    Frame,
    Piece,
    Result,
    Store,
    Timing,
    Window,
)
from worker.compute.ahead import Ready, StepOutputs, StepsAhead, is_one_token, received_array
from worker.compute.batching import LaneWindow
from worker.compute.drafting import Drafter, DraftRequest, add_drafts
from worker.compute.header import NUM_CANDIDATES, asked_rows, check_header, is_chunk, num_rows
from worker.compute.sampling import Draws
from worker.compute.shard import Shard
from worker.compute.slot import Slot
from worker.compute.slots import close_slots, open_and_close
from worker.compute.step import Step, head_blocks, rows_of, share_of_begin
from worker.errors import BrigadeError, CacheMismatch, FrameError, ModelError, PrefixLost, SamplingError
from worker.memory.slot_caches import CacheSegment
from worker.model.describe import DTYPES
from worker.model.model_spec import most_head_rows
from worker.model.quantisation import MISFITS
from worker.platform.mlx_memory import begin_step_peak, raise_late_errors

_log = logging.getLogger(__name__)

_SHORT_BEGIN = 0.5  # the share of a step's time below which `begin` counts as short
SHORT_STEP_NS = 20_000_000
_COUNT_NS = 1_000_000_000  # between two counts of cache bytes while no slot opens, closes or grows
_CHUNK = 32  # rows of a window whose memory is measured
_LONG_PROMPT = 2048  # rows: the buffers that shorter ones leave to the next frames are few
_SCORED_ROWS = 128  # whose logits exist at the same time
MESSAGE_BYTES = 1 << 22  # of segments: each message takes milliseconds of both event loops
_WEIGHT = 0.2  # of a new observation in the running mean


class Pieces(Protocol):
    """Pieces of prefixes on disk, by their names."""

    def read(self, name: bytes, upcoming: Sequence[bytes]) -> Sequence[CacheSegment]:
        """Return what the caches hold in this piece, and begin to read others. Raises PrefixLost if it is not there."""

    def discard(self, name: bytes) -> None:
        """Remove a piece that does not fit the caches."""

    def put(self, piece: Piece, segments: Sequence[CacheSegment]) -> bool:
        """Have a piece written behind the steps; return whether it will be."""

    def close(self) -> None:
        """Take no more pieces; those that wait are still written."""


class Executor:
    """One stage's shard and slots.

    `begin` starts a frame on the device and `finish` waits for it. If the device `runs_ahead`, begin the next frame
    between the two, so that the device has work while graphs are built and results are copied out.
    """

    def __init__(
        self,
        shard: Shard,
        stage: int,
        dtype: DType,
        node: str = "",
        *,
        checks_finite: bool = False,
        prompt_end: int | None = None,
        returns_segments: bool = False,
        returns_rows: bool = False,
        pieces: Pieces | None = None,
        slots: dict[int, Slot] | None = None,
        drafter: Drafter | None = None,
        drafter_bytes: int = 0,
        drop_drafter: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            node: this worker's name, which failures carry; empty on the coordinator.
            checks_finite: whether a window fails if its output holds NaN or infinities, before another stage sees it.
            prompt_end: of the layers that this stage runs for frames that do not stay, though it holds all; None: all
                frames pass all of its layers.
            returns_segments: whether the coordinator gets what prompt chunks leave in the caches.
            returns_rows: whether its draft head gets their rows behind the last layer.
            pieces: of prefixes on this node's disk; None if nothing is kept there.
            slots: by number, those that an executor of the same shard and dtype left; it may leave its own there.
            drafter: of the last stage.
            drafter_bytes: of the weights that this stage holds for drafting.
            drop_drafter: frees those weights, if the drafter fails.
        """
        self._shard = shard
        self._stage = stage
        self._dtype = dtype
        self._node = node
        self._checks_finite = checks_finite
        self._prompt_end = prompt_end
        self.returns_segments = returns_segments
        self._returns_rows = returns_rows and shard.is_last
        self._pieces = pieces
        self._drafter = drafter
        self._drop_drafter = drop_drafter
        self._drafter_failure = ""  # that the next result tells
        self.weight_bytes = shard.nbytes + drafter_bytes
        self._slots: dict[int, Slot] = {} if slots is None else slots
        self.cache_bytes = 0  # between two steps, counted now and then; other threads read it
        self._counted_at = 0  # nanoseconds
        self._idle_since = 0  # when the device last ran out of work, nanoseconds
        self._begin_share = 1.0  # the share of a step's time that `begin` takes
        self._step_ns = 0  # the last step's time
        self.ahead = StepsAhead(shard, DTYPES[dtype])
        self._in_flight: list[Step] = []  # begun and not finished, oldest first
        self._last_windows: Sequence[Window] = ()  # of the last finished step, until the next one is built or begins

    @property
    def is_whole(self) -> bool:
        """Whether this stage is the whole model."""
        return self._shard.is_first and self._shard.is_last

    @property
    def runs_ahead(self) -> bool:
        """Whether `begin` returns long before the device is done, so that the next step can begin meanwhile.

        On a CPU `async_eval` computes before it returns, and some GPUs are done before the next step has begun:
        beginning it would only delay the result.
        """
        return self._begin_share < _SHORT_BEGIN

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def close(self, *, leaves_slots: bool = False) -> None:
        """Free all slots, or leave them as after the last step that began, if this stage is the whole model."""
        self._in_flight.clear()
        if leaves_slots and self.is_whole:
            self.ahead.undo()
        else:
            self.ahead.clear()
            close_slots(self._slots)
        self._slots = {}  # from now on those left are the next executor's
        self.cache_bytes = 0
        if self._pieces:
            self._pieces.close()

    def check(self, frame: Frame) -> None:
        """Raise FrameError unless this header is valid for this stage. Any thread may call it."""
        check_header(frame, self._stage, self._shard.row_size, self._dtype)
        if not self._shard.refines and any(window.conditioning for window in frame.windows):
            raise FrameError(f"expected no conditioning of a model whose decided places stay (step {frame.step})")

    def step(self, frame: Frame, received: int) -> Frame | Result:
        """Begin and finish a frame, for a shard that is the whole model."""
        output, _ = self.finish(self.begin(frame, (), received, time.monotonic_ns()))
        return output

    def build_ahead(self) -> bool:
        """Build the graph of the step that likely follows the last finished one, so that `begin` only evaluates it.

        Do so while waiting for the device or for a frame. Return whether there was one to build.
        """
        slots, self._last_windows = self._slots_to_continue(self._last_windows), ()
        if slots:
            self.ahead.build(slots)
        return bool(slots)

    def launch_ahead(self, step: Step, *, is_finished: bool) -> StepOutputs | None:
        """Single node only: launch the next step before this step's tokens reach Python.

        Launches at most two steps ahead of the last finished one; one if steps are long, since a new session would
        have to wait for both.

        Returns:
            The outputs to evaluate at once, or None if no step was launched.
        """
        if not (is_finished or self.runs_ahead or step.was_launched):
            return None  # deliver the result first
        slots = self._slots_to_continue(step.windows)
        tokens = {window.slot: draws.tokens for window, draws in step.draws}
        if not self.is_whole or not slots or slots.keys() != tokens.keys():
            return None
        if not all(slot.can_draw_ahead for slot in slots.values()):
            return None
        return self.ahead.launch(slots, tokens, most=2 if is_finished and self._step_ns < SHORT_STEP_NS else 1)

    def _slots_to_continue(self, windows: Sequence[Window]) -> dict[int, Slot]:
        """Return a step's slots if each of them most likely gets one more token; else none."""
        if self._checks_finite or not all(window.slot in self._slots and is_one_token(window) for window in windows):
            return {}
        return {window.slot: self._slots[window.slot] for window in windows}

    def begin(self, frame: Frame, payload: Sequence[memoryview], received: int, taken: int) -> Step:
        """Start one frame on the device.

        Args:
            frame: a header that passed `check`.
            payload: its hidden states [1, sum L, D], as consecutive bytes; none on the first stage and without windows.
            received, taken: when the frame arrived and left the queue, nanoseconds on this node's monotonic clock.
        Raises:
            FrameError: a slot is not open.
        """
        goes_on = not self._shard.is_last or (self._prompt_end is not None and not frame.stays)
        timing = Timing(stage=self._stage, received=received, taken=taken, started=time.monotonic_ns())
        step = Step(frame, goes_on, timing, self._node)
        ready = self.ahead.take(frame)
        if {window.slot for window in self._last_windows} & {window.slot for window in frame.windows}:
            self._last_windows = ()  # this is the step that follows
        open_and_close(
            *(self._slots, step, self._shard), has_drafter=self._drafter is not None, returns_rows=self._returns_rows
        )
        if ready:
            self._begin_ready(step, ready, payload)
        elif places := self._begin_windows(step):
            self._begin_layers(step, places, received_array(frame, payload))
        for store in frame.stores:
            self._begin_store(step, store)
        if self._shows_drafter(step):
            step.slots = {window.slot: self._slots[window.slot] for window in step.windows}
            step.has_drafting = any(window.to_draft or is_chunk(window) for window in step.windows)
        if step.windows and not step.was_launched:
            step.begun = time.monotonic_ns()
        self._in_flight.append(step)
        return step

    def _begin_layers(self, step: Step, places: Sequence[LaneWindow], x: mx.array | None) -> None:
        """Start the stage's layers, and on the last stage what samples from them."""
        self._begin_peak(step)
        mask = self._shard.mask_token or 0  # without a MASK token these rows are padding
        fed = [[token for w in step.windows for token in (*w.tokens, *w.canvas, *[mask] * w.masks)]]
        ids = mx.array(fed, mx.int32)  # [1, sum L]
        soft = self._soft_rows(step.windows) if x is None else None
        rows = ids if x is None else rows_of(step.windows, step.frame.windows, x)
        step.rows = h = self._shard(rows, places, ids, soft, None if step.frame.stays else self._prompt_end)
        if self._checks_finite:
            hidden = h[..., : self._shard.info.hidden_size]  # wrong features of a drafter make bad drafts only
            step.checks = [(w.slot, mx.isfinite(rows_of([w], step.windows, hidden)).all()) for w in step.windows]
        held = [array for w in step.windows for array in self._slots[w.slot].caches.state_arrays()]
        held += [a for w in step.windows if w.snapshots for a in self._slots[w.slot].caches.take_snapshot()]
        states = list({id(array): array for array in held}.values())  # slots may share them
        if self.returns_segments:
            step.segments = list(self._segments(step))
            states += [array for _, segments in step.segments for each in segments for array in each.arrays]
        if not step.goes_on:
            self._begin_sampling(step, h, states)
        else:
            step.pending = [h, *states]
            mx.async_eval(step.pending)

    def _begin_peak(self, step: Step) -> None:
        """Measure the memory that the step takes if it is a prompt chunk alone, and no other step's any more."""
        for other in self._in_flight:  # MLX knows one peak, that of all steps together
            other.held_bytes = None
        if not self._in_flight and len(step.windows) == 1 and _is_measured(step.windows[0]):
            step.held_bytes = begin_step_peak()

    def _shows_drafter(self, step: Step) -> bool:
        """Return whether a drafter reads the step: of prompts that pass this stage only tokens, no rows."""
        if step.goes_on:
            reads = self._drafter is not None and not self._drafter.reads_rows
            return reads and any(self._slots[window.slot].is_drafted for window in step.windows)
        return any(window.to_draft or self._slots[window.slot].is_drafted for window in step.windows)

    def _soft_rows(self, windows: Sequence[Window]) -> mx.array | None:
        """Take what the step before made of canvases out of the windows: [1, sum L, D], zeros elsewhere."""
        if not any(window.HasField("soft") for window in windows):
            return None
        dtype, D = DTYPES[self._dtype], self._shard.info.hidden_size
        parts = []
        for window in windows:
            count = len(window.canvas) if window.HasField("soft") else 0
            parts.append(mx.zeros((num_rows(window) - count, D), dtype))
            if count:
                rows = mx.array(np.frombuffer(window.soft.rows, np.uint8))
                if window.soft.conditioning == CONDITIONING_TOP:
                    ids = mx.array(np.frombuffer(window.soft.ids, np.uint32)).reshape(count, -1)
                    parts.append(self._shard.mix(ids, rows.view(mx.float16).reshape(count, -1)))
                else:
                    parts.append(rows.view(dtype).reshape(count, D))
            window.ClearField("soft")  # no other stage takes it
        return mx.concatenate(parts)[None]

    def finish(self, step: Step) -> tuple[Frame | Result, mx.array | None]:
        """Wait for a step. Steps finish in the order in which they began.

        Returns:
            The next stage's header and hidden states [1, sum L, D] (None without windows); on the last stage the
            result and None. The caller sets `sent` of the last timing.
        """
        waits_since = time.monotonic_ns()
        self._in_flight.remove(step)
        mx.eval(step.pending)
        self._note_computed(step, waits_since, time.monotonic_ns())
        raise_late_errors(waits=step.to_store is not None)  # a piece would be wrong for good
        if step.checks:
            self._fail_infinite(step)
        if step.to_store is not None and self._pieces:
            store = step.frame.stores[0]
            if not self._pieces.put(store.piece, step.to_store):
                step.fail(store.slot, PrefixLost("its disk is too slow, or takes nothing more"))
        output = step.next_frame() if step.goes_on else step.result()
        step.timing.sampled = step.timing.computed if step.goes_on else time.monotonic_ns()
        step.timing.drafted = step.timing.sampled
        if step.slots and step.rows is not None:
            self._add_drafts(step, step.rows, output if isinstance(output, Result) else Result())
            step.timing.drafted = time.monotonic_ns() if step.has_drafting else step.timing.sampled
        self._idle_since = step.timing.drafted
        if step.changes_bytes or step.timing.drafted > self._counted_at + _COUNT_NS:
            self.cache_bytes = sum(slot.nbytes for slot in self._slots.values())
            self._counted_at = step.timing.drafted
        if isinstance(output, Result):
            output.drafter_failure, self._drafter_failure = self._drafter_failure, ""
        output.timings.extend([*step.frame.timings, step.timing])
        output.failures.extend([*step.frame.failures, *step.failures])
        failed = {failure.slot for failure in step.failures}
        self._last_windows = [window for window in step.windows if window.slot not in failed]
        if step.ends_long_prompt:
            mx.clear_cache()  # decoding would never use these buffers
        return output, step.pending[0] if step.goes_on and any(map(num_rows, step.windows)) else None

    def _note_computed(self, step: Step, waits_since: int, evaluated: int) -> None:
        """Note what a step took: memory of its own, and time without that of the steps before it."""
        if step.held_bytes is not None:
            step.timing.scratch_bytes = max(0, mx.get_peak_memory() - step.held_bytes)
        step.timing.computed = step.computed or evaluated
        if step.begun:
            share = share_of_begin(step.timing.started, step.begun, waits_since, evaluated)
            self._begin_share += _WEIGHT * (share - self._begin_share)
        at_another = max(0, min(self._idle_since, step.timing.computed) - step.timing.started)
        step.timing.started += at_another
        step.timing.taken += at_another
        self._step_ns = step.timing.computed - step.timing.started

    def _segments(self, step: Step) -> Iterator[tuple[int, list[CacheSegment]]]:
        """Yield by slot, a message at a time, what a step leaves in the caches of this stage."""
        for window in step.windows:
            together: list[CacheSegment] = []
            num_bytes = 0
            for each in self._segments_of(window, step):
                size = sum(array.nbytes for array in each.arrays)
                if together and num_bytes + size > MESSAGE_BYTES:
                    yield window.slot, together
                    together, num_bytes = [], 0
                together.append(_copied(each))
                num_bytes += size
            if together:
                yield window.slot, together

    def _segments_of(self, window: Window, step: Step) -> Iterator[CacheSegment]:
        slot, begin, end = self._slots[window.slot], window.base, window.base + num_rows(window)
        yield from slot.caches.segments(begin, end, MESSAGE_BYTES)
        if slot.returns_rows and step.rows is not None:
            rows = rows_of([window], step.windows, step.rows)
            most = max(1, MESSAGE_BYTES * (end - begin) // rows.nbytes)
            for at in range(0, end - begin, most):
                yield CacheSegment(0, 0, begin + at, (rows[:, at : at + most],), (), is_output=True)

    def put_segments(self, number: int, segments: Iterable[CacheSegment]) -> None:
        """Take what another stage made of a prompt chunk of this slot, unless it has been closed.

        Raises:
            CacheMismatch: one fits no cache, or is no output of the model's last layer.
        """
        if slot := self._slots.get(number):
            held: list[mx.array] = []
            for each in segments:
                if each.is_output:
                    self._show_rows(slot, each)
                else:
                    held += slot.caches.put_segment(each)
            mx.async_eval(held)

    def _show_rows(self, slot: Slot, segment: CacheSegment) -> None:
        """Show the drafter rows of a prompt chunk that another stage computed."""
        size, dtype = self._shard.row_size, DTYPES[self._dtype]
        if [(array.shape[:1] + array.shape[2:], array.dtype) for array in segment.arrays] != [((1, size), dtype)]:
            found = [(list(array.shape), array.dtype) for array in segment.arrays]
            raise CacheMismatch(f"expected rows [1, L, {size}] of {dtype}, got {found}")
        [rows] = segment.arrays
        end = segment.base + rows.shape[1]
        if end > len(slot.history):
            raise CacheMismatch(f"expected rows of the {len(slot.history)} tokens held, got those up to {end}")
        if slot.is_drafted and self._drafter:
            tokens = slot.history.tokens[segment.base : end]
            request = DraftRequest(
                slot, segment.base, tokens, count=0, is_chunk=True, rows=rows, first_row=0, num_rows=len(tokens)
            )
            try:
                self._drafter.draft([request])
            except (*MISFITS, BrigadeError) as error:
                self._lose_drafter(error, [])

    def _begin_store(self, step: Step, store: Store) -> None:
        """Copy a piece of a prefix out of a slot's caches, to be written to disk."""
        slot, piece = self._slots.get(store.slot), store.piece
        try:
            held = len(slot.history) if slot else 0
            if slot is None or held < piece.end or slot.history.prefix_hash(piece.end) != store.prefix_hash:
                raise CacheMismatch(f"slot {store.slot} does not hold the {piece.end} tokens that are to be stored")
            step.to_store = [*map(_copied, slot.caches.stored(piece.begin, piece.end))]
        except CacheMismatch as error:
            step.fail(store.slot, error)
            return
        step.pending = [array for segment in step.to_store for array in segment.arrays]
        mx.async_eval(step.pending)

    def _restore(self, step: Step, window: Window) -> None:
        """Read a window's rows from disk. Raises PrefixLost if they are not there, CacheMismatch as `Slot.begin`."""
        if self._pieces is None:
            raise PrefixLost("expected a node that keeps prefixes on its disk")
        segments = self._pieces.read(window.stored, window.upcoming)
        try:
            step.pending += self._slots[window.slot].restore(window, segments)
        except PrefixLost:
            self._pieces.discard(window.stored)
            raise
        mx.async_eval(step.pending)

    def _add_drafts(self, step: Step, rows: mx.array, output: Result) -> None:
        """Add the drafts to a result. A drafter that fails is dropped: drafts change no token."""
        try:
            add_drafts(self._drafter, step.windows, step.slots, rows, output)
        except (*MISFITS, BrigadeError) as error:
            self._lose_drafter(error, step.slots.values())
            add_drafts(None, step.windows, step.slots, rows, output)

    def _lose_drafter(self, error: Exception, slots: Iterable[Slot]) -> None:
        """Free the drafter and what it holds of all slots, of these closed ones too; tell the coordinator."""
        self._drafter_failure = f"{type(error).__name__}: {error}"
        _log.error("the drafter failed; the chain goes on without drafts: %s", self._drafter_failure)
        self._drafter = None
        self.weight_bytes = self._shard.nbytes
        self._drop_drafter()
        for slot in [*self._slots.values(), *slots]:
            slot.is_drafted = False
            if slot.drafting:
                slot.drafting.close()
                slot.drafting = None

    def _begin_windows(self, step: Step) -> list[LaneWindow]:
        """Cut each window's slot to its base. A window whose slot cannot take it fails and goes no further."""
        failed = {failure.slot for failure in step.failures}
        places = []
        for window in step.frame.windows:
            if window.slot not in self._slots:
                raise FrameError(f"slot {window.slot} is not open")
            if window.slot in failed:
                continue
            slot = self._slots[window.slot]
            step.ends_long_prompt |= bool(asked_rows(window)) and slot.num_unasked >= _LONG_PROMPT
            try:
                if window.stored:
                    self._restore(step, window)
                else:
                    places.append(slot.begin(window))
                step.windows.append(window)
            except CacheMismatch as error:
                step.fail(window.slot, error)
        return places

    def _begin_ready(self, step: Step, ready: Ready, payload: Sequence[memoryview]) -> None:
        """Continue a step that was built or launched before its frame arrived."""
        step.windows.extend(step.frame.windows)
        ready.begin(step.windows, payload)
        if ready.launched is not None:
            step.was_launched = True
            step.timing.started = step.timing.taken = ready.launched
        outputs = ready.outputs
        step.pending, step.rows = [outputs.h], outputs.h
        step.draws = [(window, outputs.draws[window.slot]) for window in step.windows if window.slot in outputs.draws]
        for window in step.windows:
            self._slots[window.slot].history.extend(window.tokens)
            if window.slot in outputs.logits:
                self._begin_draws(step, window, outputs.logits[window.slot])
        if outputs.logits:
            mx.async_eval([array for _, draws in step.draws for array in draws.arrays()])

    def _begin_sampling(self, step: Step, h: mx.array, states: Sequence[mx.array]) -> None:
        """Sample a token for every asked row of h [1, sum L, D], and score the targets; the head sees no other row."""
        windows = list(zip(step.windows, accumulate(map(num_rows, step.windows), initial=0), strict=False))
        # A prompt chunk only has to reach the caches: the last layer's depends on all others, and what follows it is
        # never computed.
        chunks = [self._slots[w.slot] for w in step.windows if not (asked_rows(w) or w.targets or w.pooled)]
        step.pending = [array for slot in chunks for array in slot.caches.arrays()]
        step.pending += states
        if len(chunks) < len(windows):
            step.pending.append(h)
        mx.async_eval(step.pending)  # the device works while the sampling graph is built
        for window, first in windows:
            if window.targets:
                begin = first + len(window.tokens) - window.wanted - len(window.targets)
                self._score(step, window, h[:, begin:])
            if window.pooled:
                end = first + len(window.tokens)
                self._pool(step, window, h[:, end - window.pooled : end])
        self._begin_head(step, windows, h)

    def _begin_head(self, step: Step, windows: Sequence[tuple[Window, int]], h: mx.array) -> None:
        """Draw from the logits of h [1, sum L, D] at the asked rows, a block at a time.

        Args:
            windows: each with its first row.
        """
        blocks = list(head_blocks(windows, most_head_rows(self._shard.info.vocab_size)))
        for block in blocks:
            rows = [row for part in block for row in part.rows]
            logits = self._shard.logits(h if len(rows) == h.shape[1] else h[:, mx.array(rows)])
            counts = accumulate(len(part.rows) for part in block[:-1])
            for part, own in zip(block, logits.split(tuple(counts)), strict=True):
                self._check_logits(step, part.window, own)
                self._begin_draws(step, part.window, own, part.at)
            drawn = [array for _, draws in step.draws for array in draws.arrays()]
            if block is blocks[-1]:
                mx.async_eval(drawn)
            else:  # or the logits of all blocks would exist at the same time
                mx.eval(step.pending)
                step.computed = step.computed or time.monotonic_ns()
                mx.eval(drawn, [is_finite for _, is_finite in step.checks])

    def _conditioned(self, window: Window, logits: mx.array, draws: Draws) -> Draws:
        """Return the draws of canvas rows with what the next step is to know of their logits [N, V]."""
        if window.conditioning == CONDITIONING_EXACT:
            return replace(draws, soft=self._shard.soften(logits))
        if window.conditioning == CONDITIONING_TOP:
            ids = mx.argpartition(-logits, NUM_CANDIDATES - 1, axis=-1)[:, :NUM_CANDIDATES]
            p = mx.softmax(logits, axis=-1, precise=True)
            return replace(draws, soft=mx.take_along_axis(p, ids, axis=-1).astype(mx.float16), candidates=ids)
        return draws

    def _score(self, step: Step, window: Window, h: mx.array) -> None:
        """Score a window's targets from h [1, N or more, D], a block at a time: each row has logits [V]."""
        targets, sampler = list(window.targets), self._slots[window.slot].sampler
        try:
            for at in range(0, len(targets), _SCORED_ROWS):
                block = targets[at : at + _SCORED_ROWS]
                logits = self._shard.logits(h[:, at : at + len(block)])
                self._check_logits(step, window, logits)
                step.scores.append((window, sampler.score(logits, block)))
                mx.eval(step.scores[-1][1].arrays(), [is_finite for _, is_finite in step.checks])
        except FrameError as error:
            step.fail(window.slot, error)

    def _pool(self, step: Step, window: Window, h: mx.array) -> None:
        """Add up the states behind the final norm of h [1, N, D]."""
        try:
            total = self._shard.normed(h).astype(mx.float32).sum(axis=(0, 1))
        except ModelError as error:
            step.fail(window.slot, error)
            return
        mx.async_eval(total)
        step.pooled.append((window, total))

    def _check_logits(self, step: Step, window: Window, logits: mx.array) -> None:
        if self._checks_finite:
            step.checks.append((window.slot, ~mx.isnan(logits).any()))  # some models mask tokens by infinities

    def _begin_draws(self, step: Step, window: Window, logits: mx.array, at: int = 0) -> None:
        """Draw the tokens of one window from the logits [N, V] of its asked rows, of a canvas from `at` on."""
        if at and not (step.draws and step.draws[-1][0] is window):
            return  # the rows before these failed
        logits = logits / window.temperature if window.temperature else logits
        try:
            draws = self._conditioned(window, logits, self._slots[window.slot].draw(window, logits, at))
            if draws.soft is not None:  # the coordinator would take it for a fault of the node, not of the session
                step.checks.append((window.slot, mx.isfinite(draws.soft).all()))
            earlier = [step.draws.pop()[1]] if at else []
            step.draws.append((window, Draws.joined([*earlier, draws])))
        except (FrameError, SamplingError) as error:
            step.draws = [each for each in step.draws if each[0] is not window]
            step.fail(window.slot, error)

    def _fail_infinite(self, step: Step) -> None:
        """Fail the windows whose values are not finite."""
        mx.eval([is_finite for _, is_finite in step.checks])
        bad = {slot for slot, is_finite in step.checks if not is_finite.item()}
        layers = f"layers [{self._shard.start}, {self._shard.end})"
        for slot in bad:
            found = f"made values that are not finite, of slot {slot} (step {step.frame.step})"
            step.fail(slot, FrameError(f"{layers}, stage {self._stage}, {found}"))
        windows = step.windows
        step.windows = [window for window in windows if window.slot not in bad]
        step.draws = [(window, draws) for window, draws in step.draws if window.slot not in bad]
        step.scores = [(window, scores) for window, scores in step.scores if window.slot not in bad]
        step.pooled = [(window, total) for window, total in step.pooled if window.slot not in bad]
        if bad and step.windows and step.rows is not None:
            step.rows = rows_of(step.windows, windows, step.rows)
            if step.goes_on:
                step.pending = [step.rows]
                mx.eval(step.pending)


def _is_measured(window: Window) -> bool:
    """Return whether the memory that the window takes is that of a prompt chunk."""
    is_plain = not (window.masks or window.canvas or window.to_draft or window.targets or window.pooled)
    return is_plain and window.wanted <= 1 and num_rows(window) >= _CHUNK


def _copied(segment: CacheSegment) -> CacheSegment:
    """Return the segment with arrays of its own, since later rows change the buffers."""
    keys, values = (tuple(map(mx.contiguous, parts)) for parts in (segment.keys, segment.values))
    return replace(segment, keys=keys, values=values)
