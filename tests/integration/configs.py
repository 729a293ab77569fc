"""Tiny configurations of large families, with the keys that their config.json has."""

from typing import Any

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
INSIDE = (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."))


def wrapped(model_type: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 32}, **more}
