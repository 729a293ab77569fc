"""The layouts of large families on the hub, in tiny."""

import mlx.core as mx

from tests.integration.configs import (
    COMMON,
    ERNIE,
    FP8,
    GEMMA,
    GLM,
    GPT_OSS,
    INDEXED,
    INSIDE,
    INT4,
    LATENT,
    LINEAR,
    LINEAR_MOE,
    LLAMA_4,
    MIMO,
    MINIMAX,
    MINIMAX_3,
    MISTRAL_4,
    MISTRAL_YARN,
    QWEN_MOE,
    STEP,
    TOWER,
    wrapped,
)
from tests.integration.layouts import (
    Layout,
    convolutions_first,
    experts_apart,
    experts_fused,
    experts_in_int4,
    experts_in_mxfp4,
    latents_joined,
    matrices_in_awq,
    matrices_in_fp8,
    matrices_in_mxfp8,
    matrices_in_scaled_fp8,
    norms_around_zero,
    renamed,
)
from tests.tiny import VOCAB

_NORMS = (
    ".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight", ".q_norm.weight",
    ".k_norm.weight",
)  # fmt: skip
_NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_PREDICTOR = ("embed_tokens.weight", "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
              "self_attn.o_proj.weight", "mlp.experts.0.gate_proj.weight")  # fmt: skip


def _predictor(layer: str) -> tuple[str, ...]:
    """A layer that predicts one token more."""
    return tuple(f"{layer}.{name}" for name in _PREDICTOR)


PUBLISHED: dict[str, Layout] = {
    "gpt-oss, mxfp4": Layout(
        GPT_OSS | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
        (experts_in_mxfp4,),
        dtype=mx.bfloat16,
    ),
    "DeepSeek-V3, fp8": Layout(
        LATENT | {"quantization_config": FP8},
        (latents_joined, experts_apart(), matrices_in_fp8),
        _predictor("model.layers.61"),
        mx.bfloat16,
    ),
    "DeepSeek-V3.2, fp8": Layout(
        INDEXED | {"model_type": "deepseek_v32", "quantization_config": FP8},
        (latents_joined, experts_apart(), matrices_in_fp8),
        _predictor("model.layers.3"),
        mx.bfloat16,
    ),
    "GLM-5": Layout(
        INDEXED | {"model_type": "glm_moe_dsa", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        (latents_joined, experts_apart()),
        _predictor("model.layers.3"),
    ),
    "Kimi-K2, fp8": Layout(
        LATENT | {"model_type": "kimi_k2", "quantization_config": FP8},
        (latents_joined, experts_apart(), matrices_in_fp8),
        dtype=mx.bfloat16,
    ),
    "Kimi-K2-Thinking, int4": Layout(
        LATENT | {"model_type": "kimi_k2", "quantization_config": INT4},
        (latents_joined, experts_apart(), experts_in_int4),
    ),
    "Kimi-K2.5, int4": Layout(
        wrapped("kimi_k25", LATENT | {"model_type": "kimi_k2", "quantization_config": INT4}),
        (latents_joined, experts_apart(), experts_in_int4),
        (*TOWER, "mm_projector.proj.0.weight"),
    ),
    "Kimi-VL, by mlx-lm": Layout(
        wrapped("kimi_vl", LATENT), (experts_apart(),), (*TOWER, "multi_modal_projector.linear_1.weight")
    ),
    "MiniMax-M2, fp8": Layout(
        MINIMAX | {"quantization_config": FP8}, (experts_apart(_NUMBERED), matrices_in_fp8), dtype=mx.bfloat16
    ),
    "MiniMax-M3, mxfp8": Layout(
        wrapped("minimax_m3_vl", MINIMAX_3, quantization_config={"quant_method": "mxfp8"}),
        (experts_apart(_NUMBERED), matrices_in_mxfp8),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "patch_merge_mlp.linear_1.weight"),
        mx.bfloat16,
    ),
    "Mistral Small 4, fp8": Layout(
        wrapped("mistral3", MISTRAL_4 | {"quantization_config": FP8 | {"weight_block_size": None}}),
        (latents_joined, experts_fused("switch_mlp", transposed=False), matrices_in_scaled_fp8, renamed(*INSIDE)),
        ("model.vision_tower.ln_pre.weight", "model.multi_modal_projector.norm.weight"),
        mx.bfloat16,
    ),
    "MiMo-V2-Flash, fp8": Layout(
        MIMO | {"quantization_config": FP8},
        (experts_apart(), matrices_in_fp8),
        ("model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.self_attn.o_proj.weight"),
        mx.bfloat16,
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
        (experts_apart(), convolutions_first, norms_around_zero(*_NORMS)),
        ("mtp.fc.weight", "mtp.layers.0.self_attn.o_proj.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"),
    ),
    "Qwen3.5": Layout(
        wrapped("qwen3_5", LINEAR | {"model_type": "qwen3_5_text", "tie_word_embeddings": True}),
        (convolutions_first, norms_around_zero(*_NORMS), renamed(*INSIDE)),
        (
            "model.visual.blocks.0.attn.qkv.weight",
            "model.visual.merger.norm.weight",
            "mtp.fc.weight",
            "mtp.norm.weight",
        ),
    ),
    "Qwen3.5-397B": Layout(
        wrapped("qwen3_5_moe", LINEAR_MOE | {"model_type": "qwen3_5_moe_text"}),
        (
            experts_fused("switch_mlp", transposed=False),
            convolutions_first,
            norms_around_zero(*_NORMS),
            renamed(*INSIDE),
        ),
        ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj"),
    ),
    "Qwen3-VL": Layout(
        wrapped("qwen3_vl", COMMON | {"model_type": "qwen3_vl_text"}),
        (renamed(*INSIDE),),
        ("model.visual.blocks.0.attn.qkv.weight", "model.visual.deepstack_merger_list.0.norm.weight"),
    ),
    "Qwen3-VL-235B": Layout(
        wrapped("qwen3_vl_moe", QWEN_MOE | {"model_type": "qwen3_vl_moe_text"}),
        (experts_fused("switch_mlp", transposed=True), renamed(*INSIDE)),
        ("model.visual.blocks.0.attn.qkv.weight",),
    ),
    "Llama 4": Layout(
        wrapped("llama4", LLAMA_4),
        (experts_fused("experts", transposed=True),),
        ("vision_model.model.layers.0.self_attn.q_proj.weight", "multi_modal_projector.linear_1.weight"),
    ),
    "Gemma 3": Layout(
        wrapped("gemma3", GEMMA, vocab_size=VOCAB),
        (lambda tensors: {name: array for name, array in tensors.items() if "lm_head" not in name},),
        (
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
            "multi_modal_projector.mm_input_projection_weight",
        ),
    ),
    "Mistral Small 3.1": Layout(
        wrapped("mistral3", COMMON | {"model_type": "mistral"}),
        (),
        (
            "vision_tower.transformer.layers.0.attention.q_proj.weight",
            "vision_tower.ln_pre.weight",
            "multi_modal_projector.linear_1.weight",
        ),
    ),
    "Ministral 3": Layout(
        wrapped("mistral3", MISTRAL_YARN),
        (renamed(*INSIDE),),
        (
            "model.vision_tower.transformer.layers.0.attention.q_proj.weight",
            "model.multi_modal_projector.norm.weight",
        ),
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
