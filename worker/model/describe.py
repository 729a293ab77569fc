"""Reads what a plan needs of a checkpoint, and which tensors a shard of it needs. Headers only: reads no tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32
from worker.errors import ModelError
from worker.model.build import absent, build, tensors_of_module
from worker.model.checkpoint import Checkpoint
from worker.model.families import mask_token_of
from worker.model.headers import TensorInfo
from worker.model.model_info import ModelInfo
from worker.model.modelspec import LayerSpec, ModelSpec
from worker.model.module_tree import ModuleTree, is_text, layer_in_checkpoint, module_tree_of
from worker.model.probe_pass import probe

_DTYPES = {mx.float32: DTYPE_FLOAT32, mx.float16: DTYPE_FLOAT16, mx.bfloat16: DTYPE_BFLOAT16}
_CONTEXTS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "model_max_length", "n_ctx",
)  # fmt: skip
_DEFAULT_CONTEXT = 4096

FRONT, BACK = -1, -2  # beside the numbers of layers: the embedding, and norm and head


@dataclass(frozen=True)
class CheckpointLayout:
    """A checkpoint's info, and where its tensors go. Holds no array."""

    info: ModelInfo
    sizes: dict[int, int]  # bytes in memory, by layer, FRONT and BACK
    places: dict[str, int]  # of each of the checkpoint's tensors that is part of the model
    idle: dict[int, int]  # bytes that one token does not read, by layer

    @cached_property
    def spec_layers(self) -> tuple[LayerSpec, ...]:
        layers = range(self.info.num_layers)
        return tuple(LayerSpec(self.sizes.get(i, 0), self.info.memories_of(i), self.idle.get(i, 0)) for i in layers)


_DESCRIBED: WeakKeyDictionary[Checkpoint, CheckpointLayout] = WeakKeyDictionary()


def layout_of(checkpoint: Checkpoint) -> CheckpointLayout:
    """What one pass of the model shows, and its tensors' places; found once per checkpoint.

    Raises:
        ModelError: as `describe` does.
    """
    if checkpoint not in _DESCRIBED:
        _DESCRIBED[checkpoint] = _describe(checkpoint)
    return _DESCRIBED[checkpoint]


def shard_tensors(checkpoint: Checkpoint, start: int, end: int) -> list[str]:
    """Names, as in the checkpoint, of all tensors that the shard [start, end) needs."""
    found = layout_of(checkpoint)
    is_last = end == found.info.num_layers
    wanted = {*range(start, end)}
    wanted |= {FRONT} if start == 0 or (is_last and found.info.tied) else set()
    wanted |= {BACK} if is_last else set()
    return [name for name, place in found.places.items() if place in wanted]


def describe(checkpoint: Checkpoint) -> ModelSpec:
    """Everything a plan needs, from configuration and headers.

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
        context=_context(checkpoint.config),
        dtype=_DTYPES[info.dtype],
        mask_token=mask_token_of(checkpoint.config, info.vocab_size),
        int8_refusal=info.int8_refusal,
        rotating_refusal=info.rotating_refusal,
    )


def _describe(checkpoint: Checkpoint) -> CheckpointLayout:
    unread: dict[int, tuple[str, mx.array]] = {}  # by id, which lasts as long as the array is held

    def tensor(name: str, info: TensorInfo) -> mx.array:
        array = absent(name, info)
        unread[id(array)] = name, array
        return array

    model = build(checkpoint, tensor)
    tree = module_tree_of(model)
    parameters = tensors_of_module(model)
    sizes: dict[int, int] = {}
    for name, array in parameters:
        place = _place(tree, name)
        sizes[place] = sizes.get(place, 0) + array.nbytes
    as_they_are = {unread[id(array)][0]: _place(tree, name) for name, array in parameters if id(array) in unread}
    idle = idle_bytes(tree, checkpoint.config)
    try:
        info = probe(model)
    except ModelError as error:
        what = f"a model of type {checkpoint.config['model_type']} cannot be cut between its layers"
        raise ModelError(f"{checkpoint.name}: {what}: {error.message}; run it by mlx-lm on one machine") from error
    if info.dtype not in _DTYPES:
        raise ModelError(
            f"{checkpoint.name}: its hidden states are {info.dtype}; expected float32, float16 or bfloat16"
        )
    places = dict(_places(checkpoint, tree, as_they_are))
    if info.tied:
        places = {name: place for name, place in places.items() if name in as_they_are or "lm_head." not in name}
    return CheckpointLayout(info, sizes, places, idle)


def _places(checkpoint: Checkpoint, tree: ModuleTree, as_they_are: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Where the checkpoint's tensors go: as the parameter does, or by its own name if it becomes part of one."""
    embedding = {path.rpartition(".")[2] for path, _ in tree.front}
    for name in checkpoint.tensors:
        if name in as_they_are:
            yield name, as_they_are[name]
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


def _context(config: dict[str, Any]) -> int:
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        for key in _CONTEXTS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    return _DEFAULT_CONTEXT


# How many experts a token is sent to, by any name that configurations have for it.
_CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
)  # fmt: skip


def idle_bytes(tree: ModuleTree, config: dict[str, Any]) -> dict[int, int]:
    """By layer: the bytes of experts that a token is not sent to; none where the configuration does not tell."""
    chosen = _num_chosen(config)
    return {number: _idle(layer, chosen) for number, layer in enumerate(tree.layers)} if chosen else {}


def _idle(layer: Any, num_chosen: int) -> int:
    idle = 0
    for module in layer.modules():
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear) and "weight" in module:
            num_experts = module.weight.shape[0]
            held = sum(array.nbytes for array in module.parameters().values())
            idle += held * max(0, num_experts - num_chosen) // num_experts
    return idle


def _num_chosen(config: dict[str, Any]) -> int:
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        for key in _CHOSEN:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    return 0
