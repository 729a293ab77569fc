"""The quantisations that a checkpoint may have, tried on six families: those of mlx_lm.convert, and published ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tools.model_types.make import Settings, build_type, make_type, write

UNIT = 32  # widths of 128: groups of 32, 64 and 128 numbers fit
IN_FP8 = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k25", "mimo_v2_flash", "minimax", "mistral4")
FAMILIES = ("deepseek_v3", "glm4_moe", "gpt_oss", "minimax", "qwen3_5_moe", "qwen3_moe")
_BLOCK = 128
_LARGEST_FP8 = 448.0

Tensors = dict[str, mx.array]


def _mixed(path: str, module: Any) -> bool | dict[str, Any]:
    """Down projections in 8 bits, one layer's as they are, attention in another mode: a map of exceptions by path."""
    if "down_proj" in path:
        return ".3." not in path and {"group_size": 32, "bits": 8, "mode": "affine"}
    return {"group_size": 32, "bits": 4, "mode": "mxfp4"} if "o_proj" in path else True


SETTINGS: dict[str, Settings] = {
    **{f"{bits} bit": dict(group_size=64, bits=bits) for bits in (2, 3, 4, 5, 6, 8)},
    "4 bit, groups of 32": dict(group_size=32, bits=4),
    "4 bit, groups of 128": dict(group_size=128, bits=4),
    "mixed per tensor": dict(group_size=64, bits=4, quant_predicate=_mixed),
    "mxfp4": dict(mode="mxfp4"),
    "mxfp8": dict(mode="mxfp8"),
    "nvfp4": dict(mode="nvfp4"),
    "nvfp4, scaled tensors": dict(mode="nvfp4", global_scale=True),
}


def makers(name: str) -> dict[str, Callable[[Path], object]]:
    """By the name of each quantisation what writes a folder of this family in it."""

    def converted(settings: Settings) -> Callable[[Path], object]:
        return lambda folder: make_type(folder, name, unit=UNIT, quantize=settings)

    made = {title: converted(settings) for title, settings in (SETTINGS if name in FAMILIES else {}).items()}
    if name in _PUBLISHED:
        title, publish = _PUBLISHED[name]
        made[title] = lambda folder: publish(folder, name)
    return made


def _publish_fp8(folder: Path, name: str) -> None:
    """A layer's matrices in 8-bit floats with a scale per block, experts apart: as DeepSeek and MiniMax publish."""
    config, model = build_type(name, UNIT)
    numbers: Tensors = dict(tree_flatten(model.parameters()))
    tensors = split_experts(joined_latents(numbers), "w1 w2 w3" if name == "minimax" else None)
    found: Tensors = {}
    for path, array in tensors.items():
        if path.endswith(("_proj.weight", "_a_proj_with_mqa.weight")) or ".experts." in path:
            found[path], found[f"{path}_scale_inv"] = to_fp8(array)
        else:
            found[path] = array if path.endswith("e_score_correction_bias") else array.astype(mx.bfloat16)
    quantization = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[_BLOCK] * 2)
    write(folder, config | {"quantization_config": quantization}, found)
    _call_fp8(folder / "model.safetensors", {path for path in found if f"{path}_scale_inv" in found})


def joined_latents(tensors: Tensors) -> Tensors:
    """What mlx-lm takes apart, as it was: one matrix that makes keys and values of a latent."""
    found = dict(tensors)
    for path in [path for path in tensors if path.endswith(".embed_q.weight")]:
        base = path.removesuffix("embed_q.weight")
        keys, values = found.pop(path).swapaxes(-1, -2), found.pop(f"{base}unembed_out.weight")
        found[f"{base}kv_b_proj.weight"] = mx.concatenate([keys, values], axis=1).flatten(0, 1)
    return found


def split_experts(tensors: Tensors, names: str | None) -> Tensors:
    """A tensor per expert where mlx-lm has one of all."""
    called = dict(
        zip(("gate_proj", "down_proj", "up_proj"), (names or "gate_proj down_proj up_proj").split(), strict=True)
    )
    found: Tensors = {}
    for path, array in tensors.items():
        before, is_stack, after = path.partition(".switch_mlp.")
        part, _, kind = after.partition(".")
        if is_stack:
            found |= {f"{before}.experts.{i}.{called[part]}.{kind}": expert for i, expert in enumerate(array)}
        else:
            found[path] = array
    return found


def to_fp8(array: mx.array) -> tuple[mx.array, mx.array]:
    """A matrix [M, N] in 8-bit floats, and the scale of each of its blocks."""
    M, N = array.shape
    rows, columns = -(-M // _BLOCK), -(-N // _BLOCK)
    padded = mx.pad(array, [(0, rows * _BLOCK - M), (0, columns * _BLOCK - N)])
    blocks = padded.reshape(rows, _BLOCK, columns, _BLOCK)
    scales = mx.max(mx.abs(blocks), axis=(1, 3)) / _LARGEST_FP8
    scaled = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:M, :N]
    return mx.to_fp8(scaled), scales


def _call_fp8(path: Path, names: set[str]) -> None:
    """MLX writes 8-bit floats as bytes: have the file's header say what they are."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    for name in names:
        header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def _publish_mxfp4(folder: Path, name: str) -> None:
    """Only experts quantised, gates and up projections row by row in turn: gpt-oss as it is on the hub."""
    make_type(folder, name, unit=UNIT, quantize=dict(mode="mxfp4", quant_predicate=lambda path, _: ".experts." in path))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization"]
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    tensors: Tensors = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    found = {path: array for path, array in tensors.items() if ".experts." not in path}
    for path, array in tensors.items():
        base, _, kind = path.rpartition(".")
        called = {"weight": "_blocks", "scales": "_scales", "bias": "_bias"}[kind] if path not in found else ""
        if base.endswith(".down_proj") and called:
            found[base + called] = _bytes(array) if kind == "weight" else array
        elif base.endswith(".gate_proj") and called:
            both = mx.stack([array, tensors[path.replace("gate_proj", "up_proj")]], axis=2).flatten(1, 2)
            found[base.replace("gate_proj", "gate_up_proj") + called] = _bytes(both) if kind == "weight" else both
    mx.eval(found)
    write(folder, config, found)


def _bytes(packed: mx.array) -> mx.array:
    """Packed numbers [E, M, N / 8] uint32 as blocks of 32 numbers, [E, M, N / 32, 16] bytes."""
    return mx.unflatten(packed.view(mx.uint8), -1, (-1, 16))


_PUBLISHED: dict[str, tuple[str, Callable[[Path, str], None]]] = {
    **dict.fromkeys(IN_FP8, ("fp8, scale per block", _publish_fp8)),
    "gpt_oss": ("mxfp4 as published", _publish_mxfp4),
}
