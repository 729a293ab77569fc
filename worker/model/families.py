"""Differences between model types. The probe pass finds everything else in mlx-lm's own code."""

import importlib
import re
from collections.abc import Mapping
from enum import Enum
from importlib.metadata import version
from typing import Any

from worker.errors import ModelError
from worker.model.cache_spec import MOST_CANVAS
from worker.model.model_spec import CanvasTraining, Refinement

_SHIFTED_PART = 8  # places that Fast-dLLM v2 decides at a time
# The key for the length of a canvas in config.json, and its default
_CANVAS_LENGTHS = {
    "Fast_dLLM_Qwen": ("bd_size", 32), "sdar": ("block_size", 4), "sdar_moe": ("block_size", 4),
    "diffusion_gemma": ("canvas_length", 256),
}  # fmt: skip
# Fields of `Refinement` by keys of generation_config.json, or of these parts of it
_REFINEMENT_PARTS = ("sampler_config", "linear_temperature_schedule_config", "diffusion_stopping_config")
_REFINEMENT = {
    "max_denoising_steps": "num_steps", "t_max": "hottest", "t_min": "coldest", "entropy_bound": "entropy_bound",
    "confidence_threshold": "stop_entropy", "stability_threshold": "stop_steps",
}  # fmt: skip
_MOST_REFINEMENT = 2**16
_SAFE_NAME = re.compile(r"[\w-]+")
# Default MASK tokens: the own defaults of WeDLM and Fast-dLLM v2, and the one in SDAR's vocabulary
_MASKS = {"wedlm": 151665, "Fast_dLLM_Qwen": 151665, "sdar": 151669, "sdar_moe": 151669}
# Types that use another type's code and differ only in masks
_LAYERS_OF = {"sdar": "qwen3", "sdar_moe": "qwen3_moe", "Fast_dLLM_Qwen": "qwen2"}
# Types with a model class of our own
_OWN = {"diffusion_gemma": "worker.model.diffusion_gemma"}
# Types that mlx-lm, too, distinguishes by their architecture (mlx_lm/utils.py)
_BY_ARCHITECTURE = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}

# Types that do not work although the probe pass admits them
_ODD = "mlx-lm's own code for it gives other answers when a prompt comes in parts; run it by mlx-lm on one machine"
_REFUSED = {
    "olmo": "mlx-lm's own code for it fails on a prompt, and ends the process if ai2-olmo is not installed",
    "phi3small": _ODD,
    "plamo3": _ODD,
}


class LaneForm(Enum):
    """How modules that take a cache process the windows of several slots; other modules get all rows end to end."""

    ROWS = "rows"  # attention: rows end to end, windows of any lengths; recurrent and similar layers: like BATCH
    BATCH = "batch"  # windows of equal length side by side
    ALONE = "alone"  # one window after another


# Established by tests (tests/model_types). Untested types step alone: their lanes might be silently wrong, as those of
# gemma2 and phi3small are in mlx-lm's own batches.
_LANES = {
    LaneForm.ROWS: """
        Klear afmoe apertus baichuan_m1 bailing_moe bailing_moe_linear bitnet cohere cohere2 dbrx deepseek deepseek_v2
        deepseek_v32 diffusion_gemma dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 gear gemma gemma3
        gemma3_text gemma4 gemma4_text glm glm4 glm4_moe glm_moe_dsa gpt2 gpt_neox gpt_oss gptj granite granitemoe
        granitemoehybrid helium hunyuan hunyuan_v1_dense internlm2 internlm3 jamba laguna lfm2 lfm2-vl lfm2_moe
        lille-130m llama llama4_text longcat_flash_ngram mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax
        ministral3 mistral3 mistral4 mixtral muse_glimmer nanbeige nemotron nemotron-nas nemotron_h olmo2 olmo3
        olmo_hybrid olmoe openelm phi3 phimoe pixtral qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe
        qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7 seed_oss smollm3 solar_open spark2_5 starcoder2 step3p5
        telechat3 youtu_llm
    """,
    LaneForm.BATCH: """
        bailing_hybrid bailing_moe_v3 deepseek_v3 glm4_moe_lite kimi_k25 kimi_linear kimi_vl longcat_flash nanochat phi
        phixtral plamo plamo2 stablelm
    """,
    LaneForm.ALONE: "gemma2 gpt_bigcode llama4 minimax_m3_vl",
}
# Their forward also uses positions outside the layers, so all of it runs per batch, or per slot.
_LOOK_AT_POSITIONS = ("gpt2", "gpt_bigcode", "llama4", "longcat_flash_ngram", "ministral3", "mistral3", "mistral4")
LANE_OF = {name: form for form, names in _LANES.items() for name in names.split()}


def module_of(config: dict[str, Any]) -> str:
    """Return the module of mlx_lm.models, or the type in `_OWN`, that has the checkpoint's code.

    Raises:
        ModelError: this version of mlx-lm has no code for the type, or none that works.
    """
    model_type = config["model_type"]
    if model_type == "wedlm":
        return "qwen3" if config.get("qk_norm", not config.get("attention_bias", False)) else "qwen2"
    if model_type in _OWN:
        return str(model_type)
    if model_type in _LAYERS_OF:
        return _LAYERS_OF[model_type]
    architectures = config.get("architectures")
    for architecture in architectures if isinstance(architectures, list) else ():
        if found := _BY_ARCHITECTURE.get((model_type, str(architecture))):
            return found
    if model_type in _REFUSED:
        raise ModelError(f"model_type {model_type!r} is not supported: {_REFUSED[model_type]}")
    if _has_module(model_type):
        return str(model_type)
    from mlx_lm.utils import MODEL_REMAPPING  # imports transformers, which most workers never need

    alias = MODEL_REMAPPING.get(model_type)
    if alias is None:
        raise ModelError(
            f"model_type {model_type!r} is not supported: mlx-lm {version('mlx-lm')}, installed here, has "
            "no code for it; a later one may"
        )
    return str(alias)


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the classes of the model and of its arguments. Raises ModelError as `module_of` does."""
    if config.get("model_file"):
        raise ModelError(
            f"config.json: model_file: {config['model_file']!r} is Python code of the model's own, not run here; "
            "choose a model whose type mlx-lm knows"
        )
    module = module_of(config)
    code = importlib.import_module(_OWN.get(module, f"mlx_lm.models.{module}"))
    return code.Model, code.ModelArgs


def lane_form(config: dict[str, Any]) -> LaneForm:
    return LANE_OF.get(module_of(config), LaneForm.ALONE)


def looks_at_positions(config: dict[str, Any]) -> bool:
    """Return whether the forward uses positions outside its layers, as is assumed of untested types."""
    return module_of(config) in _LOOK_AT_POSITIONS or not is_tested(config)


def is_tested(config: dict[str, Any]) -> bool:
    """Return whether tests cover this type; for others users should run `brigade verify`."""
    return module_of(config) in LANE_OF


def mask_token_of(config: dict[str, Any], vocab_size: int) -> int | None:
    """Return the token id of MASK rows; None if the checkpoint was not trained with MASK tokens.

    Raises:
        ModelError: config.json has an id outside the vocabulary.
    """
    token = config.get("mask_token_id", _MASKS.get(config["model_type"]))
    if token is None or (isinstance(token, int) and 0 <= token < vocab_size):
        return token
    if "mask_token_id" not in config:
        return None  # its vocabulary differs from the published checkpoints
    raise ModelError(f"config.json: mask_token_id: expected a token id from 0 to {vocab_size - 1}, got {token!r}")


def canvas_training_of(
    config: dict[str, Any], vocab_size: int, generation_config: Mapping[str, Any]
) -> CanvasTraining | None:
    """Return how the checkpoint was trained for block diffusion; None if it was not.

    SDAR (arXiv 2510.06303) denoises blocks of 4 by default; Fast-dLLM v2 (arXiv 2509.26328) denoises blocks of 32 in
    parts of 8, and each row predicts the next place. `canvas_length` means a canvas after causal rows. DiffusionGemma
    refines canvases of random tokens.

    Args:
        generation_config: generation_config.json, which may have parameters of refinement.
    Raises:
        ModelError: a length in config.json is not a whole number, or the MASK token is missing.
    """
    model_type = config["model_type"]
    key, default = _CANVAS_LENGTHS.get(model_type, ("canvas_length", None))
    length = config.get(key, default)
    if length is None:
        return None
    if isinstance(length, bool) or not isinstance(length, int) or not 2 <= length <= MOST_CANVAS:
        raise ModelError(f"config.json: {key}: expected a whole number from 2 to {MOST_CANVAS}, found {length!r}")
    if model_type == "diffusion_gemma":
        return CanvasTraining(None, length, refinement=_refinement(config, generation_config))
    mask = mask_token_of(config, vocab_size)
    if mask is None:
        raise ModelError(f"config.json: mask_token_id: expected the MASK token's id beside {key}, found none")
    if key == "canvas_length":
        return CanvasTraining(mask, length)
    is_shifted = model_type == "Fast_dLLM_Qwen"
    return CanvasTraining(mask, length, grid=length, is_shifted=is_shifted, part=_SHIFTED_PART if is_shifted else None)


def _refinement(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Refinement:
    """Return how canvases are refined, by generation_config.json and the reference's defaults."""
    parts = [generation_config, *map(generation_config.get, _REFINEMENT_PARTS)]
    given = {key: part[key] for part in parts if isinstance(part, dict) for key in _REFINEMENT if key in part}
    found: dict[str, Any] = {}
    for key, value in given.items():
        is_count = key in ("max_denoising_steps", "stability_threshold")
        kinds = int if is_count else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < _MOST_REFINEMENT:
            kind = "whole number" if is_count else "number"
            raise ModelError(f"generation_config.json: {key}: expected a {kind} from 0, found {value!r}")
        found[_REFINEMENT[key]] = value
    if min(found.get(name, 1) for name in ("num_steps", "hottest", "coldest")) <= 0:
        raise ModelError("generation_config.json: expected denoising steps and temperatures above 0")
    image_ids = (config.get(key) for key in ("image_token_id", "boi_token_id", "eoi_token_id", "video_token_id"))
    return Refinement(**found, not_text=frozenset(token for token in image_ids if isinstance(token, int)))


def _has_module(name: str) -> bool:
    if not _SAFE_NAME.fullmatch(name):
        return False
    try:
        return hasattr(importlib.import_module(f"mlx_lm.models.{name}"), "ModelArgs")
    except ModuleNotFoundError:
        return False
