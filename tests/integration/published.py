"""The layouts of large families on the hub, with the keys that their config.json has, in the sizes of `config_of`."""

from typing import Any

import mlx.core as mx

from tests.integration.layouts import (
    Layout,
    also,
    convolutions_first,
    experts_apart,
    experts_fused,
    experts_in_int4,
    experts_in_mxfp4,
    matrices_in_awq,
    matrices_in_fp8,
    matrices_in_int4,
    matrices_in_mxfp8,
    matrices_in_scaled_fp8,
    norms_around_zero,
    renamed,
    scales_of_smaller_blocks,
    without_endings,
)
from tools.model_types.configs import config_of
from tools.model_types.quantised import joined_latents

FP8: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True, "type": "int"}}},
}  # fmt: skip
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32}

TOWER = ("vision_tower.encoder.blocks.0.wqkv.weight", "vision_tower.encoder.final_layernorm.weight")
QWEN_TOWER = ("model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.norm.weight")
INSIDE = renamed(("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."))
LATENTS = (joined_latents, experts_apart())
LATENTS_IN_FP8 = (*LATENTS, matrices_in_fp8)
BF16 = mx.bfloat16
LONG = 32  # more than any prompt: mlx-lm's caches that slide round otherwise


def tiny(name: str, **changes: Any) -> dict[str, Any]:
    """The configuration of a small model of this type, with these changes in its text part."""
    config = config_of(name)
    config.get("text_config", config).update({"num_hidden_layers": 3, **changes})
    return config


def wrapped(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": model_type, "text_config": text}


_PREDICTOR = ("embed_tokens.weight", "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
              "self_attn.o_proj.weight", "mlp.experts.0.gate_proj.weight")  # fmt: skip
_qwen_norms = norms_around_zero(
    ".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight", ".q_norm.weight",
    ".k_norm.weight",
)  # fmt: skip


def _predictor(layer: str) -> tuple[str, ...]:
    """A layer that predicts one token more."""
    return tuple(f"{layer}.{name}" for name in _PREDICTOR)


PUBLISHED: dict[str, Layout] = {
    "gpt-oss, mxfp4": Layout(
        tiny("gpt_oss") | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
        (experts_in_mxfp4,),
        dtype=BF16,
    ),
    "DeepSeek-V3, fp8": Layout(
        tiny("deepseek_v3", quantization_config=FP8), LATENTS_IN_FP8, _predictor("model.layers.61"), BF16
    ),
    "DeepSeek-V3.2, fp8": Layout(
        tiny("deepseek_v32", quantization_config=FP8), LATENTS_IN_FP8, _predictor("model.layers.3"), BF16
    ),
    "GLM-5": Layout(tiny("glm_moe_dsa"), LATENTS, _predictor("model.layers.3")),
    "Kimi-K2, fp8": Layout(
        tiny("deepseek_v3", model_type="kimi_k2", quantization_config=FP8), LATENTS_IN_FP8, dtype=BF16
    ),
    "Kimi-K2-Thinking, int4": Layout(
        tiny("deepseek_v3", model_type="kimi_k2", quantization_config=INT4), (*LATENTS, experts_in_int4)
    ),
    "Kimi-K2.5, int4": Layout(
        wrapped("kimi_k25", tiny("deepseek_v3", model_type="kimi_k2", quantization_config=INT4)),
        (*LATENTS, experts_in_int4),
        (*TOWER, "mm_projector.proj.0.weight"),
    ),
    "Kimi-VL, by mlx-lm": Layout(
        tiny("kimi_vl"), (experts_apart(),), (*TOWER, "multi_modal_projector.linear_1.weight")
    ),
    "MiniMax-M2, fp8": Layout(
        tiny("minimax", quantization_config=FP8), (experts_apart("w1 w2 w3"), matrices_in_fp8), dtype=BF16
    ),
    "MiniMax-M3, mxfp8": Layout(
        tiny("minimax_m3_vl") | {"quantization_config": {"quant_method": "mxfp8"}},
        (experts_apart("w1 w2 w3"), matrices_in_mxfp8),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "patch_merge_mlp.linear_1.weight"),
        BF16,
    ),
    "Mistral Small 4, fp8": Layout(
        wrapped("mistral3", tiny("mistral4", quantization_config=FP8 | {"weight_block_size": None})),
        (joined_latents, experts_fused("switch_mlp", transposed=False), matrices_in_scaled_fp8, INSIDE),
        ("model.vision_tower.ln_pre.weight", "model.multi_modal_projector.norm.weight"),
        BF16,
    ),
    "MiMo-V2-Flash, fp8": Layout(
        tiny("mimo_v2_flash", sliding_window_size=LONG, quantization_config=FP8),
        (experts_apart(), matrices_in_fp8),
        ("model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.self_attn.o_proj.weight"),
        BF16,
    ),
    "GLM-4.7": Layout(tiny("glm4_moe"), (experts_apart(),), _predictor("model.layers.3")),
    "ERNIE 4.5": Layout(
        tiny("ernie4_5_moe"),
        (experts_apart(),),
        ("model.mtp_block.0.self_attn.o_proj.weight", "model.mtp_linear_proj.0.weight", "model.mtp_emb_norm.0.weight"),
    ),
    "Qwen3-235B": Layout(tiny("qwen3_moe"), (experts_apart(),)),
    "Qwen3-Next": Layout(
        tiny("qwen3_next"),
        (experts_apart(), convolutions_first, _qwen_norms),
        ("mtp.fc.weight", "mtp.layers.0.self_attn.o_proj.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"),
    ),
    "Qwen3.5": Layout(
        tiny("qwen3_5", tie_word_embeddings=True),
        (convolutions_first, _qwen_norms, INSIDE),
        (*QWEN_TOWER, "mtp.fc.weight", "mtp.norm.weight"),
    ),
    "Qwen3.5-397B": Layout(
        tiny("qwen3_5_moe"),
        (experts_fused("switch_mlp", transposed=False), convolutions_first, _qwen_norms, INSIDE),
        (*QWEN_TOWER, "mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj"),
    ),
    "Qwen3-VL": Layout(tiny("qwen3_vl"), (INSIDE,), (*QWEN_TOWER, "model.visual.deepstack_merger_list.0.norm.weight")),
    "Qwen3-VL-235B": Layout(tiny("qwen3_vl_moe"), (experts_fused("switch_mlp", transposed=True), INSIDE), QWEN_TOWER),
    "Llama 4": Layout(
        tiny("llama4", num_hidden_layers=4),
        (experts_fused("experts", transposed=True),),
        ("vision_model.model.layers.0.self_attn.q_proj.weight", "multi_modal_projector.linear_1.weight"),
    ),
    "Gemma 3": Layout(
        tiny("gemma3", sliding_window=LONG),
        (without_endings("lm_head.weight"),),
        (
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
            "multi_modal_projector.mm_input_projection_weight",
        ),
    ),
    "Mistral Small 3.1": Layout(
        wrapped("mistral3", tiny("llama", model_type="mistral")),
        others=("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight"),
    ),
    "Ministral 3": Layout(
        tiny("mistral3"),
        (INSIDE,),
        ("model.vision_tower.transformer.layers.0.attention.q_proj.weight", "model.multi_modal_projector.norm.weight"),
    ),
    "Step-3.5": Layout(
        tiny("step3p5", sliding_window=LONG),
        (
            renamed(
                (".mlp.switch_mlp.", ".moe."),
                (".mlp.gate.gate.", ".moe.gate."),
                (".mlp.gate.router_bias", ".moe.router_bias"),
                (".mlp.share_expert.", ".share_expert."),
            ),
            norms_around_zero("norm.weight"),
        ),
        ("model.layers.3.enorm.weight", "model.layers.3.transformer.shared_head.output.weight"),
    ),
    "Llama, AWQ": Layout(tiny("llama", quantization_config=AWQ), (matrices_in_awq,), dtype=mx.float16),
}

# what mlx-lm does not read, and what has to be said of each
UNREAD: dict[str, tuple[Layout, str]] = {
    "Qwen3-235B, fp8": (
        Layout(tiny("qwen3_moe", quantization_config=FP8), (experts_apart(), matrices_in_fp8)),
        r"'fp8'.* code for qwen3_moe .*experts\.0\.down_proj\.weight_scale_inv",
    ),
    "Devstral, fp8": (  # mlx-lm multiplies the bytes
        Layout(tiny("mistral3") | {"quantization_config": FP8}, (matrices_in_scaled_fp8, INSIDE)),
        r"'fp8'.* code for mistral3 .*weight_scale_inv",
    ),
    "DeepSeek-V3, fp8 in blocks of another size": (
        Layout(tiny("deepseek_v3", quantization_config=FP8), (*LATENTS_IN_FP8, scales_of_smaller_blocks)),
        r"'fp8'.* code for deepseek_v3 ",
    ),
    "fp8 that config.json does not tell of": (
        Layout(tiny("llama"), (matrices_in_fp8, without_endings("_scale_inv"))),
        r"weight is of uint8, which nothing converts",
    ),
    "Llama, int4": (
        Layout(tiny("llama", quantization_config=INT4), (matrices_in_int4,)),
        r"'compressed-tensors'.* code for llama .*down_proj\.weight_packed",
    ),
    "Llama, AWQ with an order of its own": (
        Layout(tiny("llama", quantization_config=AWQ), (also(g_idx=mx.zeros((64,), mx.int32)), matrices_in_awq)),
        r"'awq'.* code for llama .*g_idx",
    ),
    "Kimi-VL": (  # mlx-lm reads only conversions of its own
        Layout(tiny("kimi_vl"), LATENTS, TOWER),
        r"lacks tensor .*embed_q\.weight, and nothing takes tensor .*kv_b_proj\.weight",
    ),
}
