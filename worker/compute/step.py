"""A step on one stage: what it has begun, and what follows from it.

Shapes: L window length, D hidden, W numbers of a row on the last stage (see `Shard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from protos.brigade_pb2 import Failure, Frame, Pooled, Result, Timing, Window
from worker.compute.header import asked_rows, num_rows
from worker.compute.sampling import Draws, TokenScores
from worker.compute.slot import Slot
from worker.errors import BrigadeError
from worker.memory.slot_caches import CacheSegment
from worker.model.cache_spec import ROW_BLOCK

_STILL_BUSY = 0.1  # a shorter wait, as a share of the time since `begin`, says that the device was done earlier


@dataclass(eq=False)
class Step:
    """A frame that has begun: its layers are done once `pending` is evaluated; draws and scores follow."""

    frame: Frame
    goes_on: bool  # to another stage
    timing: Timing
    node: str  # this worker's name, which failures carry
    begun: int = 0  # when `begin` returned, nanoseconds
    computed: int = 0  # likewise: when the layers were done, if the head began before `finish`
    held_bytes: int | None = None  # of a prompt chunk: the active memory before it
    was_launched: bool = False  # launched before its frame arrived
    has_drafting: bool = False  # a drafter has work with it: no later step may begin before it is finished
    rows: mx.array | None = None  # [1, sum L, W] of its windows, after the last of this stage's layers
    slots: dict[int, Slot] = field(default_factory=dict)  # of its windows, for a drafter: a later step may close them
    ends_long_prompt: bool = False
    windows: list[Window] = field(default_factory=list)  # of the frame, those that have not failed here
    failures: list[Failure] = field(default_factory=list)  # of this stage
    pending: list[mx.array] = field(default_factory=list)
    draws: list[tuple[Window, Draws]] = field(default_factory=list)
    scores: list[tuple[Window, TokenScores]] = field(default_factory=list)
    segments: Sequence[tuple[int, Sequence[CacheSegment]]] = ()  # by slot, that the coordinator gets
    to_store: Sequence[CacheSegment] | None = None  # a piece of a prefix for this node's disk
    pooled: list[tuple[Window, mx.array]] = field(default_factory=list)  # [D] float32 each
    checks: list[tuple[int, mx.array]] = field(default_factory=list)  # slots, and whether their values are finite

    @property
    def changes_bytes(self) -> bool:
        """Whether slots open, close or get larger buffers."""
        return bool(self.frame.opened or self.frame.closed) or any(map(_enters_block, self.windows))

    def fail(self, slot: int, error: BrigadeError) -> None:
        """Note that a slot's window has failed on this stage, unless one has failed before it."""
        if all(failure.slot != slot for failure in (*self.frame.failures, *self.failures)):
            self.failures.append(Failure(slot=slot, kind=type(error).__name__, message=error.message, node=self.node))

    def next_frame(self) -> Frame:
        """Return the next stage's header: the windows that have not failed here."""
        frame = self.frame
        return Frame(
            epoch=frame.epoch,
            step=frame.step,
            closed=frame.closed,
            opened=frame.opened,
            windows=self.windows,
            stores=frame.stores,
        )

    def result(self) -> Result:
        """Return the last stage's result, once the step is computed."""
        result = Result(epoch=self.frame.epoch, step=self.frame.step)
        for window, draws in self.draws:
            samples = draws.to_samples(window.slot)
            result.samples.extend(samples[: window.wanted])
            result.guesses.extend(samples[window.wanted :])
            if draws.soft is not None:
                result.soft.append(draws.to_soft(window.slot, window.conditioning))
        for window, scores in self.scores:
            result.scores.extend(scores.to_scores(window.slot))
        for window, total in self.pooled:
            summed = np.array(total).astype("<f4").tobytes()
            result.pooled.append(Pooled(slot=window.slot, rows=window.pooled, sum=summed))
        return result


def share_of_begin(started: int, begun: int, waits_since: int, computed: int) -> float:
    """Return the share of a step's time that `begin` took, from the moments of the step in nanoseconds.

    If `finish` hardly waits, the device was done earlier, at an unknown moment, while the next step was begun. Then
    only the wait counts as the device's time.
    """
    began_ns, device_ns, waited_ns = begun - started, computed - begun, computed - waits_since
    return began_ns / max(1, began_ns + (device_ns if waited_ns > _STILL_BUSY * device_ns else waited_ns))


def rows_of(some: Sequence[Window], windows: Sequence[Window], x: mx.array) -> mx.array:
    """Select the rows of `some` windows from x [1, sum L, D], which holds those of all `windows`."""
    if len(some) == len(windows):
        return x
    chosen = {window.slot for window in some}
    slots = [window.slot for window in windows for _ in range(num_rows(window))]  # of each row
    return x[:, mx.array([row for row, slot in enumerate(slots) if slot in chosen])]


@dataclass(frozen=True)
class HeadRows:
    """Rows of a window that go through the head together, `rows` of the step's."""

    window: Window
    rows: range
    at: int = 0  # the number of the first one among the window's asked rows


def head_blocks(windows: Iterable[tuple[Window, int]], most: int) -> Iterator[list[HeadRows]]:
    """Yield the asked rows of windows, each with its first row, in blocks of at most so many; only a canvas is cut."""
    block: list[HeadRows] = []
    for window, first in windows:
        rows = asked_rows(window, first)
        size = most if window.canvas else max(1, len(rows))
        for at in range(0, len(rows), size):
            part = HeadRows(window, rows[at : at + size], at)
            if block and sum(len(each.rows) for each in block) + len(part.rows) > most:
                yield block
                block = []
            block.append(part)
    if block:
        yield block


def _enters_block(window: Window) -> bool:
    """Return whether the window's rows go beyond those that caches with room for its base certainly have room for."""
    return -(-window.base // ROW_BLOCK) < -(-(window.base + num_rows(window)) // ROW_BLOCK)
