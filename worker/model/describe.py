"""Reads what a plan needs of a checkpoint, and which tensors a shard of it needs. Headers only: reads no tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32
from worker.errors import ModelError
from worker.model.anatomy import Anatomy
from worker.model.build import absent, build, tensors_of_module
from worker.model.checkpoint import Checkpoint
from worker.model.dry_pass import examine
from worker.model.experts import idle_bytes
from worker.model.families import mask_token_of
from worker.model.headers import TensorInfo
from worker.model.modelspec import LayerSpec, ModelSpec
from worker.model.skeleton import Skeleton, is_text, layer_in_checkpoint, skeleton_of

_DTYPES = {mx.float32: DTYPE_FLOAT32, mx.float16: DTYPE_FLOAT16, mx.bfloat16: DTYPE_BFLOAT16}
_CONTEXTS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "model_max_length", "n_ctx",
)  # fmt: skip
_DEFAULT_CONTEXT = 4096

FRONT, BACK = -1, -2  # beside the numbers of layers: the embedding, and norm and head


@dataclass(frozen=True)
class Described:
    """A checkpoint's anatomy, and where its tensors go. Holds no array."""

    anatomy: Anatomy
    sizes: dict[int, int]  # bytes in memory, by layer, FRONT and BACK
    places: dict[str, int]  # of each of the checkpoint's tensors that is part of the model
    idle: dict[int, int]  # bytes that one token does not read, by layer

    @cached_property
    def spec_layers(self) -> tuple[LayerSpec, ...]:
        layers = range(self.anatomy.num_layers)
        return tuple(LayerSpec(self.sizes.get(i, 0), self.anatomy.memories_of(i), self.idle.get(i, 0)) for i in layers)


_DESCRIBED: WeakKeyDictionary[Checkpoint, Described] = WeakKeyDictionary()


def described(checkpoint: Checkpoint) -> Described:
    """What one pass of the model shows, and its tensors' places; found once per checkpoint.

    Raises:
        ModelError: as `describe` does.
    """
    if checkpoint not in _DESCRIBED:
        _DESCRIBED[checkpoint] = _describe(checkpoint)
    return _DESCRIBED[checkpoint]


def shard_tensors(checkpoint: Checkpoint, start: int, end: int) -> list[str]:
    """Names, as in the checkpoint, of all tensors that the shard [start, end) needs."""
    found = described(checkpoint)
    is_last = end == found.anatomy.num_layers
    wanted = {*range(start, end)}
    wanted |= {FRONT} if start == 0 or (is_last and found.anatomy.tied) else set()
    wanted |= {BACK} if is_last else set()
    return [name for name, place in found.places.items() if place in wanted]


def describe(checkpoint: Checkpoint) -> ModelSpec:
    """Everything a plan needs, from configuration and headers.

    Raises:
        ModelError: the model cannot be cut, or configuration and tensors do not fit together.
    """
    found = described(checkpoint)
    anatomy = found.anatomy
    return ModelSpec(
        name=checkpoint.name,
        family=checkpoint.config["model_type"],
        layers=found.spec_layers,
        embed_bytes=found.sizes.get(FRONT, 0),
        head_bytes=found.sizes.get(BACK, 0),
        tied=anatomy.tied,
        hidden_size=anatomy.hidden_size,
        vocab_size=anatomy.vocab_size,
        context=_context(checkpoint.config),
        dtype=_DTYPES[anatomy.dtype],
        mask_token=mask_token_of(checkpoint.config, anatomy.vocab_size),
        int8_refusal=anatomy.int8_refusal,
        rotating_refusal=anatomy.rotating_refusal,
    )


def _describe(checkpoint: Checkpoint) -> Described:
    unread: dict[int, tuple[str, mx.array]] = {}  # by id, which lasts as long as the array is held

    def tensor(name: str, info: TensorInfo) -> mx.array:
        array = absent(name, info)
        unread[id(array)] = name, array
        return array

    model = build(checkpoint, tensor)
    skeleton = skeleton_of(model)
    parameters = tensors_of_module(model)
    sizes: dict[int, int] = {}
    for name, array in parameters:
        place = _place(skeleton, name)
        sizes[place] = sizes.get(place, 0) + array.nbytes
    as_they_are = {unread[id(array)][0]: _place(skeleton, name) for name, array in parameters if id(array) in unread}
    idle = idle_bytes(skeleton, checkpoint.config)
    try:
        anatomy = examine(model)
    except ModelError as error:
        what = f"a model of type {checkpoint.config['model_type']} cannot be cut between its layers"
        raise ModelError(f"{checkpoint.name}: {what}: {error.message}; run it by mlx-lm on one machine") from error
    if anatomy.dtype not in _DTYPES:
        raise ModelError(
            f"{checkpoint.name}: its hidden states are {anatomy.dtype}; expected float32, float16 or bfloat16"
        )
    places = dict(_places(checkpoint, skeleton, as_they_are))
    if anatomy.tied:
        places = {name: place for name, place in places.items() if name in as_they_are or "lm_head." not in name}
    return Described(anatomy, sizes, places, idle)


def _places(checkpoint: Checkpoint, skeleton: Skeleton, as_they_are: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Where the checkpoint's tensors go: as the parameter does, or by its own name if it becomes part of one."""
    embedding = {path.rpartition(".")[2] for path, _ in skeleton.front}
    for name in checkpoint.tensors:
        if name in as_they_are:
            yield name, as_they_are[name]
        elif is_text(name):
            layer = layer_in_checkpoint(name)
            if layer is None:
                yield name, FRONT if embedding & set(name.split(".")) else BACK
            elif layer < len(skeleton.layers):
                yield name, layer


def _place(skeleton: Skeleton, parameter: str) -> int:
    if (layer := skeleton.layer_of(parameter)) is not None:
        return layer
    return FRONT if skeleton.is_front(parameter) else BACK


def _context(config: dict[str, Any]) -> int:
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        for key in _CONTEXTS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    return _DEFAULT_CONTEXT
