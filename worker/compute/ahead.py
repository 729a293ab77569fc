"""Steps that are built or launched before their frames arrive.

After a step with one token for each of some slots, the next step usually has one more token for each. If another frame
arrives instead, the step is undone, and the caches are restored.
Shapes: B slots, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from protos.brigade_pb2 import Cache, Frame, Window
from worker.compute.batching import LaneWindow
from worker.compute.sampling import Draws
from worker.compute.shard import Shard
from worker.compute.slot import Slot
from worker.memory.slot_caches import move_apart, shared_by
from worker.model.describe import DTYPES

SlotsById = Mapping[int, Slot]


@dataclass(frozen=True)
class StepOutputs:
    """A step's unevaluated outputs, with draws and logits on the last stage only."""

    h: mx.array  # [1, B, D]
    draws: Mapping[int, Draws]  # for slots whose draws need only logits
    logits: Mapping[int, mx.array]  # [1, V] for each other slot
    tokens: mx.array | None = None  # [B], if all slots were drawn at once

    def evaluate(self) -> None:
        drawn = [array for draws in self.draws.values() for array in draws.arrays()]
        mx.async_eval([self.h, *(drawn if self.tokens is None else [self.tokens])])

    def tokens_of(self, slots: SlotsById) -> mx.array:
        """Return the tokens [B] drawn for these slots, in the step's order."""
        if self.tokens is not None and self.tokens.size == len(slots):
            return self.tokens
        return mx.concatenate([self.draws[number].tokens for number in slots])


class Built:
    """A step's graph on placeholders, which is evaluated once its frame arrives."""

    launched = None  # it starts with its frame
    following = None  # no step can be launched on top of it

    def __init__(self, shard: Shard, slots: SlotsById, dtype: mx.Dtype) -> None:
        B, D = len(slots), shard.row_size
        self.slots = slots
        self._hidden = None if shard.is_first else Placeholder([1, B, D], dtype)
        self._ids = Placeholder([1, B], mx.int32)
        self._before: list[Any] | None = [slot.caches.saved() for slot in slots.values()]
        bases = {number: len(slot.history) for number, slot in slots.items()}
        self.outputs = _outputs(shard, slots, bases, (self._hidden or self._ids).array, self._ids.array)

    def is_of(self, frame: Frame) -> bool:
        in_order = [window.slot for window in frame.windows] == list(self.slots)
        return in_order and _slots_besides(frame).isdisjoint(self.slots) and _add_one_token(frame.windows, self.slots)

    def begin(self, windows: Sequence[Window], payload: Sequence[memoryview]) -> None:
        """Fill in the hidden states and the token ids, and evaluate."""
        self._before = None  # drop the only other reference to the buffers, so that MLX writes in place
        if self._hidden:
            self._hidden.fill(payload)
        self._ids.fill_numbers(window.tokens[0] for window in windows)
        self.outputs.evaluate()

    def drop(self, numbers: Set[int]) -> None:
        """Undo the step. `numbers` are all of its slots, since a frame takes either all of them or none."""
        assert self._before is not None and numbers == self.slots.keys()
        for slot, before in zip(self.slots.values(), self._before, strict=True):
            slot.caches.restore(before)


class Launched:
    """A step of the whole model on tokens that are still on the device, computed before its frame arrives.

    The caller evaluates its outputs before building anything else. If other tokens arrive, they overwrite its rows, so
    only recurrent states are saved to undo it.
    """

    def __init__(self, shard: Shard, slots: SlotsById, bases: Mapping[int, int], tokens: mx.array) -> None:
        """Build the step.

        Args:
            bases: the length of each slot before this step.
            tokens: the tokens [B] just drawn, one per slot.
        """
        self.slots = dict(slots)
        self.launched = time.monotonic_ns()
        self.following: Launched | None = None  # the step launched on top of this one
        self._shard, self._bases = shard, bases
        self._fed, self._numbers = tokens, {number: row for row, number in enumerate(slots)}
        self._before = {
            number: [(state, state.saved()) for state in slot.caches.states] for number, slot in slots.items()
        }
        ids = tokens.astype(mx.int32)[None]
        self.outputs = _outputs(shard, slots, bases, ids, ids)

    def launch_on_top(self, most: int) -> Launched | None:
        """Launch a step on top of the last one here, if all caches have room and fewer than `most` are launched."""
        if most == 1:
            return None
        if self.following:
            return self.following.launch_on_top(most - 1)
        if all(slot.caches.has_room for slot in self.slots.values()):
            bases = {number: self._bases[number] + 1 for number in self.slots}
            self.following = Launched(self._shard, self.slots, bases, self.outputs.tokens_of(self.slots))
        return self.following

    def is_of(self, frame: Frame) -> bool:
        """Return whether this frame asks for this step, with all or some of its slots."""
        numbers = {window.slot for window in frame.windows}
        is_alone = _slots_besides(frame).isdisjoint(numbers)
        if not (numbers and numbers <= self.slots.keys() and is_alone and _add_one_token(frame.windows, self.slots)):
            return False
        fed: list[int] = self._fed.tolist()  # type: ignore[assignment]
        return all(window.tokens[0] == fed[self._numbers[window.slot]] for window in frame.windows)

    def begin(self, windows: Sequence[Window], payload: Sequence[memoryview]) -> None:
        """Do nothing: the step is already launched."""

    def drop(self, numbers: Set[int]) -> None:
        """Undo the step for these slots, and first the steps launched on top of it."""
        if self.following:
            self.following.drop(numbers & self.following.slots.keys())
        shared = shared_by([self.slots[number].caches for number in numbers])
        for number in numbers:
            slot = self.slots.pop(number)
            for state, before in self._before.pop(number):
                state.restore(before)
            slot.caches.cut(self._bases[number])
        for each in shared:
            each.thin_out()


Ready = Built | Launched


class StepsAhead:
    """The steps that are ready: at most one per slot, and those launched on top of it."""

    def __init__(self, shard: Shard, dtype: mx.Dtype) -> None:
        self._shard = shard
        self._dtype = dtype
        self.ready: list[Ready] = []

    def build(self, slots: SlotsById) -> None:
        """Build the step that feeds each of these slots one more token, unless one of them has a step ready."""
        if all(each.slots.keys().isdisjoint(slots) for each in self.ready) and self._can_build:
            # while the step waits for its input, slots outside it could not use buffers that they share with it
            move_apart([slot.caches for slot in slots.values()])
            self.ready.append(Built(self._shard, slots, self._dtype))

    @cached_property
    def _can_build(self) -> bool:
        return can_fill_later(self._shard.row_size) and not looks_at_numbers(self._shard, self._dtype)

    def launch(self, slots: SlotsById, tokens: Mapping[int, mx.array], most: int) -> StepOutputs | None:
        """Launch the step that feeds these tokens [1], or one on top of it if it exists, up to `most` steps.

        Only for a shard that is the whole model. Launches nothing unless all caches have room.

        Returns:
            The outputs to evaluate, or None if no step was launched.
        """
        first = next((each for each in self.ready if not each.slots.keys().isdisjoint(slots)), None)
        if first is None:
            if not all(slot.caches.has_room for slot in slots.values()):
                return None
            bases = {number: len(slot.history) for number, slot in slots.items()}
            self.ready.append(Launched(self._shard, slots, bases, mx.concatenate([tokens[n] for n in slots])))
            return self.ready[-1].outputs
        following = first.launch_on_top(most) if isinstance(first, Launched) else None
        return following.outputs if following else None

    def take(self, frame: Frame) -> Ready | None:
        """Return this frame's step if it is ready; undo the steps that the frame contradicts."""
        found = next((each for each in self.ready if each.is_of(frame)), None)
        asked = {window.slot for window in frame.windows}
        touched = asked | _slots_besides(frame)
        wrong = [each for each in self.ready if each is not found and not touched.isdisjoint(each.slots)]
        for each in wrong:
            each.drop(set(each.slots))
        self.ready = [each for each in self.ready if each is not found and each not in wrong]
        if found:
            if left_out := found.slots.keys() - asked:
                found.drop(left_out)
            self.ready += [found.following] if found.following and found.following.slots else []
        return found

    def undo(self) -> None:
        """Undo all steps."""
        for each in self.ready:
            each.drop(set(each.slots))
        self.ready.clear()

    def clear(self) -> None:
        """Forget all steps: their slots are about to close."""
        self.ready.clear()


def looks_at_numbers(shard: Shard, dtype: mx.Dtype) -> bool:
    """Return whether the forward reads computed values and so cannot be built ahead, like mlx-lm's dbrx.

    MLX refuses such reads while it traces a function. Where it traces none, as on a CPU without a C++ compiler, any
    forward may be one.
    """
    ids = mx.zeros((1, 1), mx.int32)
    x = ids if shard.is_first else mx.zeros((1, 1, shard.row_size), dtype)
    place = LaneWindow(shard.make_caches(Cache()), 0, 1)

    def is_refused(function: Callable[[mx.array, mx.array], Any]) -> bool:
        try:
            mx.compile(function)(x, ids)
        except (RuntimeError, ValueError):
            return True
        return False

    return is_refused(lambda x, ids: shard(x, [place], ids)) or not is_refused(lambda x, ids: ids.tolist())


def is_one_token(window: Window) -> bool:
    """Return whether the window feeds one token and asks only for the next one."""
    plain = len(window.tokens) == 1 == window.wanted and not (window.masks or window.canvas or window.to_draft)
    return plain and not (window.positions or window.targets or window.pooled)


def _outputs(shard: Shard, slots: SlotsById, bases: Mapping[int, int], x: mx.array, ids: mx.array) -> StepOutputs:
    """Build the step that feeds each slot one token at its base."""
    h = shard(x, [slot.next_place(bases[number]) for number, slot in slots.items()], ids)
    if not shard.is_last:
        return StepOutputs(h, {}, {})
    logits = shard.logits(h)
    samplers = [slot.sampler for slot in slots.values()]
    kinds = {sampler.kind for sampler in samplers}
    able = [number for number, slot in slots.items() if slot.can_draw_ahead]
    if len(kinds) == 1 and None not in kinds and len(able) == len(slots):
        draws = samplers[0].draw(logits, [each.seed for each in samplers], [bases[number] + 1 for number in slots])
        return StepOutputs(h, dict(zip(slots, draws.rows(), strict=True)), {}, draws.tokens)
    rows = dict(zip(slots, logits.split(len(slots)), strict=True))
    drawn = {number: slots[number].draw_ahead(bases[number], rows.pop(number)) for number in able}
    return StepOutputs(h, drawn, rows)


def _add_one_token(windows: Sequence[Window], slots: SlotsById) -> bool:
    """Return whether each window adds one token after all tokens of its slot."""
    histories = [slots[window.slot].history for window in windows]
    return all(
        is_one_token(window) and window.base == len(held) and window.prefix_hash == held.prefix_hash(len(held))
        for window, held in zip(windows, histories, strict=True)
    )


def _slots_besides(frame: Frame) -> set[int]:
    """Return the slots that the frame opens, closes, forks or stores."""
    opened = {session.slot for session in frame.opened}
    forked = {session.fork_of for session in frame.opened if session.HasField("fork_of")}
    return opened | forked | set(frame.closed) | {store.slot for store in frame.stores}


class Placeholder:
    """An input of a graph that is filled after the graph was built: Python writes into the array's memory."""

    def __init__(self, shape: Iterable[int], dtype: mx.Dtype) -> None:
        shape = tuple(shape)
        raw = mx.array(np.empty(prod(shape) * dtype.size, np.uint8))
        self._memory = memoryview(raw)  # type: ignore[arg-type]
        self.array = raw.view(dtype).reshape(shape)

    def fill(self, pieces: Iterable[memoryview | bytes]) -> None:
        """Write the array's bytes, given as consecutive pieces."""
        at = 0
        for piece in pieces:
            self._memory[at : at + len(piece)] = piece
            at += len(piece)

    def fill_numbers(self, numbers: Iterable[int]) -> None:
        """Write token ids, as int32."""
        self.fill([np.array(list(numbers), np.int32).tobytes()])


def received_array(frame: Frame, payload: Sequence[memoryview]) -> mx.array | None:
    """Return the hidden states of a frame, whose bytes are copied once; None if it has none."""
    if frame.hidden.dtype not in DTYPES:
        return None
    received = Placeholder(frame.hidden.shape, DTYPES[frame.hidden.dtype])
    received.fill(payload)
    return received.array


@cache
def can_fill_later(num_ids: int) -> bool:
    """Return whether this device sees values that are written after a graph was built.

    `num_ids` is the size to try, since small arrays may be stored differently.
    """
    tried = Placeholder([num_ids], mx.int32)
    found = tried.array * 2 + 1
    tried.fill_numbers(range(num_ids))
    mx.async_eval(found)
    return found.tolist() == list(range(1, 2 * num_ids, 2))
