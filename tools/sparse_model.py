"""A checkpoint of real tensor shapes without weights: headers, and files of holes. For plans and for loading.

Names, shapes and dtypes are those that mlx_lm.convert would write. No tensor is computed: a checkpoint of 1000 billion
parameters takes seconds, and no more of the disk than its headers.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from fnmatch import fnmatch
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

PUBLISHED = Path(__file__).parent / "published"

_FILE_BYTES = 5 * 2**30
_DTYPES = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.uint32: "U32", mx.uint8: "U8"}
_GROUP = 64  # numbers with one scale

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # safetensors' dtype and shape, by name


def write_sparse(
    folder: Path,
    config: dict[str, Any],
    bits: int | None = 4,
    *,
    unstacked: bool = False,
    file_bytes: int = _FILE_BYTES,
) -> int:
    """Write the checkpoint and return what its tensors would take, bytes.

    Args:
        config: of the model; left as it is.
        bits: of a quantised tensor; None for bfloat16.
        unstacked: one tensor per expert, where mlx-lm's model has all of a layer in one.
        file_bytes: the most that one file takes, unless one tensor takes more.
    """
    tensors, written = tensors_of(config, bits)
    if unstacked:
        tensors = dict(_unstack(tensors))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written, indent=1), encoding="utf-8")
    files = list(_files(tensors, file_bytes))
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        _write_holes(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    nbytes = sum(_nbytes(*tensor) for tensor in tensors.values())
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return nbytes


def tensors_of(config: dict[str, Any], bits: int | None) -> tuple[Tensors, dict[str, Any]]:
    """What mlx_lm.convert would write for this configuration: tensors, and the configuration that goes with them."""
    from mlx_lm.utils import _get_classes, quantize_model

    config = json.loads(json.dumps(config))  # mlx-lm's arguments may change what they are given
    build, arguments = _get_classes(config)
    model = build(arguments.from_dict(json.loads(json.dumps(config))))
    _cast(model)
    _quantise_as_published(model, config)
    if bits:
        with redirect_stdout(StringIO()):  # it says how many bits that makes
            model, config = quantize_model(model, config, _GROUP, bits)
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    tied = any(part.get("tie_word_embeddings") for part in (config, config.get("text_config", {})))
    return {
        name: (_DTYPES[array.dtype], array.shape)
        for name, array in parameters
        if not (tied and "lm_head" in name)  # which some models have until they have seen that a checkpoint lacks it
    }, config


def _cast(model: nn.Module) -> None:
    """To bfloat16, but for what the model wants to keep."""
    may_cast: Callable[[str], bool] = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, array: mx.array) -> mx.array:
        return array.astype(mx.bfloat16) if may_cast(path) and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map_with_path(cast, model.parameters()))


def _quantise_as_published(model: nn.Module, config: dict[str, Any]) -> None:
    """What the maker quantised in a mode of MLX's stays so (gpt-oss: its experts in mxfp4)."""
    published = config.pop("quantization_config", {})
    if published.get("quant_method") != "mxfp4":
        return
    config["quantization"] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    kept = published["modules_to_not_convert"]

    def is_quantised(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and not any(fnmatch(path, f"{name}*") for name in kept)

    nn.quantize(model, **config["quantization"], class_predicate=is_quantised)


def _unstack(tensors: Tensors) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """`mlp.switch_mlp.up_proj` [E, ...] as `mlp.experts.0.up_proj` [...] and so on."""
    for name, (dtype, shape) in tensors.items():
        if ".switch_mlp." in name:
            for expert in range(shape[0]):
                yield name.replace(".switch_mlp.", f".experts.{expert}."), (dtype, shape[1:])
        else:
            yield name, (dtype, shape)


def _files(tensors: Tensors, file_bytes: int) -> Iterator[Tensors]:
    part: Tensors = {}
    held = 0
    for name, tensor in tensors.items():
        if part and held + _nbytes(*tensor) > file_bytes:
            yield part
            part, held = {}, 0
        part[name] = tensor
        held += _nbytes(*tensor)
    yield part


def _write_holes(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + _nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file.fileno(), 8 + len(text) + end)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = next(key.size for key, name in _DTYPES.items() if name == dtype)
    return prod(shape) * size
