"""Describes a checkpoint: what a plan needs to know, and which tensors a shard needs. Reads headers only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32
from worker.errors import ModelError
from worker.model.build import Absent, build, tensors_of_module
from worker.model.checkpoint import Checkpoint
from worker.model.families import mask_token_of
from worker.model.modelspec import LayerSpec, ModelSpec
from worker.model.module_tree import ModuleTree, is_text, layer_in_checkpoint, module_tree_of
from worker.model.probe_pass import ModelInfo, probe

_DTYPES = {mx.float32: DTYPE_FLOAT32, mx.float16: DTYPE_FLOAT16, mx.bfloat16: DTYPE_BFLOAT16}
_CONTEXTS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "model_max_length", "n_ctx",
)  # fmt: skip
_DEFAULT_CONTEXT = 4096
_CHOSEN = (  # how many experts a token is sent to, by the names that configurations have for it
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
)  # fmt: skip

FRONT, BACK = -1, -2  # places beside the numbers of layers: the embedding, and norm and head


@dataclass(frozen=True)
class CheckpointLayout:
    """A checkpoint's model info, and where its tensors go. Holds no array."""

    info: ModelInfo
    sizes: dict[int, int]  # bytes in memory, by layer, FRONT and BACK
    places: dict[str, int]  # by name, of the checkpoint's tensors that are part of the model
    idle: dict[int, int]  # bytes that one token does not read, by layer

    @cached_property
    def spec_layers(self) -> tuple[LayerSpec, ...]:
        layers = range(self.info.num_layers)
        return tuple(LayerSpec(self.sizes.get(i, 0), self.info.memories_of(i), self.idle.get(i, 0)) for i in layers)


_DESCRIBED: WeakKeyDictionary[Checkpoint, CheckpointLayout] = WeakKeyDictionary()


def layout_of(checkpoint: Checkpoint) -> CheckpointLayout:
    """Return a checkpoint's layout, which a probe pass finds once. Raises ModelError as `describe` does."""
    if checkpoint not in _DESCRIBED:
        _DESCRIBED[checkpoint] = _describe(checkpoint)
    return _DESCRIBED[checkpoint]


def shard_tensors(checkpoint: Checkpoint, start: int, end: int) -> list[str]:
    """Return the names, as in the checkpoint, of all tensors that the shard [start, end) needs."""
    found = layout_of(checkpoint)
    is_last = end == found.info.num_layers
    wanted = {*range(start, end)}
    wanted |= {FRONT} if start == 0 or (is_last and found.info.tied) else set()
    wanted |= {BACK} if is_last else set()
    return [name for name, place in found.places.items() if place in wanted]


def describe(checkpoint: Checkpoint) -> ModelSpec:
    """Return everything that a plan needs, from configuration and headers.

    Raises:
        ModelError: the model cannot be cut, or configuration and tensors do not fit together.
    """
    found = layout_of(checkpoint)
    info = found.info
    return ModelSpec(
        name=checkpoint.name,
        family=checkpoint.config["model_type"],
        layers=found.spec_layers,
        embed_bytes=found.sizes.get(FRONT, 0),
        head_bytes=found.sizes.get(BACK, 0),
        tied=info.tied,
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        context=_first_count(checkpoint.config, _CONTEXTS, _DEFAULT_CONTEXT),
        dtype=_DTYPES[info.dtype],
        mask_token=mask_token_of(checkpoint.config, info.vocab_size),
        int8_refusal=info.int8_refusal,
        rotating_refusal=info.rotating_refusal,
    )


def _describe(checkpoint: Checkpoint) -> CheckpointLayout:
    unread = Absent()
    model = build(checkpoint, unread)
    tree, parameters = module_tree_of(model), tensors_of_module(model)
    sizes: dict[int, int] = {}
    for name, array in parameters:
        place = _place(tree, name)
        sizes[place] = sizes.get(place, 0) + array.nbytes
    unchanged = {own: _place(tree, name) for name, array in parameters if (own := unread.name_of(array))}
    num_chosen = _first_count(checkpoint.config, _CHOSEN, 0)
    idle = {number: _idle_bytes(layer, num_chosen) for number, layer in enumerate(tree.layers)} if num_chosen else {}
    try:
        info = probe(model)
    except ModelError as error:
        what = f"a model of type {checkpoint.config['model_type']} cannot be cut between its layers"
        raise ModelError(f"{checkpoint.name}: {what}: {error.message}; run it by mlx-lm on one machine") from error
    if info.dtype not in _DTYPES:
        raise ModelError(
            f"{checkpoint.name}: its hidden states are {info.dtype}; expected float32, float16 or bfloat16"
        )
    places = dict(_places(checkpoint, tree, unchanged))
    if info.tied:
        places = {name: place for name, place in places.items() if name in unchanged or "lm_head." not in name}
    return CheckpointLayout(info, sizes, places, idle)


def _places(checkpoint: Checkpoint, tree: ModuleTree, unchanged: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Yield where each tensor goes: as its parameter if it is `unchanged`, else by its own name."""
    embedding = {path.rpartition(".")[2] for path, _ in tree.front}
    for name in checkpoint.tensors:
        if name in unchanged:
            yield name, unchanged[name]
        elif is_text(name):
            layer = layer_in_checkpoint(name)
            if layer is None:
                yield name, FRONT if embedding & set(name.split(".")) else BACK
            elif layer < len(tree.layers):
                yield name, layer


def _place(tree: ModuleTree, parameter: str) -> int:
    if (layer := tree.layer_of(parameter)) is not None:
        return layer
    return FRONT if tree.is_front(parameter) else BACK


def _idle_bytes(layer: Any, num_chosen: int) -> int:
    """Return the bytes of a layer's experts that a token is not sent to, if it is sent to `num_chosen`."""
    idle = 0
    for module in layer.modules():
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear) and "weight" in module:
            num_experts = module.weight.shape[0]
            held = sum(array.nbytes for array in module.parameters().values())
            idle += held * max(0, num_experts - num_chosen) // num_experts
    return idle


def _first_count(config: dict[str, Any], keys: Sequence[str], default: int) -> int:
    """Return the first of these keys that holds a number above 0, in the text model's configuration if it has one."""
    text = config.get("text_config")
    parts = (text if isinstance(text, dict) else {}, config)
    found = (part[key] for part in parts for key in keys if isinstance(part.get(key), int) and part[key] > 0)
    return int(next(found, default))
