"""What a plan needs to know of a model: bytes per layer, cache growth, sizes. Loads nothing."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from protos.brigade_pb2 import CACHE_INT8, DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32, Cache, DType
from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint
from worker.model.families import Family, family_of, mask_token_of
from worker.model.quantisation import quantisation_of

HIDDEN_DTYPES = {"F32": DTYPE_FLOAT32, "F16": DTYPE_FLOAT16, "BF16": DTYPE_BFLOAT16}
DTYPE_BYTES = {DTYPE_FLOAT32: 4, DTYPE_FLOAT16: 2, DTYPE_BFLOAT16: 2}

ROW_BLOCK = 256  # rows by which a cache grows
LARGEST_PACK = 4096  # rows: a longer cache is work enough for one attention, and its padding would be dear

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class LayerSpec:
    """One layer's weights, and what its cache takes: `fixed` bytes plus `per_token` bytes for up to `window` tokens."""

    weight_bytes: int
    cache_per_token: int
    cache_fixed: int = 0
    window: int | None = None

    @property
    def is_recurrent(self) -> bool:
        return self.cache_per_token == 0

    def cache_bytes(self, tokens: int, scale: float = 1.0) -> int:
        """Of one session; `scale` is what a quantised row takes of a whole one."""
        return self.cache_fixed + int(self.cache_per_token * min(tokens, self.window or tokens) * scale)


@dataclass(frozen=True)
class ModelSpec:
    """One model, as plain numbers."""

    name: str
    family: str
    layers: tuple[LayerSpec, ...]
    embed_bytes: int
    head_bytes: int  # final norm and, unless it is tied to the embedding, lm_head
    tied: bool
    hidden_size: int
    vocab_size: int
    context: int  # tokens
    dtype: DType
    mask_token: int | None = None  # None: no mask-trained weights
    head_size: int = 64
    cache: Cache = field(default_factory=Cache)  # the kind that sessions are to have

    @property
    def recurrent_layers(self) -> list[int]:
        """Layers whose state cannot be cut."""
        return [i for i, layer in enumerate(self.layers) if layer.is_recurrent]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def shard_bytes(self, start: int, end: int) -> int:
        """Weights of layers [start, end), with the embedding and the head where they belong."""
        is_last = end == self.num_layers
        total = sum(layer.weight_bytes for layer in self.layers[start:end])
        total += self.embed_bytes if start == 0 or (is_last and self.tied) else 0
        return total + (self.head_bytes if is_last else 0)

    def cache_bytes(self, start: int, end: int, tokens: int) -> int:
        """Cache of one session of `tokens` tokens in layers [start, end), of the kind that `cache` says."""
        tokens = min(tokens, self.cache.size or tokens)
        scale = self._int8_scale if self.cache.kind == CACHE_INT8 else 1.0
        return sum(layer.cache_bytes(tokens, scale) for layer in self.layers[start:end])

    def reserved_bytes(self, start: int, end: int, tokens: int) -> int:
        """The most that such a cache may take in memory.

        Rows come in blocks, those of a pack in powers of two of them, and a window slides in two more blocks.
        """
        slack = 2 * ROW_BLOCK
        blocks = -(-tokens // ROW_BLOCK)
        rows = ROW_BLOCK * (1 << (blocks - 1).bit_length() if tokens <= LARGEST_PACK else blocks)
        tokens = min(rows, self.cache.size + slack) if self.cache.size else rows
        scale = self._int8_scale if self.cache.kind == CACHE_INT8 else 1.0
        layers = (replace(layer, window=layer.window and layer.window + slack) for layer in self.layers[start:end])
        return sum(layer.cache_bytes(tokens, scale) for layer in layers)

    @property
    def longest_chunk(self) -> int | None:
        """The most rows of a prompt chunk, where a cache slides: it has room for one chunk beside what it keeps."""
        slides = self.cache.size or any(layer.window for layer in self.layers)
        return ROW_BLOCK if slides else None

    @property
    def rows_that_can_be_cut(self) -> int:
        """The length up to which a cache can be cut anywhere; a longer one can only go on."""
        windows = [0 if layer.is_recurrent else layer.window or self.context for layer in self.layers]
        recent = self.cache.size - self.cache.keep if self.cache.size else self.context
        return min(*windows, recent)

    @property
    def _int8_scale(self) -> float:
        """A byte per number, and a scale and a bias per group, against the numbers themselves."""
        item, group = DTYPE_BYTES[self.dtype], 64 if self.head_size % 64 == 0 else 32
        return (1 + 2 * item / group) / item


def layer_of(name: str) -> int | None:
    """The layer that a checkpoint tensor belongs to; None for the embedding, the norm and the head."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def is_embedding(name: str) -> bool:
    return "embed_tokens." in name


def is_tied(checkpoint: Checkpoint) -> bool:
    """Whether the head is the embedding: by configuration, or because there is no lm_head (mlx-lm goes by both)."""
    args = family_of(checkpoint.config).text_args(checkpoint.config)
    has_head = any(is_head(name) for name in checkpoint.tensors)
    return bool(getattr(args, "tie_word_embeddings", False)) or not has_head


def is_head(name: str) -> bool:
    return "lm_head." in name


def shard_tensors(checkpoint: Checkpoint, start: int, end: int, num_layers: int) -> list[str]:
    """Names, as in the checkpoint, of all tensors that the shard [start, end) needs."""
    ignored = family_of(checkpoint.config).ignored
    tied = is_tied(checkpoint)
    first, last = start == 0, end == num_layers

    def needed(name: str) -> bool:
        if name.startswith(ignored):
            return False
        if (layer := layer_of(name)) is not None:
            return start <= layer < end
        if is_embedding(name):
            return first or (last and tied)
        return last and not (tied and is_head(name))

    return [name for name in checkpoint.tensors if needed(name)]


def describe(checkpoint: Checkpoint) -> ModelSpec:
    """Everything a plan needs, from configuration and headers.

    Raises:
        ModelError: the family is not supported, or configuration and tensors do not fit together.
    """
    family = family_of(checkpoint.config)
    quantisation_of(checkpoint)  # refuses what cannot be read, before it is downloaded
    args = family.text_args(checkpoint.config)
    num_layers = int(args.num_hidden_layers)
    if num_layers > len(checkpoint.tensors):
        raise ModelError(f"{checkpoint.name}: config.json has {num_layers} layers, more than there are tensors")
    weights = dict.fromkeys(range(num_layers), 0)
    tied = is_tied(checkpoint)
    embed = head = 0
    for name, info in checkpoint.tensors.items():
        if name.startswith(family.ignored) or (tied and is_head(name)):
            continue
        layer = layer_of(name)
        if layer is None:
            embed, head = (embed + info.nbytes, head) if is_embedding(name) else (embed, head + info.nbytes)
        elif layer in weights:
            weights[layer] += info.nbytes
        else:
            raise ModelError(f"{checkpoint.name}: config.json has {num_layers} layers but there is a tensor {name}")
    if missing := [i for i, size in weights.items() if size == 0]:
        raise ModelError(
            f"{checkpoint.name}: config.json has {num_layers} layers but layer {missing[0]} has no tensors"
        )
    dtype = _hidden_dtype(checkpoint)
    item = DTYPE_BYTES[dtype]
    return ModelSpec(
        name=checkpoint.name,
        family=checkpoint.config["model_type"],
        layers=tuple(_layer_spec(family, args, i, weights[i], item) for i in range(num_layers)),
        embed_bytes=embed,
        head_bytes=head,
        tied=tied,
        hidden_size=int(args.hidden_size),
        vocab_size=int(args.vocab_size),
        context=int(getattr(args, "max_position_embeddings", None) or 4096),
        dtype=dtype,
        mask_token=mask_token_of(checkpoint.config),
        head_size=_head_size(args),
    )


def _hidden_dtype(checkpoint: Checkpoint) -> DType:
    """Hidden states have the embedding's dtype; a quantised embedding yields that of its scales.

    Scales of one byte (mxfp4, nvfp4, mxfp8) yield bfloat16, which becomes float32 at the first norm of another dtype.
    """
    for suffix in ("embed_tokens.scales", "embed_tokens.weight"):
        for name, info in checkpoint.tensors.items():
            if name.endswith(suffix) and info.dtype in HIDDEN_DTYPES:
                return HIDDEN_DTYPES[info.dtype]
    if any(name.endswith("embed_tokens.scales") for name in checkpoint.tensors):
        norms = {info.dtype for name, info in checkpoint.tensors.items() if name.endswith("input_layernorm.weight")}
        return DTYPE_BFLOAT16 if norms <= {"BF16"} else DTYPE_FLOAT32
    raise ModelError(f"{checkpoint.name} holds no embed_tokens tensor in F32, F16 or BF16")


def _layer_spec(family: Family, args: Any, index: int, weight_bytes: int, item: int) -> LayerSpec:
    kind = family.layer_kind(args, index)
    if kind.recurrent:
        return LayerSpec(weight_bytes, 0, cache_fixed=_recurrent_bytes(args, item))
    per_token = 2 * (args.num_key_value_heads or args.num_attention_heads) * _head_size(args) * item
    return LayerSpec(weight_bytes, int(per_token), window=kind.window)


def _head_size(args: Any) -> int:
    return int(getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads)


def _recurrent_bytes(args: Any, item: int) -> int:
    """Convolution tail plus the fp32 state of a gated delta net (mlx-lm, models/qwen3_5.py)."""
    keys = args.linear_num_key_heads * args.linear_key_head_dim
    values = args.linear_num_value_heads * args.linear_value_head_dim
    convolution = (args.linear_conv_kernel_dim - 1) * (2 * keys + values) * item
    return int(convolution + values * args.linear_key_head_dim * 4)
