"""Builds mlx-lm's own model of a checkpoint, complete, with parameters that are bound to unread tensors.

Arrays that are never evaluated cost nothing: a model of 671 billion parameters is built in a fraction of a second.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.errors import ModelError, first_line
from worker.model.checkpoint import Checkpoint
from worker.model.families import model_classes
from worker.model.headers import TensorInfo
from worker.model.model_spec import text_config
from worker.model.module_tree import ModuleTree, is_text, module_tree_of
from worker.model.quantisation import BITS, GROUP_SIZES, MISFITS, misfit, quantisation_of, require_fp8_read, unpack_awq

MLX_DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "I64": mx.int64, "I32": mx.int32, "I16": mx.int16,
    "I8": mx.int8, "U64": mx.uint64, "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8, "BOOL": mx.bool_,
    "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip

_SIZES = (
    "num_hidden_layers", "num_layers", "n_layers", "n_layer", "hidden_size", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
_LAYERS = _SIZES[:4]


def absent(name: str, info: TensorInfo) -> mx.array:
    """Return a stand-in of the same shape and dtype for a tensor that is not read here, filled with NaN if possible."""
    dtype = MLX_DTYPES[info.dtype]
    is_real = mx.issubdtype(dtype, mx.floating)
    return mx.full(info.shape, math.nan, dtype) if is_real else mx.zeros(info.shape, dtype)


class Absent:
    """Makes stand-ins and remembers which tensor each one represents."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[str, mx.array]] = {}  # holds the arrays too, so that ids stay valid

    def __call__(self, name: str, info: TensorInfo) -> mx.array:
        array = absent(name, info)
        self._by_id[id(array)] = name, array
        return array

    def name_of(self, array: mx.array) -> str | None:
        return self._by_id[id(array)][0] if id(array) in self._by_id else None


def build(checkpoint: Checkpoint, tensor: Callable[[str, TensorInfo], mx.array] = absent) -> Any:
    """Return the complete model, with parameters bound to the arrays that `tensor` returns.

    Nothing is evaluated here, and `tensor` should not evaluate either. mlx-lm's `sanitize` gets all tensors, since its
    decisions may depend on any of them.

    Raises:
        ModelError: configuration and tensors do not match, or mlx-lm does not know the model.
    """
    _check_sizes(checkpoint)
    method = quantisation_of(checkpoint).method
    model = _construct(checkpoint)
    if method == "fp8":
        require_fp8_read(checkpoint, model)
    weights = {name: tensor(name, info) for name, info in checkpoint.tensors.items()}
    try:
        if hasattr(model, "sanitize"):
            weights = model.sanitize(weights)
    except MISFITS as error:
        raise misfit(checkpoint, first_line(error)) from error
    if method == "awq":
        weights = unpack_awq(checkpoint, weights)
    quantise(model, checkpoint, weights)
    _bind(model, checkpoint, weights)
    return model.eval()


def tensors_of_module(module: Any) -> list[tuple[str, mx.array]]:
    return tree_flatten(module.parameters())  # type: ignore[return-value]


def _check_sizes(checkpoint: Checkpoint) -> None:
    """Refuse sizes that would build an enormous model or fail without a useful message."""
    for part in (checkpoint.config, text_config(checkpoint.config)):
        for key in _SIZES:
            size = part.get(key)
            if size is not None and not isinstance(size, list) and not (isinstance(size, int) and size > 0):
                raise ModelError(f"config.json: {key}: expected a whole number above 0, found {size!r}")
            if key in _LAYERS and isinstance(size, int) and size > len(checkpoint.tensors):
                raise ModelError(f"{checkpoint.name}: config.json has {size} layers, more than there are tensors")


def _construct(checkpoint: Checkpoint) -> Any:
    model_class, args_class = model_classes(checkpoint.config)
    try:
        return model_class(args_class.from_dict(_with_infinities(checkpoint.config)))
    except (*MISFITS, AssertionError) as error:
        reason = f"config.json does not describe a {checkpoint.config['model_type']} model: {first_line(error)}"
        raise ModelError(f"{checkpoint.name}: {reason}") from error
    finally:
        mx.random.seed(0)  # or the graph of MLX's random key would keep what the layers drew, which nothing evaluates


def _with_infinities(value: Any) -> Any:
    """Replace transformers' notation of infinities, {"__float__": "Infinity"}, by numbers."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_infinities(item) for key, item in value.items()}
    return [_with_infinities(item) for item in value] if isinstance(value, list) else value


def quantise(model: Any, checkpoint: Checkpoint, weights: dict[str, mx.array]) -> None:
    """Replace the modules whose weights are quantised in the checkpoint by quantised ones."""
    quantization = quantisation_of(checkpoint).parameters
    if quantization is None:
        return

    def parameters(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path in quantization:
            exception = quantization[path]
            return dict(exception) if isinstance(exception, dict) else exception  # nn.quantize may change it
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        from mlx_lm.utils import infer_quant_config  # imports transformers, which most workers never need

        found: dict[str, Any] = infer_quant_config(path, module, weights)
        if found["group_size"] not in GROUP_SIZES or found["bits"] not in BITS:  # MLX may divide by 0, and so end
            raise ValueError(f"{path} has groups of {found['group_size']} numbers in {found['bits']} bits")
        return found | ({"global_scale": True} if f"{path}.global_scale" in weights else {})

    mode = quantization.get("mode", "affine")
    try:
        nn.quantize(model, quantization["group_size"], quantization["bits"], mode=mode, class_predicate=parameters)
    except MISFITS as error:
        raise ModelError(f"{checkpoint.name} is not quantised as its config.json says: {first_line(error)}") from error


def _bind(model: Any, checkpoint: Checkpoint, weights: dict[str, mx.array]) -> None:
    """Bind the tensors to the model, except those of additional prediction layers (MTP)."""
    wanted = dict(tensors_of_module(model))
    tree = module_tree_of(model)
    num_layers = len(tree.layers)
    _check_layers(checkpoint, tree, wanted, weights)
    bound = {
        name: array
        for name, array in weights.items()
        if name in wanted or ((tree.layer_of(name) or 0) < num_layers and is_text(name))
    }
    missing, over = sorted(wanted.keys() - bound.keys()), sorted(bound.keys() - wanted.keys())
    if missing and over:
        raise misfit(checkpoint, f"it lacks tensor {missing[0]}, and nothing takes tensor {over[0]}")
    if missing:
        advice = f" ({len(missing)} missing); download it again"
        if missing[0].endswith("lm_head.weight") and len(missing) == 1:
            advice = ", and its config.json does not tie the head to the embedding; download it again"
        raise ModelError(f"{checkpoint.name} lacks tensor {missing[0]}{advice}")
    for name in wanted:  # MLX reads fp8 as bytes and would compute with these numbers
        dtype = bound[name].dtype
        if mx.issubdtype(wanted[name].dtype, mx.floating) and not mx.issubdtype(dtype, mx.floating):
            found = str(dtype).rpartition(".")[2]
            raise misfit(checkpoint, f"tensor {name} is of {found}, which nothing converts to floating point")
    try:
        model.load_weights(list(bound.items()), strict=True)
    except ValueError as error:
        lines = str(error).splitlines()[:2]  # the second one names the first unused tensor
        raise misfit(checkpoint, "".join(lines).rstrip(".,")) from error


def _check_layers(checkpoint: Checkpoint, tree: ModuleTree, wanted: Iterable[str], weights: Iterable[str]) -> None:
    """Refuse layers beyond those of config.json, unless they have additional parts, as prediction layers do."""

    def inside_layer(name: str) -> str:
        return name.removeprefix(f"{tree.path}.").partition(".")[2]

    num_layers, known = len(tree.layers), set(map(inside_layer, wanted))
    beyond: dict[int, list[str]] = defaultdict(list)
    for name in weights:
        if (layer := tree.layer_of(name)) is not None and layer >= num_layers:
            beyond[layer].append(name)
    for names in beyond.values():
        if all(inside_layer(name) in known for name in names):
            reason = f"config.json has {num_layers} layers but there is a tensor {names[0]}"
            raise ModelError(f"{checkpoint.name}: {reason}; download it again")
