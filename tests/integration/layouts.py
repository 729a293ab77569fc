"""Tiny random checkpoints as makers publish large models: names, shapes and dtypes of the hub, one file per tensor.

Numbers are mlx-lm's own model's, taken apart again: experts by themselves, latents joined, matrices in fp8 or int4.
"""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING

from tools.model_types.quantised import Tensors, split_experts, to_fp8

Publish = Callable[[Tensors], Tensors]

_DTYPES = {
    mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint8: "U8", mx.uint32: "U32", mx.int32: "I32",
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A family's configuration, and how its tensors are published."""

    config: dict[str, Any]
    publish: tuple[Publish, ...] = ()  # one after another, from mlx-lm's names to those of the hub
    others: tuple[str, ...] = ()  # tensors that are no part of the text model: towers, projectors, predictors
    dtype: mx.Dtype = mx.float32
    kept: tuple[str, ...] = field(default=("e_score_correction_bias",))  # what stays in fp32


def write_layout(folder: Path, layout: Layout) -> Path:
    """Write the checkpoint; what is not of the text model is NaN."""
    tensors = _numbers(layout)
    for step in layout.publish:
        tensors = step(tensors)
    tensors |= {name: mx.full((32, 32), mx.nan, layout.dtype) for name in layout.others}
    write_files(folder, layout.config, tensors)
    return folder


def write_files(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {name: f"model-{number:05}.safetensors" for number, name in enumerate(tensors, 1)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, array in tensors.items():
        is_fp8 = array.dtype == mx.uint8 and f"{name}_scale_inv" in tensors
        data = np.array(array.reshape(-1).view(mx.uint8)).tobytes()
        dtype = "F8_E4M3" if is_fp8 else _DTYPES[array.dtype]
        header = json.dumps({name: {"dtype": dtype, "shape": array.shape, "data_offsets": [0, len(data)]}}).encode()
        (folder / weight_map[name]).write_bytes(len(header).to_bytes(8, "little") + header + data)


def _numbers(layout: Layout) -> Tensors:
    """mlx-lm's own model with random numbers: matrices of gain 1.5, vectors near what they were."""
    config = json.loads(json.dumps(layout.config))
    model_type = config["model_type"]
    code = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
    mx.random.seed(7)
    found: Tensors = {}
    for name, array in tree_flatten(code.Model(code.ModelArgs.from_dict(config)).parameters()):
        noise = mx.random.normal(array.shape)
        array = array + 0.1 * noise if array.ndim < 2 else noise * (1.5 / array.shape[-1] ** 0.5)
        found[name] = array if name.endswith(layout.kept) else array.astype(layout.dtype)
    return found


# --- steps from mlx-lm's names to published ones ----------------------------------------------------------------------


def renamed(*pairs: tuple[str, str]) -> Publish:
    """Parts of names replaced, the first that fits."""

    def step(tensors: Tensors) -> Tensors:
        found = {}
        for name, array in tensors.items():
            old, new = next(((old, new) for old, new in pairs if old in name), ("", ""))
            found[name.replace(old, new, 1) if old else name] = array
        return found

    return step


def experts_apart(names: str | None = None) -> Publish:
    """A tensor per expert where mlx-lm has one of all, its parts under other names if need be."""
    return lambda tensors: split_experts(tensors, names)


def experts_fused(owner: str, *, transposed: bool, apart: str = "experts") -> Publish:
    """Gate and up projections of all experts in one tensor, as transformers has it."""

    def step(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for gate in [name for name in tensors if name.endswith(f".{owner}.gate_proj.weight")]:
            base = gate.removesuffix(f"{owner}.gate_proj.weight")
            both = mx.concatenate([found.pop(gate), found.pop(gate.replace("gate_proj", "up_proj"))], axis=-2)
            down = found.pop(gate.replace("gate_proj", "down_proj"))
            found[f"{base}{apart}.gate_up_proj"] = both.swapaxes(-1, -2) if transposed else both
            found[f"{base}{apart}.down_proj"] = down.swapaxes(-1, -2) if transposed else down
        return found

    return step


def norms_around_zero(*endings: str) -> Publish:
    return lambda tensors: {
        name: array - 1 if name.endswith(endings) and array.ndim == 1 else array for name, array in tensors.items()
    }


def convolutions_first(tensors: Tensors) -> Tensors:
    """[C, 1, K], as torch has it."""
    return {name: array.moveaxis(2, 1) if "conv1d.weight" in name else array for name, array in tensors.items()}


Taken = Callable[[str, mx.array], bool]


def converted(is_taken: Taken, convert: Callable[[str, mx.array], Tensors]) -> Publish:
    """Some tensors in another form, each of which may become several."""

    def step(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, array in tensors.items():
            found |= convert(name, array) if is_taken(name, array) else {name: array}
        return found

    return step


def _is_matrix(name: str, array: mx.array) -> bool:
    """Whether it goes into 8 bits where a layer's matrices but the router's do."""
    return ".layers." in name and array.ndim > 1 and ".conv1d." not in name and not name.endswith(".gate.weight")


def _mxfp8(name: str, array: mx.array) -> Tensors:
    packed, scales = mx.quantize(array, mode="mxfp8")
    return {name: packed.view(mx.uint8), f"{name}_scale_inv": scales}


def _scaled_fp8(name: str, array: mx.array) -> Tensors:
    """One scale per matrix, and one for what goes into it, which nothing needs."""
    scales = mx.max(mx.abs(array), axis=(-2, -1), keepdims=True) / 448
    scale = scales if array.ndim == 3 else scales.squeeze()
    more = {f"{name}_scale_inv": scale, f"{name.removesuffix('.weight')}.activation_scale": mx.array(1.0)}
    return {name: mx.to_fp8(array / scales), **more}


def _fp8(name: str, array: mx.array) -> Tensors:
    """A scale per block."""
    packed, scales = to_fp8(array.astype(mx.float32))
    return {name: packed, f"{name}_scale_inv": scales}


def _int4(name: str, array: mx.array) -> Tensors:
    """compressed-tensors' packed integers around 8, a scale per 32 of them."""
    groups = mx.unflatten(array, -1, (-1, 32))
    scales = mx.max(mx.abs(groups), axis=-1) / 7
    whole = mx.clip(mx.round(groups / scales[..., None]) + 8, 0, 15).astype(mx.uint32).reshape(*array.shape[:-1], -1, 8)
    packed = (whole << (4 * mx.arange(8, dtype=mx.uint32))).sum(axis=-1).view(mx.int32)
    shape = mx.array(array.shape, mx.int32)
    return {f"{name}_packed": packed, f"{name}_scale": scales, f"{name}_shape": shape}


def _awq(name: str, array: mx.array) -> Tensors:
    """AutoAWQ's order: [in, out / 8], the outputs of eight rows in one word as 0 2 4 6 1 3 5 7; zeros likewise."""
    groups = mx.unflatten(array.T.astype(mx.float32), 0, (-1, 32))  # [G, 32, out]
    low, high = groups.min(axis=1), groups.max(axis=1)
    scales = ((high - low) / 15).astype(array.dtype)
    zeros = mx.clip(mx.round(-low / scales), 0, 15)
    whole = mx.clip(mx.round(groups / scales[:, None]) + zeros[:, None], 0, 15).flatten(0, 1)
    base = name.removesuffix("weight")
    return {f"{base}qweight": _awq_packed(whole), f"{base}qzeros": _awq_packed(zeros), f"{base}scales": scales}


def _awq_packed(whole: mx.array) -> mx.array:
    words = mx.unflatten(whole.astype(mx.uint32), -1, (-1, 8))[..., mx.array([0, 2, 4, 6, 1, 3, 5, 7])]
    return (words << (4 * mx.arange(8, dtype=mx.uint32))).sum(axis=-1).view(mx.int32)


matrices_in_mxfp8 = converted(_is_matrix, _mxfp8)
matrices_in_scaled_fp8 = converted(_is_matrix, _scaled_fp8)
matrices_in_fp8 = converted(_is_matrix, _fp8)
experts_in_int4 = converted(lambda name, array: ".experts." in name, _int4)
matrices_in_int4 = converted(lambda name, array: "_proj." in name, _int4)
matrices_in_awq = converted(lambda name, array: name.endswith("_proj.weight"), _awq)


def scales_of_smaller_blocks(tensors: Tensors) -> Tensors:
    return {
        name: mx.repeat(mx.repeat(array, 2, 0), 2, 1) if name.endswith("_scale_inv") else array
        for name, array in tensors.items()
    }


def without_endings(*endings: str) -> Publish:
    return lambda tensors: {name: array for name, array in tensors.items() if not name.endswith(endings)}


def experts_in_mxfp4(tensors: Tensors) -> Tensors:
    """gpt-oss: gate and up projections row by row in turn, in blocks of 32 numbers, 16 bytes each."""
    found = {name: array for name, array in tensors.items() if ".experts." not in name}
    for name, array in tensors.items():
        if name in found or ".up_proj." in name:
            continue
        is_pair = ".gate_proj." in name
        if is_pair:
            array = mx.stack([array, tensors[name.replace("gate_proj", "up_proj")]], axis=2).flatten(1, 2)
        base, _, kind = name.replace("gate_proj", "gate_up_proj").rpartition(".")
        if kind == "bias":
            found[f"{base}_bias"] = array
            continue
        packed, scales = mx.quantize(array, mode="mxfp4")
        found[f"{base}_blocks"] = mx.unflatten(packed.view(mx.uint8), -1, (-1, 16))
        found[f"{base}_scales"] = scales
    return found


def also(**arrays: mx.array) -> Publish:
    """More tensors beside each matrix of a layer: `qzeros` for x.weight is x.qzeros."""
    return lambda tensors: (
        tensors
        | {
            f"{name.removesuffix('weight')}{kind}": array
            for name in tensors
            if ".layers." in name and name.endswith("_proj.weight")
            for kind, array in arrays.items()
        }
    )
