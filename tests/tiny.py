"""Tiny random models in the real folder layout."""

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

VOCAB = 97
_COMMON = {
    "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": [1, 2],
}  # fmt: skip
_EXTRA: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 8, "sliding_window_pattern": 2},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
        "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "qwen3_5": {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "attention_bias": False,
        "rope_parameters": {"rope_theta": 10000.0, "type": "default", "partial_rotary_factor": 0.5},
    },
}  # fmt: skip
FAMILIES = tuple(_EXTRA)


def make_model(
    folder: Path,
    family: str = "qwen3",
    *,
    dtype: mx.Dtype = mx.float32,
    tied: bool = False,
    quantize: dict[str, Any] | None = None,
    quantize_embedding: bool = True,
    num_files: int = 1,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    sharpen: float = 1.0,
) -> Path:
    """Write a random model to `folder`; equal arguments make equal files.

    Args:
        quantize: group_size and bits of every linear layer; with `quantize_embedding` False the embedding and the head
            keep their dtype.
        config: keys that replace the usual ones.
        sharpen: multiplies the logits of a head that is not tied: random models are never sure of anything.
    """
    settings = _COMMON | _EXTRA[family] | {"model_type": family, "tie_word_embeddings": tied} | (config or {})
    code = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(seed)
    model = code.Model(code.ModelArgs.from_dict(dict(settings)))
    if family == "gemma3_text" and tied:
        model.sanitize({})  # this family ties where the checkpoint has no lm_head
    model.update(tree_map(lambda p: _randomised(p).astype(dtype), model.parameters()))
    if sharpen != 1:
        model.lm_head.weight = model.lm_head.weight * sharpen
    if quantize:
        kept = () if quantize_embedding else ("embed_tokens", "lm_head")
        nn.quantize(model, **quantize, class_predicate=lambda p, m: hasattr(m, "to_quantized") and not p.endswith(kept))
        settings["quantization"] = quantize
    write_folder(folder, settings, dict(tree_flatten(model.parameters())), num_files)
    return folder


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, mx.array], num_files: int = 1) -> None:
    """A folder in Hugging Face layout, with an index if there are several weight files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(weights)
    per_file = -(-len(names) // num_files)
    weight_map = {}
    for number in range(num_files):
        file = "model.safetensors" if num_files == 1 else f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = {name: weights[name] for name in names[number * per_file : (number + 1) * per_file]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(part, file)
    if num_files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def change_json(path: Path, **keys: Any) -> None:
    """Give the object in this file these keys."""
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def _randomised(parameter: mx.array) -> mx.array:
    """Values that make layers matter and keep logits apart: matrices of gain 1.5, vectors near what they were."""
    if parameter.ndim < 2:
        return parameter + 0.1 * mx.random.normal(parameter.shape)
    return mx.random.normal(parameter.shape) * (1.5 / parameter.shape[-1] ** 0.5)
