"""Shard: layers [start, end) of one mlx-lm model, cut out from outside.

Shape letters, here and everywhere: B slots, L window length, D hidden, V vocabulary, H heads, K head size.
"""

import hashlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from protos.brigade_pb2 import Cache
from worker.compute.exhaustion import out_of_memory
from worker.errors import ModelError
from worker.memory.cache import LayerCache, Mask, make_cache
from worker.memory.lane import Lane, Place, serve_lanes
from worker.model.cachespec import LayerKind
from worker.model.checkpoint import Checkpoint
from worker.model.describe import is_tied, layer_of, shard_tensors
from worker.model.families import family_of, mask_token_of
from worker.model.headers import TensorInfo
from worker.model.quantisation import quantisation_of

_MLX_DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "I64": mx.int64, "I32": mx.int32, "I16": mx.int16,
    "I8": mx.int8, "U64": mx.uint64, "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8, "BOOL": mx.bool_,
    "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip

_DIGEST_BYTES = 4 * 2**20  # of a tensor that are hashed at once


class Shard:
    """Layers [start, end), the embedding if first, the final norm and head if last."""

    def __init__(self, checkpoint: Checkpoint, start: int, end: int) -> None:
        """Build the shard; its tensors stay unread until `materialise`.

        Raises:
            ModelError: a tensor is missing, left over, or of another shape than the configuration says.
        """
        family = family_of(checkpoint.config)
        self.args = family.text_args(checkpoint.config)
        self.start, self.end = start, end
        self.is_first, self.is_last = start == 0, end == self.args.num_hidden_layers
        self.model = _build(checkpoint, start, end, self.args.num_hidden_layers)
        text = self.model.model
        self.layers = text.layers[start:end]
        self.mask_token = mask_token_of(checkpoint.config)
        self.nbytes = sum(array.nbytes for _, array in _tensors(self.model))
        self._kinds = [family.layer_kind(self.args, i) for i in range(start, end)]
        for layer in self.layers:
            if "self_attn" in layer:
                layer.self_attn.rope = WindowRope(layer.self_attn.rope)
                serve_lanes(layer.self_attn)
        self._embed = text.embed_tokens if self.is_first else None
        self._scale = family.embed_scale(self.args) if family.embed_scale else None
        self._norm = text.norm if self.is_last else None
        self._head = _head(self.model) if self.is_last else None

    def make_caches(self, cache: Cache) -> list[LayerCache]:
        """Empty caches of the wanted kind for one slot, one per layer."""
        return [make_cache(kind, cache) for kind in self._kinds]

    def __call__(self, x: mx.array, places: Sequence[Place]) -> mx.array:
        """Run the layers over a lane, one window each of several slots, and append each window to its slot's caches.

        Args:
            x: token ids [1, sum L] on the first shard, hidden states [1, sum L, D] elsewhere, window after window.
            places: where each window goes.
        Returns:
            Hidden states [1, sum L, D].
        """
        h = self.embed(x) if self._embed is not None else x
        if len(places) == 1:
            return self._run_alone(h, places[0])
        lane = Lane(places)
        for number, (layer, kind) in enumerate(zip(self.layers, self._kinds, strict=True)):
            h = lane.run(layer, number, kind, h)
        return h

    def _run_alone(self, h: mx.array, place: Place) -> mx.array:
        masks: dict[LayerKind, Mask] = {}
        for layer, kind, cache in zip(self.layers, self._kinds, place.caches, strict=True):
            cache.reserve(place.num_rows, place.positions)
            if kind not in masks:
                masks[kind] = cache.mask(place.num_rows)
            h = layer(h, masks[kind], cache)
        return h

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids [1, L] to hidden states [1, L, D]."""
        h = self._embed(tokens)  # type: ignore[misc]
        # mlx-lm rounds the scale to bfloat16 first; so do we, or the streams would differ
        return h if self._scale is None else h * mx.array(self._scale, mx.bfloat16).astype(h.dtype)

    def logits(self, h: mx.array) -> mx.array:
        """Hidden states [1, N, D] of the last layer to logits [N, V] float32. Last shard only.

        A MASK token is no token to say: its logit is minus infinity.
        """
        logits = self._head(self._norm(h))[0].astype(mx.float32)  # type: ignore[misc]
        if self.mask_token is not None:
            logits[:, self.mask_token] = -mx.inf
        return logits

    def materialise(self, progress: Callable[[int], None]) -> None:
        """Read the shard's tensors from disk, a layer at a time; `progress` takes the bytes that became resident.

        Raises:
            ModelError: a file ends early or cannot be read. OutOfMemory: they do not fit.
        """
        layers = f"layers [{self.start}, {self.end})"
        for module in [*self.layers, self.model]:
            arrays = [array for _, array in _tensors(module)]
            try:
                mx.eval(arrays)
            except RuntimeError as error:
                named = out_of_memory(str(error), f"with {layers}, {self.nbytes / 2**30:.2f} GiB")
                raise named or ModelError(f"cannot read the tensors of {layers}: {error}") from error
            if module is not self.model:
                progress(sum(array.nbytes for array in arrays))
        progress(self.nbytes - sum(array.nbytes for layer in self.layers for _, array in _tensors(layer)))

    def digests(self) -> dict[str, str]:
        """The BLAKE2b digest of every tensor held, by name."""
        found: dict[str, str] = {}
        for _ in self.digest_into(found):
            pass
        return found

    def digest_into(self, found: dict[str, str]) -> Generator[None, None, None]:
        """As `digests`, a few milliseconds at a time: yields after each piece of a tensor."""
        for name, array in _tensors(self.model):
            raw = np.array(array.reshape(-1).view(mx.uint8), copy=False)
            digest = hashlib.blake2b(digest_size=16)
            for first in range(0, len(raw), _DIGEST_BYTES):
                digest.update(raw[first : first + _DIGEST_BYTES].data)
                yield
            found[name] = digest.hexdigest()


class WindowRope:
    """A layer's own rope, which may also be given the position of every row (WeDLM, arXiv 2512.22737, section 4)."""

    def __init__(self, rope: Callable[..., mx.array]) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate [B, H, L, K]; `offset` is the first row's position, [B] of each slot's first, or for one slot [L]."""
        if isinstance(offset, int) or x.shape[0] > 1:
            return self._rope(x, offset=offset)
        return self._rope(x.transpose(2, 1, 0, 3), offset=offset).transpose(2, 1, 0, 3)


def _tensors(module: Any) -> list[tuple[str, mx.array]]:
    return tree_flatten(module.parameters())  # type: ignore[return-value]


def _build(checkpoint: Checkpoint, start: int, end: int, num_layers: int) -> Any:
    """The mlx-lm model with everything outside the shard taken out and the rest bound to unread tensors."""
    code = family_of(checkpoint.config).code()
    try:
        model = code.Model(code.ModelArgs.from_dict(checkpoint.config))
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{checkpoint.name}: config.json does not describe a model ({reason})") from error
    names = shard_tensors(checkpoint, start, end, num_layers)
    weights = model.sanitize(_lazy_tensors(checkpoint, set(names)))
    tied = is_tied(checkpoint)
    if tied and "lm_head" in _text_root(model):
        raise ModelError(
            f"{checkpoint.name} lacks tensor lm_head.weight, and its config.json does not tie the head to the "
            "embedding; download it again"
        )
    _strip(model, start, end, is_last=end == num_layers, keep_embedding=start == 0 or (end == num_layers and tied))
    _quantise(model, checkpoint, weights)
    kept = {name for name, _ in _tensors(model)}
    bound = {name: array for name, array in weights.items() if name in kept or _inside(name, start, end)}
    if missing := sorted(kept - bound.keys()):
        raise ModelError(f"{checkpoint.name} lacks tensor {missing[0]} ({len(missing)} missing); download it again")
    try:
        model.load_weights(list(bound.items()), strict=True)
    except ValueError as error:
        reason = "".join(str(error).splitlines()[:2])  # the second line names the first tensor that is left over
        raise ModelError(f"{checkpoint.name} does not fit its config.json: {reason}") from error
    return model.eval()


def _lazy_tensors(checkpoint: Checkpoint, needed: set[str]) -> dict[str, mx.array]:
    """All tensors of the checkpoint, unread; those outside the shard are unread zeros of the right shape.

    mlx-lm's `sanitize` decides by looking at the whole checkpoint, so it gets to see the whole checkpoint.
    """
    opened: dict[str, dict[str, mx.array]] = {}

    def tensor(name: str, info: TensorInfo) -> mx.array:
        if name not in needed:
            return mx.zeros(info.shape, _MLX_DTYPES[info.dtype])
        if info.file not in opened:
            opened[info.file] = _open_file(checkpoint.folder / info.file)
        return opened[info.file][name]

    return {name: tensor(name, info) for name, info in checkpoint.tensors.items()}


def _open_file(path: Path) -> dict[str, mx.array]:
    try:
        return mx.load(str(path))  # type: ignore[return-value]
    except RuntimeError as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _strip(model: Any, start: int, end: int, *, is_last: bool, keep_embedding: bool) -> None:
    """Replace what other shards hold by empty modules: paths and layer numbers stay as in the checkpoint."""
    text = model.model
    text.layers = [layer if start <= i < end else nn.Module() for i, layer in enumerate(text.layers)]
    if not keep_embedding:
        text.embed_tokens = nn.Module()
    if not is_last:
        text.norm = nn.Module()
        _text_root(model).pop("lm_head", None)


def _text_root(model: Any) -> Any:
    """The module that holds the lm_head: the model itself, or its text part."""
    return getattr(model, "language_model", model)


def _head(model: Any) -> Callable[[mx.array], mx.array]:
    root = _text_root(model)
    return root.lm_head if "lm_head" in root else model.model.embed_tokens.as_linear


def _inside(name: str, start: int, end: int) -> bool:
    layer = layer_of(name)
    return layer is not None and start <= layer < end


def _quantise(model: Any, checkpoint: Checkpoint, weights: dict[str, mx.array]) -> None:
    """Turn the layers that the checkpoint holds in quantised form into quantised ones, as they are."""
    quantization = quantisation_of(checkpoint)
    if quantization is None:
        return

    def parameters(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):  # an empty module stands for what another shard holds
            return False
        if path in quantization:
            return quantization[path]
        if f"{path}.scales" not in weights:
            return False
        from mlx_lm.utils import infer_quant_config  # and with it transformers, which most workers never need

        return infer_quant_config(path, module, weights)

    mode = quantization.get("mode", "affine")
    try:
        nn.quantize(model, quantization["group_size"], quantization["bits"], mode=mode, class_predicate=parameters)
    except (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError) as error:
        raise ModelError(f"{checkpoint.name} is not quantised as its config.json says: {error}") from error
