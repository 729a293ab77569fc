"""The layouts of large families on the hub, in tiny, with the keys that their config.json has."""

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
    latents_joined,
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
from tests.tiny import VOCAB

FP8: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True, "type": "int"}}},
}  # fmt: skip

COMMON: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "attention_bias": False, "rope_scaling": None,
}  # fmt: skip
LATENT = COMMON | {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}  # fmt: skip
INDEXED = LATENT | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
GLM = COMMON | {
    "model_type": "glm4_moe", "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5, "attention_bias": True,
}  # fmt: skip
MINIMAX = COMMON | {
    "model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 0,
    "rotary_dim": 8,
}  # fmt: skip
QWEN_MOE = COMMON | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
LINEAR = COMMON | {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 3,
    "rope_parameters": {"rope_theta": 10000.0, "type": "default", "partial_rotary_factor": 0.5},
}  # fmt: skip
LINEAR_MOE = LINEAR | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "partial_rotary_factor": 0.5,
}  # fmt: skip
GPT_OSS = COMMON | {
    "model_type": "gpt_oss", "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
LLAMA_4 = COMMON | {
    "model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 4, "interleave_moe_layer_step": 2,
    "intermediate_size": 32, "intermediate_size_mlp": 96, "num_experts_per_tok": 1, "num_local_experts": 4,
    "use_qk_norm": True,
}  # fmt: skip
GEMMA = {key: value for key, value in COMMON.items() if key not in ("rope_scaling", "vocab_size")} | {
    "model_type": "gemma3_text", "query_pre_attn_scalar": 16, "sliding_window": 32, "sliding_window_pattern": 3,
}  # fmt: skip
MISTRAL_YARN = COMMON | {
    "model_type": "ministral3", "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 4,
        "llama_4_scaling_beta": 0.1, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    },
}  # fmt: skip
MIMO = {key: value for key, value in GLM.items() if key not in ("rms_norm_eps", "attention_bias")} | {
    "model_type": "mimo_v2_flash", "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1],
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "sliding_window_size": 32,
    "n_shared_experts": None, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "layernorm_epsilon": 1e-5,
    "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "v_head_dim": 16,
    "swa_head_dim": 16, "swa_v_head_dim": 16,
}  # fmt: skip
STEP = COMMON | {
    "model_type": "step3p5", "num_attention_groups": 2, "sliding_window": 32, "moe_num_experts": 4, "moe_top_k": 2,
    "moe_intermediate_size": 32, "share_expert_dim": 32, "moe_layers_enum": "1,2",
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
}  # fmt: skip

MINIMAX_3 = {key: value for key, value in MINIMAX.items() if key != "rope_scaling"} | {
    "model_type": "minimax_m3_vl_text", "dense_intermediate_size": 96, "intermediate_size": 32,
    "shared_intermediate_size": 32, "moe_layer_freq": [0, 1, 1], "sparse_attention_config": {
        "sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_block_size": 4, "sparse_topk_blocks": 2,
        "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1],
    },
}  # fmt: skip
ERNIE = COMMON | {
    "model_type": "ernie4_5_moe", "use_bias": False, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
    "moe_layer_start_index": 1, "moe_num_shared_experts": 1,
}  # fmt: skip
MISTRAL_4 = LATENT | {
    "model_type": "mistral4", "head_dim": None, "first_k_dense_replace": 0,
    "rope_parameters": MISTRAL_YARN["rope_parameters"],
}  # fmt: skip

TOWER = ("vision_tower.encoder.blocks.0.wqkv.weight", "vision_tower.encoder.final_layernorm.weight")
QWEN_TOWER = ("model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.norm.weight")
INSIDE = renamed(("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."))
LATENTS = (latents_joined, experts_apart())
LATENTS_IN_FP8 = (*LATENTS, matrices_in_fp8)
BF16 = mx.bfloat16


def wrapped(model_type: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 32}, **more}


_NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_PREDICTOR = ("embed_tokens.weight", "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
              "self_attn.o_proj.weight", "mlp.experts.0.gate_proj.weight")  # fmt: skip
_qwen_norms = norms_around_zero(
    ".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight", ".q_norm.weight",
    ".k_norm.weight",
)  # fmt: skip


def _predictor(layer: str) -> tuple[str, ...]:
    """A layer that predicts one token more."""
    return tuple(f"{layer}.{name}" for name in _PREDICTOR)


def _in_fp8(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"quantization_config": FP8}


PUBLISHED: dict[str, Layout] = {
    "gpt-oss, mxfp4": Layout(
        GPT_OSS | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
        (experts_in_mxfp4,),
        dtype=BF16,
    ),
    "DeepSeek-V3, fp8": Layout(_in_fp8(LATENT), LATENTS_IN_FP8, _predictor("model.layers.61"), BF16),
    "DeepSeek-V3.2, fp8": Layout(
        _in_fp8(INDEXED | {"model_type": "deepseek_v32"}), LATENTS_IN_FP8, _predictor("model.layers.3"), BF16
    ),
    "GLM-5": Layout(
        INDEXED | {"model_type": "glm_moe_dsa", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        LATENTS,
        _predictor("model.layers.3"),
    ),
    "Kimi-K2, fp8": Layout(_in_fp8(LATENT | {"model_type": "kimi_k2"}), LATENTS_IN_FP8, dtype=BF16),
    "Kimi-K2-Thinking, int4": Layout(
        LATENT | {"model_type": "kimi_k2", "quantization_config": INT4}, (*LATENTS, experts_in_int4)
    ),
    "Kimi-K2.5, int4": Layout(
        wrapped("kimi_k25", LATENT | {"model_type": "kimi_k2", "quantization_config": INT4}),
        (*LATENTS, experts_in_int4),
        (*TOWER, "mm_projector.proj.0.weight"),
    ),
    "Kimi-VL, by mlx-lm": Layout(
        wrapped("kimi_vl", LATENT), (experts_apart(),), (*TOWER, "multi_modal_projector.linear_1.weight")
    ),
    "MiniMax-M2, fp8": Layout(_in_fp8(MINIMAX), (experts_apart(_NUMBERED), matrices_in_fp8), dtype=BF16),
    "MiniMax-M3, mxfp8": Layout(
        wrapped("minimax_m3_vl", MINIMAX_3, quantization_config={"quant_method": "mxfp8"}),
        (experts_apart(_NUMBERED), matrices_in_mxfp8),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "patch_merge_mlp.linear_1.weight"),
        BF16,
    ),
    "Mistral Small 4, fp8": Layout(
        wrapped("mistral3", MISTRAL_4 | {"quantization_config": FP8 | {"weight_block_size": None}}),
        (latents_joined, experts_fused("switch_mlp", transposed=False), matrices_in_scaled_fp8, INSIDE),
        ("model.vision_tower.ln_pre.weight", "model.multi_modal_projector.norm.weight"),
        BF16,
    ),
    "MiMo-V2-Flash, fp8": Layout(
        _in_fp8(MIMO),
        (experts_apart(), matrices_in_fp8),
        ("model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.self_attn.o_proj.weight"),
        BF16,
    ),
    "GLM-4.7": Layout(GLM, (experts_apart(),), _predictor("model.layers.3")),
    "ERNIE 4.5": Layout(
        ERNIE,
        (experts_apart(),),
        ("model.mtp_block.0.self_attn.o_proj.weight", "model.mtp_linear_proj.0.weight", "model.mtp_emb_norm.0.weight"),
    ),
    "Qwen3-235B": Layout(QWEN_MOE, (experts_apart(),)),
    "Qwen3-Next": Layout(
        LINEAR_MOE | {"model_type": "qwen3_next"},
        (experts_apart(), convolutions_first, _qwen_norms),
        ("mtp.fc.weight", "mtp.layers.0.self_attn.o_proj.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"),
    ),
    "Qwen3.5": Layout(
        wrapped("qwen3_5", LINEAR | {"model_type": "qwen3_5_text", "tie_word_embeddings": True}),
        (convolutions_first, _qwen_norms, INSIDE),
        (*QWEN_TOWER, "mtp.fc.weight", "mtp.norm.weight"),
    ),
    "Qwen3.5-397B": Layout(
        wrapped("qwen3_5_moe", LINEAR_MOE | {"model_type": "qwen3_5_moe_text"}),
        (experts_fused("switch_mlp", transposed=False), convolutions_first, _qwen_norms, INSIDE),
        (*QWEN_TOWER, "mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj"),
    ),
    "Qwen3-VL": Layout(
        wrapped("qwen3_vl", COMMON | {"model_type": "qwen3_vl_text"}),
        (INSIDE,),
        (*QWEN_TOWER, "model.visual.deepstack_merger_list.0.norm.weight"),
    ),
    "Qwen3-VL-235B": Layout(
        wrapped("qwen3_vl_moe", QWEN_MOE | {"model_type": "qwen3_vl_moe_text"}),
        (experts_fused("switch_mlp", transposed=True), INSIDE),
        QWEN_TOWER,
    ),
    "Llama 4": Layout(
        wrapped("llama4", LLAMA_4),
        (experts_fused("experts", transposed=True),),
        ("vision_model.model.layers.0.self_attn.q_proj.weight", "multi_modal_projector.linear_1.weight"),
    ),
    "Gemma 3": Layout(
        wrapped("gemma3", GEMMA, vocab_size=VOCAB),
        (without_endings("lm_head.weight"),),
        (
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
            "multi_modal_projector.mm_input_projection_weight",
        ),
    ),
    "Mistral Small 3.1": Layout(
        wrapped("mistral3", COMMON | {"model_type": "mistral"}),
        others=("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight"),
    ),
    "Ministral 3": Layout(
        wrapped("mistral3", MISTRAL_YARN),
        (INSIDE,),
        ("model.vision_tower.transformer.layers.0.attention.q_proj.weight", "model.multi_modal_projector.norm.weight"),
    ),
    "Step-3.5": Layout(
        STEP,
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
    "Llama, AWQ": Layout(
        COMMON | {"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
        (matrices_in_awq,),
        dtype=mx.float16,
    ),
}

_DENSE = COMMON | {"model_type": "llama"}

# what mlx-lm does not read, and what has to be said of each
UNREAD: dict[str, tuple[Layout, str]] = {
    "Qwen3-235B, fp8": (
        Layout(_in_fp8(QWEN_MOE), (experts_apart(), matrices_in_fp8)),
        r"'fp8'.* code for qwen3_moe .*experts\.0\.down_proj\.weight_scale_inv",
    ),
    "Devstral, fp8": (  # mlx-lm multiplies the bytes
        Layout(wrapped("mistral3", MISTRAL_YARN, quantization_config=FP8), (matrices_in_scaled_fp8, INSIDE)),
        r"'fp8'.* code for mistral3 .*weight_scale_inv",
    ),
    "DeepSeek-V3, fp8 in blocks of another size": (
        Layout(_in_fp8(LATENT), (*LATENTS_IN_FP8, scales_of_smaller_blocks)),
        r"'fp8'.* code for deepseek_v3 ",
    ),
    "fp8 that config.json does not tell of": (
        Layout(_DENSE, (matrices_in_fp8, without_endings("_scale_inv"))),
        r"weight is of uint8, which nothing converts",
    ),
    "Llama, int4": (
        Layout(_DENSE | {"quantization_config": INT4}, (matrices_in_int4,)),
        r"'compressed-tensors'.* code for llama .*down_proj\.weight_packed",
    ),
    "Llama, AWQ with an order of its own": (
        Layout(
            _DENSE | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
            (also(g_idx=mx.zeros((64,), mx.int32)), matrices_in_awq),
        ),
        r"'awq'.* code for llama .*g_idx",
    ),
    "Kimi-VL": (  # mlx-lm reads only conversions of its own
        Layout(wrapped("kimi_vl", LATENT), LATENTS, TOWER),
        r"lacks tensor .*embed_q\.weight, and nothing takes tensor .*kv_b_proj\.weight",
    ),
}
