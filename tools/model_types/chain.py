"""A model as a chain of stages in one process: loaded, cut and run as nodes do it, without nodes."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import mlx.core as mx

from protos.brigade_pb2 import Cache, Sampling, Window
from worker.compute.shard import Shard
from worker.compute.slot import Slot
from worker.memory.history import History
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.describe import describe


class Session:
    """One session's slots, a slot per stage."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots

    def __len__(self) -> int:
        return len(self.slots[0].history)

    def fork(self, length: int) -> "Session":
        return Session([slot.fork(length, Sampling()) for slot in self.slots])


@dataclass(frozen=True)
class Feed:
    """Tokens that a session goes on with, after its first `base` tokens (None: after all that it has), and a canvas."""

    session: Session
    tokens: Sequence[int]
    base: int | None = None
    canvas: Sequence[int] = ()
    soft: mx.array | None = None  # [L, D]: what the step before made of the canvas

    @property
    def rows(self) -> Sequence[int]:
        return (*self.tokens, *self.canvas)

    def window(self) -> Window:
        base = len(self.session) if self.base is None else self.base
        prefix_hash = self.session.slots[0].history.prefix_hash(base)
        return Window(
            base=base, prefix_hash=prefix_hash, tokens=self.tokens, wanted=len(self.tokens), canvas=self.canvas
        )


class Chain:
    """The stages of a folder's model; of one layer each unless `ends` says where they end."""

    def __init__(self, folder: Path, ends: Sequence[int] | None = None) -> None:
        """Raises ModelError with the reason if the model cannot be cut."""
        checkpoint = open_folder(folder)
        self.spec = describe(checkpoint)
        bounds = [0, *(ends or range(1, self.spec.num_layers + 1))]
        self.stages = [_loaded(checkpoint, start, end) for start, end in pairwise(bounds)]

    def with_stage(self, number: int, folder: Path) -> "Chain":
        """The same chain but for one stage, which is another model's."""
        other, stage = copy(self), self.stages[number]
        other.stages = [*self.stages]
        other.stages[number] = _loaded(open_folder(folder), stage.start, stage.end)
        return other

    def open(self, cache: Cache | None = None) -> Session:
        chosen = cache or Cache()
        return Session([Slot(stage.make_caches(chosen), History(), Sampling()) for stage in self.stages])

    def run(self, *feeds: Feed) -> list[mx.array]:
        """One pass of the windows of several sessions: the logits [L, V] of each."""
        windows = [feed.window() for feed in feeds]
        x = ids = mx.array([[token for feed in feeds for token in feed.rows]])
        for number, stage in enumerate(self.stages):
            slots = [feed.session.slots[number] for feed in feeds]
            places = [slot.begin(window) for slot, window in zip(slots, windows, strict=True)]
            x = stage(x, places, ids, _soft_rows(feeds, stage.info.hidden_size) if stage.is_first else None)
        ends = accumulate(len(feed.rows) for feed in feeds[:-1])
        logits = self.stages[-1].logits(x).split(tuple(ends))
        mx.eval(logits)
        return logits


def _soft_rows(feeds: Sequence[Feed], hidden_size: int) -> mx.array | None:
    """What the steps before made of the rows of these feeds [1, sum L, D], zeros where they made nothing."""
    if all(feed.soft is None for feed in feeds):
        return None
    parts = [part for feed in feeds for part in (mx.zeros((len(feed.tokens), hidden_size)),
             mx.zeros((len(feed.canvas), hidden_size)) if feed.soft is None else feed.soft)]  # fmt: skip
    return mx.concatenate(parts)[None]


def _loaded(checkpoint: Checkpoint, start: int, end: int) -> Shard:
    shard = Shard(checkpoint, start, end)
    shard.materialise(lambda num_bytes: None)
    return shard
