"""A model's module tree: its list of layers and the modules before and behind it, whatever the type of the model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.errors import ModelError
from worker.model.stub_layers import modules_in

ModulePart = tuple[nn.Module, str]  # a module and the name of one of its parts

# The names of layers in checkpoints, and of parts that never belong to the text model: both as whole steps of a path.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_NOT_TEXT = re.compile(
    r"(?:^|\.)(?:vision_tower|vision_model|vision_encoder|vision_embedder|visual|vit|vision|audio_tower|audio_model|audio|"
    r"multi_modal_projector|mm_projector|embed_vision|embed_audio|image_newline|patch_merge_mlp|aligner|connector|mtp\w*)\."
)


@dataclass(frozen=True)
class ModuleTree:
    """Where the parts of a model are. `front` parts hold an embedding, all others beside the layers are `back`."""

    path: str  # of the list of layers: "model.layers"
    layers: list[Any]
    front: tuple[tuple[str, ModulePart], ...]  # each with its path
    back: tuple[tuple[str, ModulePart], ...]

    def layer_of(self, parameter: str) -> int | None:
        """Return the layer of a parameter, by its name in the model; None outside of the layers."""
        rest = parameter.removeprefix(f"{self.path}.")
        number = rest.partition(".")[0]
        return int(number) if rest != parameter and number.isdigit() else None

    def is_front(self, parameter: str) -> bool:
        return any(parameter == path or parameter.startswith(f"{path}.") for path, _ in self.front)


def module_tree_of(model: Any) -> ModuleTree:
    """Find the parts of one of mlx-lm's models.

    Raises:
        ModelError: it has no list of layers.
    """
    try:
        first = model.layers[0]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ModelError("has no list of layers") from error
    path, layers = next(
        (f"{path}.{key}".lstrip("."), value)
        for path, module in model.named_modules()
        for key, value in module.items()
        if isinstance(value, list) and any(item is first for item in value)
    )
    parts = list(_parts_around(model, path, layers))
    front = tuple((path, place) for path, place, has_embedding in parts if has_embedding)
    return ModuleTree(path, layers, front, tuple((path, place) for path, place, has_one in parts if not has_one))


def final_norm(tree: ModuleTree) -> nn.Module:
    """Return the norm behind the layers. Raises ModelError if that is not exactly one module."""
    found = [parent[key] for _, (parent, key) in tree.back if "norm" in key or key == "ln_f"]
    if len(found) != 1 or not isinstance(found[0], nn.Module):
        raise ModelError("has no single norm behind its layers, whose output embeddings and draft heads take")
    return found[0]


def layer_in_checkpoint(name: str) -> int | None:
    """Return the layer of a checkpoint's tensor, by its name there; None outside of the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def is_text(name: str) -> bool:
    """Return whether a tensor may belong to the text model: not to a tower, a projector or a prediction layer."""
    return _NOT_TEXT.search(name) is None


def _parts_around(model: Any, path: str, layers: list[Any]) -> Iterator[tuple[str, ModulePart, bool]]:
    """Yield the parts beside the layers of the modules around them: path, place, and whether it has an embedding."""
    *steps, _ = path.split(".")
    trunk = [("", model)]
    for step in steps:
        above, module = trunk[-1]
        trunk.append((f"{above}.{step}".lstrip("."), module[step]))
    for above, parent in trunk:
        for key, value in parent.items():
            modules = modules_in(value)
            inside = value is layers or any(value is module for _, module in trunk)
            if inside or key.startswith("_") or not (modules or isinstance(value, mx.array)):
                continue
            inner = [each for module in modules for each in module.modules()]
            has_embedding = any(isinstance(each, nn.Embedding | nn.QuantizedEmbedding) for each in inner)
            yield f"{above}.{key}".lstrip("."), (parent, key), has_embedding
