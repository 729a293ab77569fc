"""Describes a checkpoint: what a plan needs to know, and which tensors a shard needs. Reads headers only."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32, DType
from worker.errors import ModelError
from worker.model.build import Absent, build, tensors_of_module
from worker.model.cache_spec import Memory
from worker.model.checkpoint import Checkpoint
from worker.model.draft_heads import FEATURE_TENSORS, head_kind, head_layer, mlx_dtype_of, read_head
from worker.model.families import canvas_training_of, mask_token_of
from worker.model.model_spec import LayerSpec, ModelSpec, text_config
from worker.model.module_tree import ModuleTree, is_text, layer_in_checkpoint, module_tree_of
from worker.model.probe_pass import ModelInfo, probe

DTYPES: dict[DType, mx.Dtype] = {  # of hidden states
    DTYPE_FLOAT32: mx.float32,
    DTYPE_FLOAT16: mx.float16,
    DTYPE_BFLOAT16: mx.bfloat16,
}
_ENUMS = {dtype: enum for enum, dtype in DTYPES.items()}
_CONTEXTS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "model_max_length", "n_ctx",
)  # fmt: skip
_DEFAULT_CONTEXT = 4096
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "num_query_heads")
_CHOSEN = (  # how many experts a token is sent to, by the names that configurations have for it
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
)  # fmt: skip

FRONT, BACK = -1, -2  # places beside the numbers of layers: the embedding, and norm and head


@dataclass(frozen=True)
class CheckpointLayout:
    """The description of a checkpoint's model and of the places of its tensors. Holds no array."""

    spec: ModelSpec
    places: dict[str, int]  # by name, of the checkpoint's tensors that are part of the model
    model_info: ModelInfo | None = None  # None for a draft head

    @property
    def info(self) -> ModelInfo:
        assert self.model_info is not None
        return self.model_info


_LAYOUTS: WeakKeyDictionary[Checkpoint, CheckpointLayout] = WeakKeyDictionary()
_BY_DESCRIPTION: WeakValueDictionary[str, CheckpointLayout] = WeakValueDictionary()  # a recovery opens the model again


def layout_of(checkpoint: Checkpoint) -> CheckpointLayout:
    """Return a checkpoint's layout, from configuration and headers; it is found once while a node holds the model.

    Raises:
        ModelError: the model cannot be cut, or configuration and tensors do not fit together.
    """
    if checkpoint not in _LAYOUTS:
        description = checkpoint.description
        found = _BY_DESCRIPTION.get(description) or _layout(checkpoint)
        _LAYOUTS[checkpoint] = _BY_DESCRIPTION[description] = found
    return _LAYOUTS[checkpoint]


def describe(checkpoint: Checkpoint) -> ModelSpec:
    """Return all that a plan needs, of a model and its drafter or of a draft head. Raises ModelError as `layout_of`."""
    spec = layout_of(checkpoint).spec
    return replace(spec, drafter=describe(checkpoint.drafter)) if checkpoint.drafter else spec


def describe_model(checkpoint: Checkpoint) -> ModelSpec:
    """Return the same of a model. Raises ModelError for a draft head, and as `layout_of` does."""
    spec = describe(checkpoint)
    if spec.head:
        raise ModelError(f"{spec.name} is a draft head, not a model; give it as --draft-model")
    return spec


def shard_tensors(checkpoint: Checkpoint, start: int, end: int) -> list[str]:
    """Return the names, as in the checkpoint, of all tensors that the shard [start, end) needs."""
    found = layout_of(checkpoint)
    is_last = end == found.spec.num_layers
    wanted = {*range(start, end)}
    wanted |= {FRONT} if found.spec.has_embedding(start, end, serves_head=checkpoint.embeds_last) else set()
    wanted |= {BACK} if is_last else set()
    return [name for name, place in found.places.items() if place in wanted]


def _layout(checkpoint: Checkpoint) -> CheckpointLayout:
    config, unread = checkpoint.config, Absent()
    if head_kind(checkpoint):
        return _head_layout(checkpoint)
    model = build(checkpoint, unread)
    tree, parameters = module_tree_of(model), tensors_of_module(model)
    sizes: Counter[int] = Counter()
    for name, array in parameters:
        sizes[_place(tree, name)] += array.nbytes
    unchanged = {own: _place(tree, name) for name, array in parameters if (own := unread.name_of(array))}
    num_chosen = [_first_count(config, _CHOSEN, 0, layer) for layer in range(len(tree.layers))]
    idle = [_idle_bytes(layer, num) if num else 0 for layer, num in zip(tree.layers, num_chosen, strict=True)]
    try:
        info = probe(model)
    except ModelError as error:
        what = f"a model of type {config['model_type']} cannot be cut between its layers"
        raise ModelError(f"{checkpoint.name}: {what}: {error.message}; run it by mlx-lm on one machine") from error
    if info.dtype not in _ENUMS:
        raise ModelError(
            f"{checkpoint.name}: its hidden states are {info.dtype}; expected float32, float16 or bfloat16"
        )
    places = dict(_places(checkpoint, tree, unchanged))
    if info.tied:
        places = {name: place for name, place in places.items() if name in unchanged or "lm_head." not in name}
    spec = ModelSpec(
        name=checkpoint.name,
        family=config["model_type"],
        layers=tuple(
            LayerSpec(
                *(sizes[i], memories, idle[i]),
                _num_products(tree.layers[i], num_chosen[i]),
                _num_attended(config, i, memories),
            )
            for i in range(info.num_layers)
            for memories in [info.memories_of(i)]
        ),
        embed_bytes=sizes[FRONT],
        head_bytes=sizes[BACK],
        tied=info.tied,
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        context=_first_count(config, _CONTEXTS, _DEFAULT_CONTEXT),
        dtype=_ENUMS[info.dtype],
        mask_token=mask_token_of(config, info.vocab_size),
        canvas=canvas_training_of(config, info.vocab_size, checkpoint.generation_config),
        quantised_refusal=info.quantised_refusal,
        rotating_refusal=info.rotating_refusal,
    )
    return CheckpointLayout(spec, places, info)


def _head_layout(checkpoint: Checkpoint) -> CheckpointLayout:
    """Return the layout of a draft head: what tapping stages need of it is its front."""
    head = read_head(checkpoint)
    places = {name: FRONT if name.startswith(FEATURE_TENSORS) else BACK for name in checkpoint.tensors}
    places |= {name: layer for name in places if (layer := head_layer(name)) is not None}
    sizes: Counter[int] = Counter()
    for name, place in places.items():
        sizes[place] += checkpoint.tensors[name].nbytes
    windows = head.windows or (None,) * head.num_layers
    item = mlx_dtype_of(checkpoint).size
    memories = [Memory(window, head.num_kv_heads, head.head_dim, head.head_dim, item) for window in windows]
    spec = ModelSpec(
        name=checkpoint.name,
        family=head.kind,
        layers=tuple(LayerSpec(sizes[layer], (memory,)) for layer, memory in enumerate(memories)),
        embed_bytes=sizes[FRONT],
        head_bytes=sizes[BACK],
        tied=False,
        hidden_size=head.target_hidden_size,
        vocab_size=0,
        context=_first_count(checkpoint.config, _CONTEXTS, _DEFAULT_CONTEXT),
        dtype=_ENUMS[mlx_dtype_of(checkpoint)],
        head=head,
    )
    return CheckpointLayout(spec, places)


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


def _num_products(layer: Any, num_chosen: int) -> int:
    """Return the multiplications per row by a layer's matrices, each token being sent to `num_chosen` experts."""
    found = 0
    for module in layer.modules():
        if "weight" in module and (weight := module.weight).ndim > 1:
            num = weight.size * 32 // module.bits if "scales" in module else weight.size
            experts = weight.shape[0] if isinstance(module, SwitchLinear | QuantizedSwitchLinear) else 1
            found += num * min(num_chosen or experts, experts) // experts
    return found


def _num_attended(config: dict[str, Any], layer: int, memories: Sequence[Memory]) -> int:
    """Return the multiplications of attention per row and earlier token, by the configuration's sizes of a head."""
    heads = _first_count(config, _HEADS, 0, layer)
    whole = [memory.key_size + memory.value_size for memory in memories if memory.window is None and memory.heads]
    latent = [_first_count(config, (name,), 0) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    return heads * (sum(latent) if all(latent) and whole else sum(whole))


def _first_count(config: dict[str, Any], keys: Sequence[str], default: int, layer: int = 0) -> int:
    """Return the first of these keys that holds a number above 0, in the text model's configuration if it has one.

    Of a list it is the layer's entry.
    """
    values = (part.get(key) for part in (text_config(config), config) for key in keys)
    counts = (each[layer] if isinstance(each, list) and layer < len(each) else each for each in values)
    return int(next((each for each in counts if isinstance(each, int) and each > 0), default))
