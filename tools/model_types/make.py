"""Writes tiny random models of any type, as mlx_lm.convert writes a model."""

import contextlib
import importlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import quantize_model

from tools.model_types.configs import config_of

Settings = dict[str, Any]  # of `quantize_model`: group_size, bits, mode, quant_predicate

_NO_SIZES: Settings = {"group_size": None, "bits": None}  # but those of the mode


def make_type(
    folder: Path,
    name: str,
    *,
    unit: int = 16,
    dtype: mx.Dtype = mx.float32,
    quantize: Settings | None = None,
    changed_layer: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny random model of a type, or of a variant (`hunyuan:cla`); equal arguments make equal files.

    Args:
        quantize: as `mlx_lm.convert` quantises.
        changes: of the configuration.
        changed_layer: a layer whose numbers are all 1 % larger, for a control.
    """
    config, model = build_type(name, unit, changes)
    cast = getattr(model, "cast_predicate", lambda path: True)
    model.update(_mapped(model, lambda path, array: array.astype(dtype) if cast(path) else array))
    if quantize:
        with contextlib.redirect_stdout(io.StringIO()):  # it tells how many bits a weight has now
            model, config = quantize_model(model, config, **_NO_SIZES | quantize)
    if changed_layer is not None:
        layer = model.layers[changed_layer]
        layer.update(_mapped(layer, lambda path, array: array * 1.01))
    write(folder, config, dict(tree_flatten(model.parameters())))
    return folder


def build_type(name: str, unit: int = 16, changes: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], Any]:
    """The configuration, with changes, and mlx-lm's own model of it, with random numbers."""
    config = config_of(name, unit)
    for place in (config, config.get("text_config", {})):
        place |= {field: value for field, value in (changes or {}).items() if field in place}
    code = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(1)
    model = code.Model(code.ModelArgs.from_dict(json.loads(json.dumps(config)))).eval()
    model.update(tree_map_with_path(_random, model.parameters()))
    return config, model


def write(folder: Path, config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    """A folder in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})


def _mapped(module: Any, change: Callable[[str, mx.array], mx.array]) -> Any:
    """A module's parameters, those of them that are real numbers changed."""

    def changed(path: str, array: mx.array) -> mx.array:
        return change(path, array) if mx.issubdtype(array.dtype, mx.floating) else array

    return tree_map_with_path(changed, module.parameters())


def _random(path: str, array: mx.array) -> mx.array:
    """Values that make layers matter and keep logits apart: matrices of gain 1.5, vectors near what they were."""
    if array.dtype == mx.uint8:  # bitnet's: four of -1, 0 and 1 in a byte
        return sum(
            (mx.random.randint(0, 3, array.shape).astype(mx.uint8) << (2 * i) for i in range(4)), mx.zeros_like(array)
        )
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    if path.endswith("weight_scale"):  # bitnet's: ones, which would make matrices of gain 13
        return 0.1 * array
    noise = mx.random.normal(array.shape)
    return array + 0.1 * noise if array.ndim < 2 else noise * (1.5 / array.shape[-1] ** 0.5)
