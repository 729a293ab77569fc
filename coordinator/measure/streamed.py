"""A model that need not fit: its layers are read from disk one after another, and feeds pass through all at once.

Each layer is a shard of its own, so this is the code that the cluster runs, on one machine and without lanes, frames
and a decoder's windows; tests hold it equal to mlx-lm's own model, to the last bit unless mlx-lm's cache of a sliding
window has its rows in another order. MLX thread only.
"""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from coordinator.measure.feed import Feed
from protos.brigade_pb2 import Cache, Sampling, Window
from worker.compute.shard import Shard
from worker.compute.slot import Slot
from worker.memory.history import History
from worker.model.checkpoint import Checkpoint

Digests = list[dict[str, str]]  # of the tensors of each layer, by name


def read_layers(
    checkpoint: Checkpoint, num_layers: int, feeds: Sequence[Feed], digests: Digests | None = None
) -> Iterator[int]:
    """Lead the feeds through every layer, of which one at a time is in memory; yields its number after each piece of
    work, which is a layer read, some milliseconds of digests, or one feed.

    `digests` gets those of each layer, and with the first and the last of the embedding and the head.
    """
    states = [[mx.array([list(window)]) for window in feed.windows] for feed in feeds]
    for layer in range(num_layers):
        shard = Shard(checkpoint, layer, layer + 1)
        shard.materialise(lambda nbytes: None)
        yield layer
        if digests is not None:
            digests.append({})
            for _ in shard.digest_into(digests[-1]):
                yield layer
        for feed, rows in zip(feeds, states, strict=True):
            _run(shard, feed, rows)
            yield layer
        del shard
        mx.clear_cache()  # its memory is for the next one, whose tensors may be of other sizes


def _run(shard: Shard, feed: Feed, rows: list[mx.array]) -> None:
    """Replace what goes into the layer, for each window [1, L] or [1, L, D], by what comes out of it.

    Each window as it is: all of them at once would be rounded otherwise.
    """
    slot = Slot(shard.make_caches(Cache()), History(), Sampling())
    for number, tokens in enumerate(feed.windows):
        first = len(slot.history)
        window = Window(base=first, prefix_hash=slot.history.prefix_hash(first), tokens=tokens)
        rows[number] = shard(rows[number], [slot.begin(window)], mx.array([list(tokens)]))
        mx.eval(rows[number])
        if shard.is_last and feed.is_wanted(first, len(tokens)):
            feed.hand_over(first, shard.logits(rows[number]))
