"""The reference: the model without a cluster, whole in memory by mlx-lm or layer by layer. MLX thread only."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from coordinator.quality.replay import ForcedPass
from protos.brigade_pb2 import Cache, Sampling, Window
from worker.compute.shard import Shard
from worker.compute.slot import Slot
from worker.memory.history import History
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.describe import describe
from worker.model.families import module_of

LayerDigests = list[dict[str, str]]  # by layer: digest by tensor name


class Reference:
    """The unsharded model of a folder, loaded and run by mlx-lm alone."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_folder(folder)
        self.model, _ = load_model(folder, model_config={"model_type": module_of(checkpoint.config)})
        self._mask_token = describe(checkpoint).mask_token

    def read(self, forced: ForcedPass) -> None:
        """Feed the windows of a pass, one after another."""
        cache, first = make_prompt_cache(self.model), 0
        for window in forced.windows:
            logits = self.rows(window, cache)
            mx.eval(logits)
            forced.hand_over(first, logits)
            first += len(window)

    def rows(self, window: Sequence[int], cache: list[object]) -> mx.array:
        """Feed one window [L]; return the logits [L, V] float32 of its rows."""
        logits = self.model(mx.array([list(window)]), cache=cache)[0].astype(mx.float32)
        if self._mask_token is not None:
            logits[:, self._mask_token] = -mx.inf  # as on the cluster, which never draws it
        return logits


def stream_layers(
    checkpoint: Checkpoint, num_layers: int, passes: Sequence[ForcedPass], digests: LayerDigests | None = None
) -> Iterator[int]:
    """Run the passes through the layers, one of which is in memory at a time.

    Each layer is a shard of its own: the code that the cluster runs, without lanes, frames and a decoder's windows.
    Tests compare it with mlx-lm's own model: it is equal to the last bit unless mlx-lm's cache of a sliding window has
    its rows in another order.

    Args:
        digests: gets the digests of each layer; those of the embedding and the head go to the first and last layer.
    Yields:
        The layer's number after each piece of work: a layer read, some milliseconds of digests, or one pass.
    """
    states = [[mx.array([list(window)]) for window in forced.windows] for forced in passes]
    for layer in range(num_layers):
        shard = Shard(checkpoint, layer, layer + 1)
        shard.materialise(lambda nbytes: None)
        yield layer
        if digests is not None:
            digests.append({})
            for _ in shard.digest_into(digests[-1]):
                yield layer
        for forced, rows in zip(passes, states, strict=True):
            _run_layer(shard, forced, rows)
            yield layer
        del shard
        mx.clear_cache()  # free the buffers: the next layer's tensors may have other sizes


def _run_layer(shard: Shard, forced: ForcedPass, rows: list[mx.array]) -> None:
    """Replace the layer's input of each window, [1, L] or [1, L, D], by its output, one window after another."""
    slot = Slot(shard.make_caches(Cache()), History(), Sampling())
    for number, tokens in enumerate(forced.windows):
        first = len(slot.history)
        window = Window(base=first, prefix_hash=slot.history.prefix_hash(first), tokens=tokens)
        rows[number] = shard(rows[number], [slot.begin(window)], mx.array([list(tokens)]))
        mx.eval(rows[number])
        if shard.is_last and forced.is_wanted(first, len(tokens)):
            forced.hand_over(first, shard.logits(rows[number]))
