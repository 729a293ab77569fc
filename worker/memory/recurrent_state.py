"""The state of one recurrent layer for one slot, alone and side by side with those of other slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from worker.errors import CacheMismatch
from worker.memory.kv_cache import Mask, Parts, is_sparse


@dataclass(frozen=True)
class LayerCall:
    """A layer's arguments for one window of one slot: rows [1, L, ...] and others; `HERE` is replaced by its caches."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    num_rows: int  # L

    HERE = object()

    def first_rows(self, num_rows: int) -> LayerCall:
        """Return the call for the window's first rows only.

        Other arrays of two or more dimensions count as masks, of attention whose result a replay does not use.
        """

        def cut(value: Any) -> Any:
            if not isinstance(value, mx.array) or value.ndim < 2:
                return value
            if value.shape[:2] == (1, self.num_rows):
                return value[:, :num_rows]
            return "causal" if num_rows > 1 else None

        kwargs = {key: cut(value) for key, value in self.kwargs.items()}
        return LayerCall([cut(value) for value in self.args], kwargs, num_rows)

    @property
    def arrays(self) -> list[mx.array]:
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, mx.array)]

    def arguments(self, caches: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with these caches inserted."""
        args = [caches if value is self.HERE else value for value in self.args]
        return args, {key: caches if value is self.HERE else value for key, value in self.kwargs.items()}


@dataclass(frozen=True)
class LastWindow:
    """A window with drafts: the layer's call, and the state before it."""

    call: LayerCall
    base: int
    arrays: Sequence[mx.array | None]


class RecurrentState(ArraysCache):
    """A recurrent layer's state, without rows: it can continue, restart, or be cut inside a last window with drafts.

    For such a cut it keeps the state before the last window and the layer's call: before the next rows the layer
    replays the accepted ones. After a step of several slots their states share a `StateStack` until one is used alone.
    """

    has_room = is_tight = True

    def __init__(self, num_arrays: int) -> None:
        self.stack: StateStack | None = None  # holds its arrays, if any
        self._slot = 0  # its index there
        super().__init__(size=num_arrays)
        self.length = 0
        self._nbytes = 0
        self._has_drafts = False  # whether the next window has drafts
        self._window: LastWindow | None = None  # the last window, if it had drafts
        self._num_to_replay = 0  # its leading rows that were accepted but are not in the arrays

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property  # type: ignore[override]
    def cache(self) -> list[mx.array | None]:
        """Its arrays [1, ...], None before the first step."""
        if self.stack:
            self.cache = self.stack.arrays_of(self._slot)
        return self._arrays

    @cache.setter
    def cache(self, arrays: list[mx.array | None]) -> None:
        stack, self.stack, self._arrays = self.stack, None, arrays
        if stack:
            stack.thin_out()

    def arrays(self) -> list[mx.array]:
        held = self.stack.arrays if self.stack else self._arrays
        return [array for array in held if array is not None]

    @property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """The shape of each array without its first dimension, None before the first step."""
        held = self.stack.arrays if self.stack else self._arrays
        return [array if array is None else array.shape[1:] for array in held]

    def saved(self) -> tuple[Any, ...]:
        """Return everything that a pass changes, for `restore`."""
        arrays = list(self._arrays)  # a layer replaces the items of the list
        return self.length, self._nbytes, arrays, self.stack, self._slot, self._window, self._num_to_replay

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Restore the state that `saved` returned."""
        self.length, self._nbytes, self._arrays, self.stack, self._slot, self._window, self._num_to_replay = saved

    def take_replay(self) -> LayerCall | None:
        """Return the call that the layer has to replay first, for the accepted rows of a window that was cut."""
        num_rows, self._num_to_replay = self._num_to_replay, 0
        return self._window.call.first_rows(num_rows) if self._window and num_rows else None

    @property
    def recorded(self) -> list[mx.array]:
        """Arrays to evaluate with a step: unevaluated, they would refer to the rows of other slots."""
        return self._window.call.arrays if self._window else []

    def record_window(self, call: Callable[[], LayerCall]) -> None:
        """Record the layer's next call if its window has drafts."""
        # `cache` copies the arrays out of a stack, which would keep the states of other slots
        self._window = LastWindow(call(), self.length, list(self.cache)) if self._has_drafts else None

    def cut(self, length: int) -> None:
        """Continue at `length`, restart at 0, or drop rows of a last window with drafts.

        Raises:
            CacheMismatch: rows before that window would have to be dropped.
        """
        if length == 0:
            self.cache = [None] * len(self._arrays)
            self._nbytes, self._window, self._num_to_replay = 0, None, 0
        elif self._window and self._window.base <= length < self.length:
            self.cache = list(self._window.arrays)
            self._num_to_replay = length - self._window.base
        elif length != self.length:
            raise CacheMismatch(f"a recurrent layer cannot be cut to {length} tokens: its state is at {self.length}")
        self.length = length

    def close(self) -> None:
        """Release its arrays."""
        self.stack, self._arrays, self._nbytes, self._window = None, [None] * len(self._arrays), 0, None

    def fork(self, length: int) -> RecurrentState:
        """Return a state that continues from `length`. Raises CacheMismatch as `cut` does."""
        other = RecurrentState(len(self._arrays))
        other.cache = list(self.cache)  # a layer replaces these arrays and never writes to them
        other.length, other._nbytes = self.length, self._nbytes
        other._window, other._num_to_replay = self._window, self._num_to_replay
        other.cut(length)
        return other

    def snapshot(self) -> RecurrentState:
        """Return a copy from which to fork after later rows."""
        return self.fork(self.length)

    def whole(self) -> Parts:
        """Return its arrays, an empty one for each that is unused."""
        return tuple(mx.zeros(0) if array is None else array for array in self.cache)

    def put_whole(self, length: int, dropped: int, keys: Parts, values: Parts) -> None:
        """Take the state of a snapshot after `length` tokens, which `keys` holds as `whole` returned it."""
        if len(keys) != len(self._arrays):
            raise CacheMismatch(f"expected a state of {len(self._arrays)} arrays, got {len(keys)}")
        self.cache = [array if array.size else None for array in keys]
        self._window, self._num_to_replay = None, 0
        self.length, self._nbytes = length, sum(array.nbytes for array in keys)

    def move_to(self, stack: StateStack, slot: int) -> None:
        """Use the arrays of a stack from now on."""
        self._arrays, self.stack, self._slot = [None] * len(self._arrays), stack, slot

    def move_out(self) -> None:
        """Copy its arrays out of the stack."""
        if self.stack:
            self._arrays, self.stack = self.stack.arrays_of(self._slot), None

    def is_at(self, stack: StateStack, slot: int) -> bool:
        return self.stack is stack and self._slot == slot

    def reserve(
        self, num_rows: int, positions: mx.array | None, *, has_drafts: bool = False, num_canvas: int = 0, grid: int = 1
    ) -> None:
        """Note whether the window has drafts. It has no canvas."""
        self._has_drafts = has_drafts

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        return None

    def advance(self, num_rows: int) -> None:
        """Do nothing: only some of mlx-lm's layers call it, and `settle` sets the length for all."""

    def settle(self, length: int) -> None:
        if length > self.length + 1:  # copy: a slice of a chunk's rows would keep all of them
            self.cache = [array if array is None else mx.contiguous(array) for array in self.cache]
        self.length = length
        nbytes = sum(array.nbytes for array in self.arrays()) // (self.stack.num_slots if self.stack else 1)
        self._nbytes = nbytes * 2 if self._window else nbytes


class StateStack(ArraysCache):
    """The states of several slots side by side, for a layer that runs for all of them at once."""

    def __init__(self, states: Sequence[RecurrentState]) -> None:
        """Concatenate the states, for which `can_be_stacked` holds."""
        self.num_slots = len(states)
        self._states = [ref(state) for state in states]
        self.arrays = self._gathered(states)
        super().__init__(size=len(self.arrays))
        self.cache = self.arrays  # type: ignore[assignment]

    @staticmethod
    def _gathered(states: Sequence[RecurrentState]) -> list[mx.array | None]:
        stack = states[0].stack
        if stack and stack.num_slots == len(states) and all(s.is_at(stack, slot) for slot, s in enumerate(states)):
            return list(stack.arrays)
        found: list[mx.array | None] = []
        for arrays in zip(*(state.cache for state in states), strict=True):
            held = [array for array in arrays if array is not None]
            found.append(mx.concatenate(held) if held else None)
        return found

    def make_mask(self, num_rows: int) -> Mask:
        return None

    def advance(self, num_rows: int) -> None:
        """Do nothing, like `RecurrentState.advance`."""

    def give_back(self) -> None:
        """Move the slots' states here, after a step."""
        self.arrays = list(self.cache)
        states = [state for each in self._states if (state := each())]
        left = {id(state.stack): state.stack for state in states if state.stack}
        for slot, state in enumerate(states):
            state.move_to(self, slot)
        for stack in left.values():
            stack.thin_out()

    def arrays_of(self, slot: int) -> list[mx.array | None]:
        """Return copies of a slot's arrays [1, ...]; slices would keep the states of all slots."""
        own = mx.array([slot])
        return [array if array is None else mx.take(array, own, axis=0) for array in self.arrays]

    def thin_out(self) -> None:
        """Move the remaining states out once too many have left, which frees the arrays of the latter."""
        staying = [state for each in self._states if (state := each()) and state.stack is self]
        if is_sparse(self.num_slots, len(staying)):
            for state in staying:
                state.move_out()
            mx.async_eval([array for state in staying for array in state.arrays()])


def can_be_stacked(states: Sequence[RecurrentState]) -> bool:
    """Return whether the states' arrays have equal shapes: one that holds the last few tokens grows with the first."""
    first, *others = states
    return all((other.stack and other.stack is first.stack) or other.shapes == first.shapes for other in others)
