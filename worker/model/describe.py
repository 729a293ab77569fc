"""Reads what a plan needs of a checkpoint, and which tensors a shard of it needs. Headers only: loads nothing."""

import re
from dataclasses import dataclass
from typing import Any

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32, DType
from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint
from worker.model.families import Family, family_of, mask_token_of
from worker.model.modelspec import DTYPE_BYTES, LayerSpec, ModelSpec
from worker.model.quantisation import quantisation_of

HIDDEN_DTYPES = {"F32": DTYPE_FLOAT32, "F16": DTYPE_FLOAT16, "BF16": DTYPE_BFLOAT16}

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


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
    weights = _weight_bytes(checkpoint, family, num_layers)
    dtype = _hidden_dtype(checkpoint)
    item = DTYPE_BYTES[dtype]
    return ModelSpec(
        name=checkpoint.name,
        family=checkpoint.config["model_type"],
        layers=tuple(_layer_spec(family, args, i, weights.layers[i], item) for i in range(num_layers)),
        embed_bytes=weights.embedding,
        head_bytes=weights.head,
        tied=is_tied(checkpoint),
        hidden_size=int(args.hidden_size),
        vocab_size=int(args.vocab_size),
        context=int(getattr(args, "max_position_embeddings", None) or 4096),
        dtype=dtype,
        mask_token=mask_token_of(checkpoint.config),
        head_size=_head_size(args),
    )


@dataclass
class _WeightBytes:
    layers: list[int]
    embedding: int = 0
    head: int = 0  # with the final norm


def _weight_bytes(checkpoint: Checkpoint, family: Family, num_layers: int) -> _WeightBytes:
    """What each part of the model takes. Raises ModelError unless the tensors are those of so many layers."""
    found, tied = _WeightBytes([0] * num_layers), is_tied(checkpoint)
    problem = f"{checkpoint.name}: config.json has {num_layers} layers but"
    for name, info in checkpoint.tensors.items():
        if name.startswith(family.ignored) or (tied and is_head(name)):
            continue
        layer = layer_of(name)
        if layer is not None and layer >= num_layers:
            raise ModelError(f"{problem} there is a tensor {name}")
        if layer is not None:
            found.layers[layer] += info.nbytes
        elif is_embedding(name):
            found.embedding += info.nbytes
        else:
            found.head += info.nbytes
    if 0 in found.layers:
        raise ModelError(f"{problem} layer {found.layers.index(0)} has no tensors")
    return found


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
