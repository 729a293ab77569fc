"""Ahead: steps that are built before their frames come.

What most often follows a step that fed each of some slots one token is one more token each. Where something else comes,
the caches go back to what they were, and nothing is left of the step.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from protos.brigade_pb2 import Cache, Frame, Window
from worker.compute.placeholder import Placeholder, can_fill_later
from worker.compute.sampling import Draws
from worker.compute.shard import Shard
from worker.compute.slot import Slot
from worker.memory.lane import Place
from worker.memory.snapshot import Snapshot

Slots = Mapping[int, Slot]  # by number


@dataclass(frozen=True)
class Outputs:
    """What a step makes, not evaluated or on its way; draws and logits on the last stage."""

    h: mx.array  # [1, B, D]
    draws: Mapping[int, Draws]  # of slots whose draws need no more than logits
    logits: Mapping[int, mx.array]  # [1, V] of the other slots
    tokens: mx.array | None = None  # [B], if all were drawn at once

    def evaluate(self) -> None:
        mx.async_eval([self.h, *(array for draws in self.draws.values() for array in draws.arrays())])

    def tokens_of(self, slots: Slots) -> mx.array:
        """What these slots, in the order of the step, have been given [B]."""
        if self.tokens is not None and self.tokens.size == len(slots):
            return self.tokens
        return mx.concatenate([self.draws[number].tokens for number in slots])


class Ready(Protocol):
    """A step that is there before its frame is."""

    outputs: Outputs
    hidden: Placeholder | None  # where its input goes; none on the first stage
    is_under_way: bool

    @property
    def slots(self) -> Slots: ...

    @property
    def following(self) -> "Launched | None":
        """The step upon this one."""

    def is_of(self, frame: Frame) -> bool: ...

    def begin(self, windows: Sequence[Window]) -> None: ...

    def drop(self, numbers: Set[int]) -> None: ...


class Built:
    """A step on placeholders: a graph, of which nothing is computed before its frame comes."""

    is_under_way = False
    following = None

    def __init__(self, shard: Shard, slots: Slots, dtype: mx.Dtype) -> None:
        B, D = len(slots), shard.anatomy.hidden_size
        self.slots = slots
        self.hidden = None if shard.is_first else Placeholder([1, B, D], dtype)
        self._ids = Placeholder([1, B], mx.int32)
        self._before: Snapshot | None = Snapshot(each for slot in slots.values() for each in slot.caches.changing())
        bases = {number: len(slot.history) for number, slot in slots.items()}
        self.outputs = _outputs(shard, slots, bases, (self.hidden or self._ids).array, self._ids.array)

    def is_of(self, frame: Frame) -> bool:
        in_order = [window.slot for window in frame.windows] == list(self.slots)
        return in_order and _slots_besides(frame).isdisjoint(self.slots) and _go_on(frame.windows, self.slots)

    def begin(self, windows: Sequence[Window]) -> None:
        """Have it computed; the hidden states are filled in already."""
        self._before = None  # now nobody else holds the buffers, and they are written in place
        self._ids.fill_numbers(window.tokens[0] for window in windows)
        self.outputs.evaluate()

    def drop(self, numbers: Set[int]) -> None:
        """Undo it; nothing but the frame of all its slots takes it, so none of them is ever left."""
        assert self._before is not None and numbers == self.slots.keys()
        self._before.restore()
        for slot in self.slots.values():
            slot.caches.begin()


class Launched:
    """A step of the whole model on tokens that never leave the device: it is computed before anybody asks for it.

    Whoever makes it evaluates its outputs, before anything else is built. It writes where the next rows go anyway,
    should other tokens come; only states without rows are kept for that.
    """

    is_under_way = True
    hidden: Placeholder | None = None

    def __init__(self, shard: Shard, slots: Slots, bases: Mapping[int, int], tokens: mx.array) -> None:
        """`tokens` [B]: what each slot has just been given, and what follows `bases` tokens in it."""
        self.slots = dict(slots)
        self.following: Launched | None = None
        self._shard, self._bases = shard, bases
        self._fed, self._numbers = tokens, {number: row for row, number in enumerate(slots)}
        self._before = {number: Snapshot(slot.caches.states) for number, slot in slots.items()}
        ids = tokens.astype(mx.int32)[None]
        self.outputs = _outputs(shard, slots, bases, ids, ids)

    def go_on(self, most: int) -> "Launched | None":
        """A step upon the last of this chain of steps, unless they are as many as that or a cache has no room."""
        if most == 1:
            return None
        if self.following:
            return self.following.go_on(most - 1)
        if all(slot.caches.has_room for slot in self.slots.values()):
            bases = {number: self._bases[number] + 1 for number in self.slots}
            self.following = Launched(self._shard, self.slots, bases, self.outputs.tokens_of(self.slots))
        return self.following

    def is_of(self, frame: Frame) -> bool:
        """Slots may be missing: each has its own rows."""
        numbers = {window.slot for window in frame.windows}
        if not numbers or not numbers <= self.slots.keys() or not _slots_besides(frame).isdisjoint(numbers):
            return False
        if not _go_on(frame.windows, self.slots):
            return False
        fed: list[int] = self._fed.tolist()  # type: ignore[assignment]
        return all(window.tokens[0] == fed[self._numbers[window.slot]] for window in frame.windows)

    def begin(self, windows: Sequence[Window]) -> None:
        """It has begun."""

    def drop(self, numbers: Set[int]) -> None:
        """Undo it for these of its slots, and before it what was launched upon it."""
        if self.following:
            self.following.drop(numbers & self.following.slots.keys())
        for number in numbers:
            slot = self.slots.pop(number)
            self._before.pop(number).restore()
            slot.caches.cut(self._bases[number])


class Ahead:
    """The steps that are ready: for each slot at most one, and what was launched upon it."""

    def __init__(self, shard: Shard, dtype: mx.Dtype) -> None:
        self._shard = shard
        self._dtype = dtype
        self._can_build: bool | None = None  # not tried yet
        self._ready: list[Ready] = []

    def build(self, slots: Slots) -> None:
        """The step that feeds one more token to each of these slots, unless one is ready."""
        if self._any_of(slots):
            return
        if self._can_build is None:
            can_fill = can_fill_later(self._shard.anatomy.hidden_size)
            self._can_build = can_fill and not looks_at_numbers(self._shard, self._dtype)
        if self._can_build:
            self._ready.append(Built(self._shard, slots, self._dtype))

    def launch(self, slots: Slots, tokens: Mapping[int, mx.array], most: int) -> Outputs | None:
        """As `build`, with these tokens [1]: only where the shard is the whole model, and every cache has room.

        Where that step is there, one upon the last, as long as they are no more than `most`.

        Returns:
            What is to be evaluated, if there is one step more.
        """
        first = next((each for each in self._ready if not each.slots.keys().isdisjoint(slots)), None)
        if first is None:
            if not all(slot.caches.has_room for slot in slots.values()):
                return None
            bases = {number: len(slot.history) for number, slot in slots.items()}
            self._ready.append(Launched(self._shard, slots, bases, mx.concatenate([tokens[n] for n in slots])))
            return self._ready[-1].outputs
        following = first.go_on(most) if isinstance(first, Launched) else None
        return following.outputs if following else None

    def awaited(self, frame: Frame) -> Placeholder | None:
        """Where the hidden states of this frame go, if its step is built."""
        return next((each.hidden for each in self._ready if each.hidden and each.is_of(frame)), None)

    def take(self, frame: Frame, x: mx.array | None) -> Ready | None:
        """The step of this frame, if it is ready and on this input; steps that the frame proves wrong are undone."""
        found = next((each for each in self._ready if each.is_of(frame)), None)
        if found and found.hidden and found.hidden.array is not x:
            found = None
        asked = {window.slot for window in frame.windows}
        touched = asked | _slots_besides(frame)
        wrong = [each for each in self._ready if each is not found and not touched.isdisjoint(each.slots)]
        for each in wrong:
            each.drop(set(each.slots))
        self._ready = [each for each in self._ready if each is not found and each not in wrong]
        if found:
            if left_out := found.slots.keys() - asked:
                found.drop(left_out)
            self._ready += [found.following] if found.following and found.following.slots else []
        return found

    def clear(self) -> None:
        """Forget all of them: their slots are about to close."""
        self._ready.clear()

    def _any_of(self, slots: Slots) -> bool:
        return any(not each.slots.keys().isdisjoint(slots) for each in self._ready)


def looks_at_numbers(shard: Shard, dtype: mx.Dtype) -> bool:
    """Whether the forward reads what it computes (mlx-lm's dbrx lists the experts): then it cannot be built ahead.

    MLX refuses that while it traces a function, as it does here.
    """
    ids = mx.zeros((1, 1), mx.int32)
    x = ids if shard.is_first else mx.zeros((1, 1, shard.anatomy.hidden_size), dtype)
    place = Place(shard.make_caches(Cache()), 0, 1)
    try:
        mx.compile(lambda x, ids: shard(x, [place], ids))(x, ids)
    except (RuntimeError, ValueError):
        return True
    return False


def is_one_token(window: Window) -> bool:
    """Whether it feeds one token and asks for the one behind it, and nothing else."""
    plain = len(window.tokens) == 1 == window.wanted and not (window.masks or window.guessed)
    return plain and not (window.positions or window.targets)


def _outputs(shard: Shard, slots: Slots, bases: Mapping[int, int], x: mx.array, ids: mx.array) -> Outputs:
    """A step that feeds each slot one token behind its base."""
    h = shard(x, [slot.next_place(bases[number]) for number, slot in slots.items()], ids)
    if not shard.is_last:
        return Outputs(h, {}, {})
    logits = shard.logits(h)
    samplers = [slot.sampler for slot in slots.values()]
    kinds = {sampler.kind for sampler in samplers}
    if len(kinds) == 1 and None not in kinds and all(slot.can_draw_ahead for slot in slots.values()):
        draws = samplers[0].draw(logits, [each.seed for each in samplers], [bases[number] + 1 for number in slots])
        return Outputs(h, dict(zip(slots, draws.rows(), strict=True)), {}, draws.tokens)
    return _drawn_one_by_one(h, slots, bases, dict(zip(slots, logits.split(len(slots)), strict=True)))


def _drawn_one_by_one(h: mx.array, slots: Slots, bases: Mapping[int, int], logits: Mapping[int, mx.array]) -> Outputs:
    able = [number for number, slot in slots.items() if slot.can_draw_ahead]
    draws = {number: slots[number].draw_ahead(bases[number], logits[number]) for number in able}
    return Outputs(h, draws, {number: row for number, row in logits.items() if number not in draws})


def _go_on(windows: Sequence[Window], slots: Slots) -> bool:
    """Whether each window is one token behind what its slot holds."""
    return all(is_one_token(window) and _follows(window, slots[window.slot]) for window in windows)


def _follows(window: Window, slot: Slot) -> bool:
    held = len(slot.history)
    return window.base == held and window.prefix_hash == slot.history.prefix_hash(held)


def _slots_besides(frame: Frame) -> set[int]:
    """Slots that open, close or are copied."""
    opened = {session.slot for session in frame.opened}
    return opened | {s.fork_of for s in frame.opened if s.HasField("fork_of")} | set(frame.closed)
