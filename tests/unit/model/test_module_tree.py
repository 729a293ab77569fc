"""Where the parts of a model are, by whatever names its type has for them."""

import mlx.nn as nn
import pytest

from tools.model_types.make import build_type
from worker.errors import ModelError
from worker.model.module_tree import is_text, module_tree_of


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential()])
def test_a_module_without_a_list_of_layers_is_refused(model: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"^has no list of layers$"):
        module_tree_of(model)


def test_towers_projectors_and_prediction_layers_are_not_text_and_all_else_may_be() -> None:
    other = """
        vision_tower.encoder.layers.0.mlp.weight model.visual.blocks.3.attn.qkv.weight
        model.vision_model.embeddings.weight multi_modal_projector.linear_1.weight
        model.audio_tower.layers.2.fc1.bias mtp.layers.0.mlp.weight language_model.mtp.fc.weight
    """
    text = """
        model.layers.0.mlp.gate_proj.weight language_model.model.embed_tokens.weight model.layers.0.visual_gate.weight
        model.subvision.weight lm_head.weight
    """
    assert not any(map(is_text, other.split())) and all(map(is_text, text.split()))


LAYERS_OF = {
    # type: the path of its layers, the parts before them, the parts behind them
    "llama": ("model.layers", ["model.embed_tokens"], ["model.norm"]),  # its head is tied
    "gpt2": ("model.h", ["model.wte", "model.wpe"], ["model.ln_f"]),
    "gpt_neox": ("model.h", ["model.embed_in"], ["model.embed_out", "model.final_layer_norm"]),
    "nemotron_h": ("backbone.layers", ["backbone.embeddings"], ["lm_head", "backbone.norm_f"]),
    "plamo": ("model.layers.layers", ["model.embed_tokens"], ["lm_head", "model.norm"]),
    "longcat_flash_ngram": ("model.layers", ["model.ngram_embeddings"], ["lm_head", "model.norm"]),
    "gemma3": (
        "language_model.model.layers",
        ["language_model.model.embed_tokens"],
        ["language_model.lm_head", "language_model.model.norm"],
    ),
}


@pytest.mark.parametrize("name", LAYERS_OF)
def test_layers_are_found_and_the_parts_before_and_behind_them(name: str) -> None:
    path, front, back = LAYERS_OF[name]
    model = build_type(name)[1]
    found = module_tree_of(model)
    assert (found.path, len(found.layers)) == (path, 6)
    assert all(one is other for one, other in zip(found.layers, model.layers, strict=True))
    assert [path for path, _ in found.front] == front and [path for path, _ in found.back] == back
    assert all(parent[key] is not None for _, (parent, key) in (*found.front, *found.back))
    assert found.layer_of(f"{path}.5.mlp.weight") == 5
    assert found.layer_of(f"{path}.x.weight") is found.layer_of(f"other.{path}.5.weight") is None
    assert all(found.is_front(f"{part}.weight") for part in front)
    assert not any(found.is_front(name) for name in (f"{back[0]}.weight", f"{front[0]}_norm.weight", f"{path}.0.a"))
