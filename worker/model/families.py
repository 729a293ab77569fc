"""What differs between model families: one row per family, one function per difference; mlx-lm stays untouched."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from worker.errors import ModelError
from worker.model.cachespec import LayerKind

FULL = LayerKind()
RECURRENT = LayerKind(recurrent=True)


def _full(args: Any, index: int) -> LayerKind:
    return FULL


def _by_layer_types(args: Any, index: int) -> LayerKind:
    sliding = args.layer_types[index] == "sliding_attention"
    return LayerKind(window=args.sliding_window) if sliding else FULL


def _gemma3(args: Any, index: int) -> LayerKind:
    is_global = (index + 1) % args.sliding_window_pattern == 0
    return FULL if is_global else LayerKind(window=args.sliding_window)


def _qwen3_5(args: Any, index: int) -> LayerKind:
    return FULL if (index + 1) % args.full_attention_interval == 0 else RECURRENT


def _sqrt_hidden(args: Any) -> float:
    return float(args.hidden_size**0.5)


@dataclass(frozen=True)
class Family:
    """One model_type: the mlx-lm module that holds its layers, and where it differs from the plain skeleton."""

    module: str
    layer_kind: Callable[[Any, int], LayerKind] = _full
    embed_scale: Callable[[Any], float] | None = None
    ignored: tuple[str, ...] = ()  # prefixes of checkpoint tensors that are not part of the text model

    def code(self) -> ModuleType:
        return importlib.import_module(f"mlx_lm.models.{self.module}")

    def text_args(self, config: dict[str, Any]) -> Any:
        """mlx-lm's own arguments of the text model, with its defaults filled in."""
        code = self.code()
        args = getattr(code, "TextModelArgs", code.ModelArgs)
        try:
            found = args.from_dict(config.get("text_config") or config)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"config.json does not describe a {self.module} model: {error}") from error
        for key in _SIZES:
            size = getattr(found, key, None)
            if (size is not None or key in _ALWAYS) and not (isinstance(size, int) and size > 0):
                raise ModelError(f"config.json: {key}: expected a whole number above 0, found {size!r}")
        return found


_ALWAYS = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_VISION = ("vision_tower", "model.visual", "mtp.", "model.mtp.", "language_model.mtp.")
_QWEN3, _QWEN2 = Family("qwen3"), Family("qwen2")

FAMILIES = {
    "gemma3_text": Family("gemma3_text", layer_kind=_gemma3, embed_scale=_sqrt_hidden),
    "llama": Family("llama", layer_kind=_by_layer_types),
    "mistral": Family("llama", layer_kind=_by_layer_types),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_5": Family("qwen3_5", layer_kind=_qwen3_5, ignored=_VISION),
    "qwen3_moe": Family("qwen3_moe"),
    "wedlm": _QWEN3,
}


_WEDLM_MASK = 151665  # WeDLM's own default, used where config.json does not say


def mask_token_of(config: dict[str, Any]) -> int | None:
    """The id that MASK rows are embedded with; None for a checkpoint without mask-trained weights.

    Raises:
        ModelError: config.json names an id that is no token of the model.
    """
    default = _WEDLM_MASK if config["model_type"] == "wedlm" else None
    token = config.get("mask_token_id", default)
    vocab_size = family_of(config).text_args(config).vocab_size
    if token is None or (isinstance(token, int) and 0 <= token < vocab_size):
        return token
    if "mask_token_id" not in config:
        return None  # a vocabulary of its own
    raise ModelError(f"config.json: mask_token_id: expected a token id from 0 to {vocab_size - 1}, got {token!r}")


def family_of(config: dict[str, Any]) -> Family:
    """The family of a checkpoint. Raises ModelError for an unsupported model_type, naming those that are."""
    model_type = config["model_type"]
    if model_type == "wedlm" and not config.get("qk_norm", not config.get("attention_bias", False)):
        return _QWEN2
    try:
        return FAMILIES[model_type]
    except KeyError:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model_type {model_type!r} is not supported; supported: {supported}") from None
