"""Ahead: steps whose graphs are built before their frames come, while the stage waits. Nothing is computed yet.

What most often follows a step that fed each of some slots one token is one more token each. Where something else comes,
the caches go back to what they were, and nothing is left of the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from protos.brigade_pb2 import Frame, Window
from worker.compute.placeholder import Placeholder, can_fill_later
from worker.compute.sampling import Draws
from worker.compute.shard import Shard
from worker.compute.slot import Slot
from worker.memory.snapshot import Snapshot


@dataclass
class Built:
    """A step of one token for each of some slots."""

    slots: Mapping[int, Slot]  # by number, in the order of the frame's windows
    ids: Placeholder  # [1, B] int32
    hidden: Placeholder | None  # [1, B, D]; none on the first stage
    h: mx.array  # [1, B, D]
    logits: Sequence[mx.array] = ()  # [1, V] of each slot, on the last stage
    draws: Sequence[Draws | None] = ()  # None where they need the very token that is awaited

    def is_of(self, frame: Frame) -> bool:
        """Whether this is the frame's step, and nothing else in the frame touches its slots."""
        if [window.slot for window in frame.windows] != list(self.slots):
            return False
        if not self.slots.keys().isdisjoint(_slots_besides(frame)):
            return False
        return all(is_one_token(window) and _goes_on(window, self.slots[window.slot]) for window in frame.windows)


class Ahead:
    """The steps that are built, at most one for each slot."""

    def __init__(self, shard: Shard, dtype: mx.Dtype, draw: Callable[[Slot, mx.array], Draws | None]) -> None:
        """`draw` builds the draw of a slot's next token by its logits [1, V], if it can before the token is known."""
        self._shard = shard
        self._dtype = dtype
        self._draw = draw
        self._built: list[tuple[Built, Snapshot]] = []  # with what its slots held before

    def build(self, slots: Mapping[int, Slot]) -> None:
        """The step that feeds one more token to each of these slots, which have no step built."""
        if not can_fill_later():
            return
        B, D = len(slots), self._shard.anatomy.hidden_size
        ids = Placeholder([1, B], mx.int32)
        hidden = None if self._shard.is_first else Placeholder([1, B, D], self._dtype)
        before = Snapshot(each for slot in slots.values() for each in slot.caches.changing())
        places = [slot.next_place() for slot in slots.values()]
        h = self._shard((hidden or ids).array, places, ids.array)
        built = Built(slots, ids, hidden, h)
        if self._shard.is_last:
            built.logits = self._shard.logits(h).split(B)
            built.draws = [self._draw(slot, row) for slot, row in zip(slots.values(), built.logits, strict=True)]
        self._built.append((built, before))

    def find(self, frame: Frame) -> Built | None:
        """The step of this frame, if it is built."""
        return next((built for built, _ in self._built if built.is_of(frame)), None)

    def take(self, frame: Frame, x: mx.array | None) -> Built | None:
        """The step of this frame, if it is built on this very input; steps that the frame proves wrong are undone."""
        found = self.find(frame)
        if found and found.hidden and found.hidden.array is not x:
            found = None
        touched = {window.slot for window in frame.windows} | _slots_besides(frame)
        for built, before in self._built:
            if built is not found and not touched.isdisjoint(built.slots):
                before.restore()
        self._built = [each for each in self._built if touched.isdisjoint(each[0].slots)]
        return found

    def clear(self) -> None:
        """Forget all of them: their slots are about to close."""
        self._built.clear()


def is_one_token(window: Window) -> bool:
    """Whether it feeds one token and asks for the one behind it, and nothing else."""
    plain = len(window.tokens) == 1 == window.wanted and not (window.masks or window.guessed)
    return plain and not (window.positions or window.targets)


def _goes_on(window: Window, slot: Slot) -> bool:
    held = len(slot.history)
    return window.base == held and window.prefix_hash == slot.history.prefix_hash(held)


def _slots_besides(frame: Frame) -> set[int]:
    """Slots that open, close or are copied."""
    opened = {session.slot for session in frame.opened}
    return opened | {s.fork_of for s in frame.opened if s.HasField("fork_of")} | set(frame.closed)
