"""A tiny configuration of every model type of the installed mlx-lm: by the names of its fields, and by hand.

Everything is a multiple of `unit`: heads are one unit wide, hidden states four.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import mlx_lm.models

VOCAB = 97
NUM_LAYERS = 6

_HELPERS = {
    "__init__", "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils",
    "ssm", "switch_layers",
}  # fmt: skip
_TEXT = {  # wrappers of vision models, and the arguments of their text part
    "gemma3": "gemma3_text.ModelArgs",
    "gemma3n": "gemma3n.TextConfig",
    "gemma4": "gemma4_text.ModelArgs",
    "kimi_k25": "kimi_k25.TextConfig",
    "kimi_k3": "kimi_k3.TextArgs",
    "kimi_vl": "kimi_vl.TextArgs",
    "lfm2-vl": "lfm2.ModelArgs",
    "llama4": "llama4.TextArgs",
    "minimax_m3_vl": "minimax_m3_vl.TextArgs",
    "mistral3": "ministral3.ModelArgs",
    "muse_spark": "muse_spark.TextArgs",
    "pixtral": "llama.ModelArgs",
    "qwen2_vl": "qwen2.ModelArgs",
    "qwen3_5": "qwen3_5.TextModelArgs",
    "qwen3_5_moe": "qwen3_5.TextModelArgs",
    "qwen3_vl": "qwen3.ModelArgs",
    "qwen3_vl_moe": "qwen3_moe.ModelArgs",
}
VARIANTS = ("gemma4_text:e4b", "hunyuan:cla", "nanbeige:loops")  # a second look at a type


def all_types() -> list[str]:
    """Every model type of the installed mlx-lm, with the variants of some."""
    files = Path(mlx_lm.models.__file__).parent.glob("*.py")
    return sorted([*(file.stem for file in files if file.stem not in _HELPERS), *VARIANTS])


def config_of(name: str, unit: int = 16) -> dict[str, Any]:
    """The config.json of a tiny model of this type, or of this variant of it."""
    model_type = name.partition(":")[0]
    by_hand = _by_hand(unit).get(name, {})
    if model_type not in _TEXT:
        args = importlib.import_module(f"mlx_lm.models.{model_type}").ModelArgs
        return {**_filled(args, by_hand, unit), "model_type": model_type}
    module, args = _TEXT[model_type].split(".")
    text = _filled(getattr(importlib.import_module(f"mlx_lm.models.{module}"), args), by_hand, unit)
    return {"model_type": model_type, "text_config": {**text, "model_type": module}, "vocab_size": VOCAB}


def _filled(args_class: Any, by_hand: dict[str, Any], unit: int) -> dict[str, Any]:
    """Values for those fields that are known by hand, that are sizes, or that have no default."""
    missing = dataclasses.MISSING
    sizes, config = _sizes(unit), {}
    for field in dataclasses.fields(args_class):
        is_needed = field.default is missing and field.default_factory is missing
        for values in (by_hand, sizes, _WHERE_NEEDED if is_needed else {}):
            if field.name in values:
                config[field.name] = values[field.name]
                break
    return config


def _same(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


_MIXED = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def _sizes(unit: int) -> dict[str, Any]:
    hidden, experts = 4 * unit, 4
    return {
        **_same(hidden, "hidden_size hidden_dim d_model n_embd model_dim block_dim mamba_d_ssm"),
        **_same(8 * unit, "intermediate_size ff_intermediate_size intermediate_size_mlp dense_intermediate_size"),
        **_same(8 * unit, "ffn_hidden_size block_ff_dim mlp_hidden_size n_inner"),
        **_same(4 * unit, "moe_intermediate_size moe_hidden_size shared_intermediate_size"),
        **_same(4 * unit, "shared_expert_intermediate_size moe_shared_expert_intermediate_size share_expert_dim"),
        **_same(4 * unit, "expert_ffn_hidden_size"),
        **_same(VOCAB, "vocab_size embedding_size num_vocab"),
        **_same(NUM_LAYERS, "num_hidden_layers num_layers n_layers n_layer num_transformer_layers"),
        **_same(4, "num_attention_heads num_heads n_heads n_head linear_num_value_heads mamba_num_heads mamba_n_heads"),
        **_same(experts, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        **_same(4, "index_n_heads linear_conv_kernel_dim"),
        **_same(2, "num_key_value_heads num_kv_heads n_kv_heads num_attention_groups linear_num_key_heads"),
        **_same(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k"),
        **_same(unit, "head_dim kv_channels hidden_size_per_head kv_lora_rank qk_nope_head_dim v_head_dim"),
        **_same(unit, "index_head_dim linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_head"),
        **_same(unit, "mamba_d_state ssm_state_size state_size"),
        **_same(unit // 2, "qk_rope_head_dim rotary_dim"),
        **_same(8, "sliding_window sliding_window_size window_size attention_window_size index_topk"),
        **_same(3, "sliding_window_pattern full_attention_interval"),
        **_same(1, "n_shared_experts num_shared_experts num_shared_expert n_group topk_group first_k_dense_replace"),
        **_same(1000, "max_position_embeddings n_positions"),
        **dict(num_dense_layers=1, q_lora_rank=2 * unit, logit_scale=0.0625, rope_theta=10000.0, layer_types=_MIXED),
    }


_WHERE_NEEDED: dict[str, Any] = {
    **_same(1e-5, "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon"),
    **_same(1000, "n_ctx block_size model_max_length swa_rope_theta rotary_emb_base"),
    **_same(0.5, "rotary_pct partial_rotary_factor"),
    **_same(True, "use_conv_bias use_qk_norm qk_norm post_norm norm_topk_prob mla_scale_q_lora mla_scale_kv_lora"),
    **_same(False, "tie_word_embeddings attention_bias mlp_bias use_bias use_qkv_bias mamba_proj_bias"),
    **_same(4, "conv_kernel mamba_d_conv"),
    **_same(2, "conv_window mamba_expand n_groups zero_expert_num group_norm_size"),
    **dict(mlp_only_layers=[], rope_scaling=None, routed_scaling_factor=1.5, embedding_multiplier=12.0),
    **dict(attention_multiplier=0.25, residual_multiplier=0.22, logits_scaling=8.0, scale_depth=1.4, scale_emb=12.0),
    **dict(dim_model_base=32, topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1, decoder_sparse_step=1),
    **dict(hidden_act="relu2", attention_method="MLA", zero_expert_type="identity", layer_group_size=3),
}


def _by_hand(unit: int) -> dict[str, dict[str, Any]]:
    """What the names of the fields do not tell."""
    ropes = {kind: dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5) for kind in _MIXED}
    mistral = dict(
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=4,
            llama_4_scaling_beta=0.1, beta_fast=32, beta_slow=1, mscale=1.0,
        )
    )  # fmt: skip
    yarn = dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0)
    alpha = dict(rope_scaling=dict(alpha=1000.0, factor=1.0, type="dynamic"))
    hunyuan = dict(alpha, use_mixed_mlp_moe=True, moe_topk=1, cla_share_factor=2)
    gemma4 = dict(global_head_dim=2 * unit, num_kv_shared_layers=0, hidden_size_per_layer_input=0)
    kda = dict(num_heads=4, head_dim=unit, short_conv_kernel_size=4, kda_layers=[1, 2, 4, 5], full_attn_layers=[3, 6])
    lfm2 = dict(
        layer_types=["conv", "conv", "full_attention"] * 2, conv_bias=False, conv_L_cache=3, block_multiple_of=4,
        block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True, use_expert_bias=True,
    )  # fmt: skip
    blocks = [
        (dict(n_heads_in_group=2), dict(ffn_mult=1.5)),
        (dict(no_op=True), dict(ffn_mult=1.5)),
        (dict(replace_with_linear=True), dict(no_op=True)),
    ] * 2
    return {
        "afm7": dict(num_kv_reuse_layers=2),
        "baichuan_m1": dict(sliding_window_layers=[0, 2, 4]),
        "bailing_hybrid": dict(num_key_value_heads=4),
        "bailing_moe_linear": dict(num_key_value_heads=4),
        "dbrx": dict(
            ffn_config=dict(ffn_hidden_size=8 * unit, moe_num_experts=4, moe_top_k=2),
            attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=1e4),
        ),
        "deepseek_v2": dict(rope_scaling=yarn),
        "deepseek_v3": dict(rope_scaling=yarn),
        "deepseek_v41": dict(
            head_dim=2 * unit, o_groups=2, o_lora_rank=unit, hc_mult=2, hc_sinkhorn_iters=4, rms_norm_eps=1e-6,
            index_topk=4, compress_ratios=(0, 4, 4, 4, 4, 0), kv_source_layer_ids=(0, 1, 1, 3, 3, 5),
            index_source_layer_ids=(0, 1, 1, 3, 3, 5),
        ),
        "exaone4": dict(sliding_window_pattern="LLG"),
        "exaone_moe": dict(is_moe_layer=[False] + [True] * 5),
        "gear": dict(layer_types=["conv_mixer", "sliding_attention", "full_attention"] * 2),
        "gemma3n": dict(
            hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=2,
            rope_local_base_freq=1e4, final_logit_softcapping=30.0, activation_sparsity_pattern=[0.5] * 6,
            altup_num_inputs=4, altup_coef_clip=1.0, altup_correct_scale=True, altup_active_idx=0, laurel_rank=8,
        ),
        "gemma4": dict(gemma4, attention_k_eq_v=True, num_global_key_value_heads=1),
        "gemma4_text": dict(gemma4, enable_moe_block=True, top_k_experts=2),
        "gemma4_text:e4b": dict(
            gemma4, num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB
        ),
        "glm_moe_dsa": dict(rope_parameters=dict(rope_theta=1e6, rope_type="default")),
        "granitemoehybrid": dict(
            layer_types=["mamba", "mamba", "attention"] * 2, mamba_conv_bias=True, mamba_n_groups=1, mamba_d_conv=4,
            mamba_proj_bias=False,
        ),
        "hunyuan": dict(hunyuan, use_cla=False),
        "hunyuan:cla": dict(hunyuan, use_cla=True),
        "hunyuan_v1_dense": alpha,
        "jamba": dict(attn_layer_offset=1, attn_layer_period=3, expert_layer_offset=1, expert_layer_period=2),
        "kimi_k3": dict(linear_attn_config=kda, attn_res_block_size=2, activation_situ_beta=1.0),
        "kimi_linear": dict(linear_attn_config=kda),
        "laguna": dict(rope_parameters=ropes),
        "lfm2": lfm2,
        "lfm2-vl": lfm2,
        "lfm2_moe": lfm2,
        "llama4": dict(
            num_hidden_layers=8, attention_chunk_size=8, num_experts_per_tok=1, interleave_moe_layer_step=2
        ),
        "llama4_text": dict(no_rope_layers=[1, 1, 0] * 2),
        "longcat_flash_ngram": dict(ngram_vocab_size_ratio=3, emb_neighbor_num=3, emb_split_num=2),
        "mamba": dict(time_step_rank=4),
        "mamba2": dict(time_step_limit=(0.01, 10.0), time_step_rank=4, num_heads=8),
        "mellum": dict(rope_parameters=ropes),
        "mimo_v2_flash": dict(
            hybrid_layer_pattern=[1, 1, 0] * 2, moe_layer_freq=[0] + [1] * 5, swa_head_dim=unit, swa_v_head_dim=unit,
            swa_num_attention_heads=4, swa_num_key_value_heads=2, add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False,
        ),
        "minicpm3": _longrope(unit // 4),
        "minimax_m3_vl": dict(
            layer_types=None, moe_layer_freq=[0] + [1] * 5, sparse_attention_config=dict(
                sparse_num_index_heads=2, sparse_index_dim=unit, sparse_block_size=4, sparse_topk_blocks=2,
                sparse_local_block=1, sparse_attention_freq=[0] + [1] * 5,
            ),
        ),
        "ministral3": mistral,
        "mistral3": mistral,
        "mistral4": mistral,
        "muse_spark": dict(
            layer_rope_theta=[1e4, 1e4, 0] * 2, rope_parameters=dict(rope_theta=1e4), output_multiplier=0.2,
            final_logit_softcapping=20.0, post_norm_eps=1e-8, num_shared_experts=0,
        ),
        "nanbeige:loops": dict(num_loops=2),
        "nemotron-nas": dict(block_configs=[dict(attention=attention, ffn=ffn) for attention, ffn in blocks]),
        "nemotron_h": dict(
            hybrid_override_pattern=list("ME*ME-"), routed_scaling_factor=1.5, norm_topk_prob=True
        ),
        "olmo_hybrid": dict(
            linear_allow_neg_eigval=True, layer_types=["linear_attention", "linear_attention", "full_attention"] * 2
        ),
        "openelm": dict(
            ffn_dim_divisor=8, num_query_heads=[4] * 6, num_kv_heads=[2] * 6, ffn_multipliers=[1.0] * 6
        ),
        "phi": dict(partial_rotary_factor=0.5),
        "phi3small": dict(dense_attention_every_n_layers=2, gegelu_limit=20.0, vocab_size=100352),
        "phimoe": _longrope(unit // 2),
        "plamo": dict(n_shared_head=2),
        "plamo2": dict(mamba_step=3),
        "qwen3_5": dict(num_experts=0),
        "recurrent_gemma": dict(
            conv1d_width=4, logits_soft_cap=30.0, num_key_value_heads=1,
            block_types=["recurrent", "recurrent", "attention"],
        ),
        "rwkv7": _same(8, "a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim"),
        "spark2_5": dict(rope_parameters=ropes),
        "step3p5": dict(
            moe_layers_enum="1,2,3,4,5", attention_other_setting=dict(num_attention_heads=4, num_attention_groups=2)
        ),
    }  # fmt: skip


def _longrope(size: int) -> dict[str, Any]:
    factors = dict(long_factor=[1.0] * size, short_factor=[1.0] * size)
    mscales = dict(long_mscale=1.2, short_mscale=1.2)
    return dict(rope_scaling=dict(type="longrope", original_max_position_embeddings=512, **factors, **mscales))
