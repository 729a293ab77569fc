"""Published layouts that mlx-lm does not read, and what has to be said of each."""

import mlx.core as mx

from tests.integration.configs import (
    COMMON,
    FP8,
    GLM,
    INSIDE,
    INT4,
    LATENT,
    LINEAR,
    MISTRAL_YARN,
    QWEN_MOE,
    TOWER,
    wrapped,
)
from tests.integration.layouts import (
    Layout,
    also,
    experts_apart,
    latents_joined,
    matrices_in_awq,
    matrices_in_fp8,
    matrices_in_int4,
    matrices_in_scaled_fp8,
    renamed,
    scales_of_smaller_blocks,
    without_endings,
)

_FLOAT = {"quant_method": "compressed-tensors", "format": "float-quantized"}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_DENSE = COMMON | {"model_type": "llama"}

UNREAD: dict[str, tuple[Layout, str]] = {
    "Qwen3-235B, fp8": (
        Layout(QWEN_MOE | {"quantization_config": FP8}, (experts_apart(), matrices_in_fp8)),
        r"'fp8'.* code for qwen3_moe .*experts\.0\.down_proj\.weight_scale_inv",
    ),
    "Qwen3.5, fp8": (
        Layout(
            wrapped("qwen3_5", LINEAR | {"model_type": "qwen3_5_text"}, quantization_config=FP8),
            (matrices_in_fp8, renamed(*INSIDE)),
        ),
        r"'fp8'.* code for qwen3_5 .*weight_scale_inv",
    ),
    "Devstral, fp8": (  # mlx-lm multiplies the bytes
        Layout(wrapped("mistral3", MISTRAL_YARN, quantization_config=FP8), (matrices_in_scaled_fp8, renamed(*INSIDE))),
        r"'fp8'.* code for mistral3 .*weight_scale_inv",
    ),
    "DeepSeek-V3, fp8 in blocks of another size": (
        Layout(
            LATENT | {"quantization_config": FP8},
            (latents_joined, experts_apart(), matrices_in_fp8, scales_of_smaller_blocks),
        ),
        r"'fp8'.* code for deepseek_v3 ",
    ),
    "fp8 that config.json does not tell of": (
        Layout(_DENSE, (matrices_in_fp8, without_endings("_scale_inv"))),
        r"weight is of uint8, which nothing converts",
    ),
    "GLM-4.7, fp8": (
        Layout(GLM | {"quantization_config": _FLOAT}, (experts_apart(), also(weight_scale=mx.ones((1,))))),
        r"'compressed-tensors'.*float-quantized",
    ),
    "Llama, int4": (
        Layout(_DENSE | {"quantization_config": INT4}, (matrices_in_int4,)),
        r"'compressed-tensors'.* code for llama .*down_proj\.weight_packed",
    ),
    "DeepSeek-V3, NVFP4": (
        Layout(
            LATENT | {"quantization_config": _MODELOPT},
            (latents_joined, experts_apart(), also(weight_scale=mx.ones((1,)), input_scale=mx.array(1.0))),
        ),
        r"'modelopt'.* code for deepseek_v3 .*input_scale",
    ),
    "Qwen3-235B, AWQ": (
        Layout(
            QWEN_MOE | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
            (experts_apart(), matrices_in_awq),
        ),
        r"'awq'.* code for qwen3_moe .*experts\.0\.down_proj",
    ),
    "Llama, AWQ with an order of its own": (
        Layout(
            _DENSE | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
            (also(g_idx=mx.zeros((64,), mx.int32)), matrices_in_awq),
        ),
        r"'awq'.* code for llama .*g_idx",
    ),
    "Kimi-VL": (  # mlx-lm reads only conversions of its own
        Layout(wrapped("kimi_vl", LATENT), (latents_joined, experts_apart()), TOWER),
        r"lacks tensor .*embed_q\.weight, and nothing takes tensor .*kv_b_proj\.weight",
    ),
}
