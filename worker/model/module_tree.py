"""Skeleton: a model's list of layers, what stands before it and what behind, found without knowing the model."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.errors import ModelError

ModulePart = tuple[nn.Module, str]  # a module and the name of one of its parts

# Layers by any name that checkpoints have for them, and what of a checkpoint is never text: both by whole path steps.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_NOT_TEXT = re.compile(
    r"(?:^|\.)(?:vision_tower|vision_model|vision_encoder|vision_embedder|visual|vit|vision|audio_tower|audio_model|audio|"
    r"multi_modal_projector|mm_projector|embed_vision|embed_audio|image_newline|patch_merge_mlp|aligner|connector|mtp\w*)\."
)


@dataclass(frozen=True)
class ModuleTree:
    """Where the parts of a model are. `front` holds an embedding; all else beside the layers is `back`."""

    path: str  # of the list of layers: "model.layers"
    layers: list[Any]
    front: tuple[tuple[str, ModulePart], ...]  # each with its path
    back: tuple[tuple[str, ModulePart], ...]

    def layer_of(self, parameter: str) -> int | None:
        """The layer that a parameter of the model belongs to, by its name there."""
        rest = parameter.removeprefix(f"{self.path}.")
        number = rest.partition(".")[0]
        return int(number) if rest != parameter and number.isdigit() else None

    def is_front(self, parameter: str) -> bool:
        return any(parameter == path or parameter.startswith(f"{path}.") for path, _ in self.front)


def module_tree_of(model: Any) -> ModuleTree:
    """The parts of one of mlx-lm's models.

    Raises:
        ModelError: it has no list of layers, or an odd one.
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


def layer_in_checkpoint(name: str) -> int | None:
    """The layer that a tensor of a checkpoint belongs to, by its name there; None for all else."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def is_text(name: str) -> bool:
    """Whether a tensor of a checkpoint may belong to the text model: no tower, no projector, no prediction layers."""
    return _NOT_TEXT.search(name) is None


def drop_part(parent: nn.Module, key: str, besides: Sequence[nn.Module] = ()) -> None:
    """Take all arrays out of a part of a module; but not out of what these others have too."""
    part = parent[key]
    if isinstance(part, mx.array):
        del parent[key]
    for module in part if isinstance(part, list) else [part]:
        if isinstance(module, nn.Module):
            drop_arrays(module, besides)


def drop_arrays(module: nn.Module, besides: Sequence[nn.Module] = ()) -> None:
    """Take all arrays out of a module; but not out of what these others have too."""
    kept = {id(part) for other in besides for part in other.modules()}
    for part in module.modules():
        for key in [key for key, value in part.items() if isinstance(value, mx.array) and id(part) not in kept]:
            del part[key]


def _parts_around(model: Any, path: str, layers: list[Any]) -> Iterator[tuple[str, ModulePart, bool]]:
    """What the modules around the layers hold beside them: path, place, and whether an embedding is in it."""
    *steps, _ = path.split(".")
    trunk = [("", model)]
    for step in steps:
        above, module = trunk[-1]
        trunk.append((f"{above}.{step}".lstrip("."), module[step]))
    for above, parent in trunk:
        for key, value in parent.items():
            items = value if isinstance(value, list) else [value]
            modules = [item for item in items if isinstance(item, nn.Module)]
            inside = value is layers or any(value is module for _, module in trunk)
            if inside or key.startswith("_") or not (modules or isinstance(value, mx.array)):
                continue
            has_embedding = any(_is_embedding(m) for module in modules for m in module.modules())
            yield f"{above}.{key}".lstrip("."), (parent, key), has_embedding


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
