"""A checkpoint's quantisation, from mlx-lm's own key in config.json or from another tool's settings.

Formats that mlx-lm supports are read as mlx-lm reads them; all others are refused by name, before tensors are read.
"""

import json
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.errors import ModelError, first_line
from worker.model.checkpoint import MOST_CONFIG_BYTES, Checkpoint
from worker.model.headers import require_file
from worker.model.model_spec import text_config
from worker.model.module_tree import is_text

# errors that mlx-lm's code for models raises for a wrong configuration or wrong tensors
MISFITS = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, StopIteration, RuntimeError)

_MODES = ("affine", "mxfp4", "nvfp4", "mxfp8")
GROUP_SIZES, BITS = (16, 32, 64, 128), (2, 3, 4, 5, 6, 8)
_MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
_MXFP8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
_NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
_INT4 = {"group_size": 32, "bits": 4, "mode": "affine"}
_FORMATS = {"nvfp4-pack-quantized": _NVFP4, "mxfp4-pack-quantized": _MXFP4, "pack-quantized": _INT4}
_ADVICE = "choose an MLX conversion of it, or make one with brigade quantize from a checkpoint that is not quantised"
_ONE_IN_FP8 = 0x38  # the byte of 1.0 in E4M3


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint is quantised; without parameters and method it is not quantised."""

    parameters: dict[str, Any] | None = None  # mlx-lm's: group_size, bits, mode, and exceptions by path
    method: str = ""  # the hub's name for another tool's method


def quantisation_of(checkpoint: Checkpoint) -> Quantisation:
    """Return how the checkpoint is quantised. Raises ModelError, which names the format, if it is not supported."""
    config = checkpoint.config
    if config.get("quantize_activations"):
        raise _unread(checkpoint, "quantize_activations", "the inputs of layers are never quantised here")
    if (own := config.get("quantization")) is not None:
        return Quantisation(_checked(checkpoint, own))
    found = _foreign(checkpoint)
    if not found:
        return Quantisation()
    method = str(found.get("quant_method", "unnamed")) if isinstance(found, dict) else str(found)
    return Quantisation(_parameters(checkpoint, method, found if isinstance(found, dict) else {}), method)


def misfit(checkpoint: Checkpoint, reason: str) -> ModelError:
    """Return the error for tensors that mlx-lm's code for this type does not accept."""
    if method := quantisation_of(checkpoint).method:
        code = f"mlx-lm's code for {checkpoint.config['model_type']}"
        return ModelError(
            f"{checkpoint.name} is quantised as {method!r}, which {code} does not read: {reason}; {_ADVICE}"
        )
    advice = "download it again, or choose an MLX conversion of it"
    return ModelError(f"{checkpoint.name} does not fit its config.json: {reason}; {advice}")


def require_fp8_read(checkpoint: Checkpoint, model: Any) -> None:
    """Raise ModelError for fp8 tensors with a scale per block that the type's `sanitize` does not convert.

    Whether it converts them, keeps them or takes them for bytes shows in a trial with a matrix of a single number.
    """
    scales = [name for name in checkpoint.tensors if name.endswith("_scale_inv") and is_text(name)]
    if not scales:
        return
    block = min(scales).rpartition(".")[0].rpartition(".")[0]
    with mx.stream(mx.cpu):
        one = {
            f"{block}.one.weight": mx.array([[_ONE_IN_FP8]], mx.uint8),
            f"{block}.one.weight_scale_inv": mx.ones((1, 1)),
        }
        try:
            found = list(model.sanitize(one).values())
        except MISFITS:
            found = []
        if len(found) != 1 or found[0].item() != 1:
            raise misfit(checkpoint, f"it does not convert {min(scales)}")


def unpack_awq(checkpoint: Checkpoint, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors with their numbers in MLX's order. Nothing is evaluated."""
    from mlx_lm.utils import _transform_awq_weights  # imports transformers, which most workers never need

    try:
        return _transform_awq_weights(weights, _foreign(checkpoint))[0]
    except (*MISFITS, NameError) as error:  # mlx-lm's code raises NameError if nothing is packed
        raise misfit(checkpoint, first_line(error)) from error


def _checked(checkpoint: Checkpoint, own: Any) -> dict[str, Any]:
    if not isinstance(own, dict) or not all(isinstance(own.get(key), int) for key in ("group_size", "bits")):
        problem = f"quantization: expected an object with group_size and bits, got {own!r}"
        raise ModelError(f"{checkpoint.name}: config.json: {problem}; {_ADVICE}")
    for parameters in (own, *(value for value in own.values() if isinstance(value, dict))):
        if (mode := parameters.get("mode", "affine")) not in _MODES:
            raise ModelError(f"{checkpoint.name} is quantised in mode {mode!r}, which is not read here; {_ADVICE}")
        for key, known in (("group_size", GROUP_SIZES), ("bits", BITS)):
            if parameters.get(key, known[0]) not in known:
                listed = ", ".join(map(str, known))
                problem = f"quantization: {key}: expected one of {listed}, got {parameters[key]!r}"
                raise ModelError(f"{checkpoint.name}: config.json: {problem}; {_ADVICE}")
    return own


def _foreign(checkpoint: Checkpoint) -> Any:
    """Return another tool's quantisation settings, if any, from config.json or from ModelOpt's own file."""
    config = checkpoint.config
    if found := config.get("quantization_config") or text_config(config).get("quantization_config"):
        return found
    path = checkpoint.folder / "hf_quant_config.json"
    require_file(path, MOST_CONFIG_BYTES)
    if not path.exists():
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        settings = None
    return {"quant_method": "modelopt"} | (settings if isinstance(settings, dict) else {})


def _parameters(checkpoint: Checkpoint, method: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return mlx-lm's parameters for another tool's method; None if `sanitize` dequantises the tensors."""
    match method:
        case "mxfp4":
            return _MXFP4
        case "mxfp8":
            return _MXFP8
        case "fp8":
            # power-of-two scales of 32 x 32 blocks are MLX's own format and need no conversion
            packed = settings.get("scale_fmt") == "ue8m0" and settings.get("weight_block_size") == [32, 32]
            return _MXFP8 if packed else None
        case "awq" if settings.get("bits", 4) == 4:
            return _INT4
        case "compressed-tensors" if settings.get("format") in _FORMATS and _is_plain_int4(settings):
            return _FORMATS[settings["format"]]
        case "modelopt" if _modelopt_algorithm(settings) == "NVFP4":
            return _NVFP4
    bits = settings.get("bits")
    detail = settings.get("format") or _modelopt_algorithm(settings) or (f"{bits} bits" if bits else "")
    raise _unread(checkpoint, method, f"{detail}")


def _is_plain_int4(settings: dict[str, Any]) -> bool:
    """Return whether the format's packed integers, if any, are symmetric and have 4 bits."""
    groups = settings.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    return settings["format"] != "pack-quantized" or all(
        part.get("num_bits", 4) == 4 and part.get("symmetric", True) for part in weights if isinstance(part, dict)
    )


def _modelopt_algorithm(settings: dict[str, Any]) -> Any:
    nested = settings.get("quantization")  # present in ModelOpt's own file
    return (nested if isinstance(nested, dict) else settings).get("quant_algo")


def _unread(checkpoint: Checkpoint, method: str, reason: str) -> ModelError:
    why = f": {reason}" if reason else ""
    return ModelError(f"{checkpoint.name} is quantised as {method!r}, which is not read here{why}; {_ADVICE}")
