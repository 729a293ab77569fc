"""How a checkpoint says that it is quantised: by mlx-lm's own key, or by the hub's name for a mode that MLX has."""

from typing import Any

from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint
from worker.model.families import module_of

_MODES = ("affine", "mxfp4", "nvfp4", "mxfp8")
_METHODS = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
_FROM_FP8 = (  # what mlx-lm's `sanitize` makes bfloat16 of blocks of 8-bit floats for, as tools/model_types shows
    "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k25", "mimo_v2_flash", "minimax", "mistral4",
)  # fmt: skip
_ADVICE = "choose an MLX conversion of it, or make one with mlx_lm.convert"


def quantisation_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """mlx-lm's parameters: group_size, bits, mode, and exceptions by path. None for what is not quantised in memory.

    Raises:
        ModelError: it is quantised in a way that is not read here, which the message names.
    """
    own = checkpoint.config.get("quantization")
    if own is None:
        method = _foreign_method(checkpoint)
        if method is None or (method == "fp8" and module_of(checkpoint.config) in _FROM_FP8):
            return None
        if method not in _METHODS:
            raise ModelError(f"{checkpoint.name} is quantised as {method!r}, which is not read here; {_ADVICE}")
        return _METHODS[method]
    if not isinstance(own, dict) or not all(isinstance(own.get(key), int) for key in ("group_size", "bits")):
        problem = f"quantization: expected an object with group_size and bits, got {own!r}"
        raise ModelError(f"{checkpoint.name}: config.json: {problem}; {_ADVICE}")
    for parameters in (own, *(value for value in own.values() if isinstance(value, dict))):
        if (mode := parameters.get("mode", "affine")) not in _MODES:
            raise ModelError(f"{checkpoint.name} is quantised in mode {mode!r}, which is not read here; {_ADVICE}")
    return own


def _foreign_method(checkpoint: Checkpoint) -> str | None:
    """What another tool than mlx-lm quantised with; ModelOpt may say so in a file of its own."""
    config = checkpoint.config
    text = config.get("text_config")
    found = config.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config"))
    if found:
        return str(found.get("quant_method", "unnamed")) if isinstance(found, dict) else str(found)
    return "modelopt" if (checkpoint.folder / "hf_quant_config.json").exists() else None
