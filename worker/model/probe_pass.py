"""A probe pass: one forward of a whole model, not computed, that shows whether and how the model can be cut.

It admits or refuses a model type that no test has seen, with the reason found.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from worker.errors import ModelError, first_line
from worker.model.cache_spec import Memory, group_size
from worker.model.module_tree import ModuleTree, module_tree_of
from worker.model.stub_layers import RunLayer, StubEmbedding, as_returned, drop_part, first_part, install_gates
from worker.platform.machine import attends_quantised

_ROWS = 11  # of the pass: several, so that masks are made, and no size that a model has
_FAILURES = (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError)

Entry = Memory | tuple[Memory, ...]  # one of the model's own list of caches: a single one, or several together


@dataclass(frozen=True)
class ModelInfo:
    """Plain facts about a model that can be cut; nothing here holds an array."""

    num_layers: int
    shapes: tuple[tuple[int, ...], ...]  # of a row of each tensor that travels: the hidden state's first
    vocab_size: int
    dtype: mx.Dtype  # of hidden states
    returns: tuple[int, ...]  # how many parts each layer's result has; 0 for an array by itself
    entries: tuple[Entry, ...]  # the model's own list of caches
    layer_of_entry: tuple[int, ...]  # the embedding's own cache belongs to layer 0
    tied: bool  # whether the head needs the embedding
    quantised_refusal: str = ""  # why caches cannot be kept in 8 or 4 bits
    rotating_refusal: str = ""  # why caches cannot drop tokens

    @property
    def hidden_size(self) -> int:
        """Numbers of a row that travels between stages."""
        return sum(map(math.prod, self.shapes))

    def entries_of(self, start: int, end: int) -> list[int]:
        """Return the numbers of the caches of layers [start, end)."""
        return [number for number, layer in enumerate(self.layer_of_entry) if start <= layer < end]

    def memories_of(self, layer: int) -> tuple[Memory, ...]:
        entries = [self.entries[number] for number in self.entries_of(layer, layer + 1)]
        return tuple(memory for entry in entries for memory in (entry if isinstance(entry, tuple) else (entry,)))


def strip_front(tree: ModuleTree, info: ModelInfo) -> None:
    """Replace the embedding by a stub, which is never computed."""
    for _, (parent, key) in tree.front:
        setattr(parent, key, StubEmbedding(info.shapes[0], info.dtype))


@dataclass(frozen=True)
class _Call:
    """How one layer was called, and what it returned."""

    index: int
    arguments: Sequence[tuple[str, Any]]  # by name, "" if positional
    result: Any

    def takes(self, value: Any) -> bool:
        return any(other is value for _, other in self.arguments)


def probe(model: Any) -> ModelInfo:
    """Probe a whole model; nothing is computed. The model is unusable afterwards.

    Raises:
        ModelError: the model cannot be cut between its layers; the message says why, without the model's name.
    """
    tree, caches = module_tree_of(model), make_prompt_cache(model)
    num_layers = len(tree.layers)
    if len(model.layers) != num_layers:
        raise ModelError("its layers are in two lists")
    calls: list[_Call] = []

    def record(index: int, run: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = run(*args, **kwargs)
        calls.append(_Call(index, [*(("", arg) for arg in args), *kwargs.items()], result))
        return result

    install_gates(tree.layers, record)
    try:
        logits = model(_ids(), cache=caches)
    except _FAILURES as error:
        raise ModelError(f"its forward fails: {first_line(error)}") from error
    if not calls:
        raise ModelError("its forward takes its layers apart instead of calling them")
    if [call.index for call in calls] != list(range(num_layers)):
        raise ModelError(f"it calls its layers in the order {_listed([call.index for call in calls])}")
    owners = list(_owners(calls, caches))
    shapes = _travelling(calls, caches)
    hidden = [first_part(call.result) for call in calls]
    if len({array.dtype for array in hidden}) > 1 or len({array.shape for array in hidden}) > 1:
        raise ModelError(
            "its hidden states change their shape or dtype on the way: its tensors may be of several dtypes"
        )
    info = ModelInfo(
        num_layers=num_layers,
        shapes=shapes,
        vocab_size=logits.shape[-1],
        dtype=hidden[0].dtype,
        returns=tuple(len(call.result) if isinstance(call.result, tuple | list) else 0 for call in calls),
        entries=tuple(_entry(cache, of_embedding=owner is None) for cache, owner in zip(caches, owners, strict=True)),
        layer_of_entry=tuple(owner or 0 for owner in owners),  # the embedding is where layer 0 is
        tied=False,
    )
    info = replace(
        info,
        quantised_refusal=_quantised_refusal(model, info),
        rotating_refusal=_trial(model, info, lambda memory: RotatingKVCache(_ROWS // 2, keep=1)),
        tied=_needs_embedding(model, tree, info),
    )
    _require_back_behind(model, tree)
    return info


def _ids() -> mx.array:
    return mx.zeros((1, _ROWS), mx.int32)


def _travelling(calls: Sequence[_Call], caches: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a row of the tensors that every layer hands to the next: the first parts of its result.

    A layer may also take masks, a cache, and small numbers per row, which every stage can make for itself.

    Raises:
        ModelError: a layer takes something else; the message names the layer that gave it.
    """
    last = first_part(calls[-1].result).shape
    if len(last) != 3 or last[1] != _ROWS:
        raise ModelError(f"its hidden states have shape {list(last)}, not a row for each of {_ROWS} tokens")
    travelling: set[tuple[tuple[int, ...], ...]] = {((last[-1],),)} if len(calls) == 1 else set()
    for call in calls[1:]:
        came = [part for part in _parts(calls[call.index - 1].result) if isinstance(part, mx.array)]
        taken = [call.takes(part) for part in came]
        if not taken[0]:
            raise ModelError(f"layer {call.index} does not take what layer {call.index - 1} returns as it is")
        rows = came[: 1 + max(number for number, is_taken in enumerate(taken) if is_taken)]
        if any(part.shape[:2] != rows[0].shape[:2] for part in rows):
            raise ModelError(_refusal(rows[-1], calls, call.index))
        if any(part.dtype != rows[0].dtype for part in rows):  # side by side they would get the same dtype
            raise ModelError(f"layer {call.index} takes results of layer {call.index - 1} of more than one dtype")
        travelling.add(tuple(part.shape[2:] for part in rows))
        for name, value in call.arguments:
            plain = value is None or isinstance(value, bool | int | float | str) or "mask" in name
            known = any(value is other for other in (*rows, *caches))
            small = isinstance(value, mx.array) and rows[0].shape[-1] not in value.shape[1:]
            own = small and (value.ndim <= 2 or value.shape[-2:] == (_ROWS, _ROWS))  # numbers, or a mask
            if not (plain or known or (own and _giver(value, calls, call.index - 1) is None)):
                raise ModelError(_refusal(value, calls, call.index))
    if len(travelling) > 1:
        raise ModelError("its layers hand on different tensors")
    return travelling.pop()


def _refusal(value: Any, calls: Sequence[_Call], index: int) -> str:
    giver = _giver(value, calls, index)
    whose = "from before the layers" if giver is None else f"of layer {giver}"
    return f"layer {index} takes a result {whose} besides a hidden state"


def _giver(value: Any, calls: Sequence[_Call], before: int) -> int | None:
    """Return the layer among those before that returned this value."""
    for call in calls[:before]:
        if any(part is value for part in _flat(call.result)):
            return call.index
    return None


def _owners(calls: Sequence[_Call], caches: Sequence[Any]) -> Iterator[int | None]:
    """Yield the layer of each cache; None for the embedding's own."""
    for cache in caches:
        owners = [call.index for call in calls if call.takes(cache)]
        if len(owners) > 1:
            raise ModelError(f"layer {owners[1]} takes keys and values of layer {owners[0]}")
        yield owners[0] if owners else None


def _entry(cache: Any, *, of_embedding: bool) -> Entry:
    several = cache.caches if isinstance(cache, CacheList) else [cache]
    memories = tuple(replace(_memory(each), of_embedding=of_embedding) for each in several)
    return memories if isinstance(cache, CacheList) else memories[0]


def _memory(cache: Any) -> Memory:
    """Return what one of mlx-lm's own caches holds after the pass."""
    if isinstance(cache, ArraysCache):
        arrays: Sequence[mx.array | None] = cache.cache
        nbytes = sum(array.nbytes for array in arrays if array is not None)
        return Memory(state_arrays=len(cache.cache), state_bytes=nbytes)
    if type(cache) not in (KVCache, RotatingKVCache, ChunkedKVCache):
        raise ModelError(f"its caches are of a kind of their own, {type(cache).__name__}")
    if cache.keys is None:  # its layer never uses it
        return Memory()
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    _, heads, _, key_size = cache.keys.shape
    return Memory(window, heads, key_size, cache.values.shape[-1], cache.keys.dtype.size)


def _quantised_refusal(model: Any, info: ModelInfo) -> str:
    """Return why this model's caches cannot be quantised, by a pass over such caches; "" if they can."""
    memories = [memory for layer in range(info.num_layers) for memory in info.memories_of(layer) if memory.heads]
    sizes = {size for memory in memories for size in (memory.key_size, memory.value_size)}
    if odd := sorted(size for size in sizes if size == 0 or size % 32):
        return f"quantised rows need heads of a multiple of 32 numbers, but they have {odd[0]}"
    refusal = _trial(
        model, info, lambda memory: QuantizedKVCache(group_size(memory.key_size, memory.value_size), bits=8)
    )
    return refusal or ("" if attends_quantised() else "MLX cannot multiply by quantised rows on this device")


def _trial(model: Any, info: ModelInfo, make: Callable[[Memory], Any]) -> str:
    """Return what fails in a pass and a step with these caches in place of the model's own; "" if nothing does."""
    memories = [entry for entry in info.entries if not isinstance(entry, tuple)]
    if len(memories) < len(info.entries):
        return "a layer of it has several"
    if not any(memory.heads for memory in memories):
        return "it has no keys and values"
    caches = [ArraysCache(memory.state_arrays) if memory.state_arrays else make(memory) for memory in memories]
    try:
        model(_ids(), cache=caches)
        model(_ids()[:, :1], cache=caches)
    except (AttributeError, TypeError):  # Python's own message does not help users
        return "its attention cannot read them"
    except _FAILURES as error:
        return f"its attention cannot read them ({first_line(error)})"
    return ""


def _needs_embedding(model: Any, tree: ModuleTree, info: ModelInfo) -> bool:
    """Return whether norm and head fail without the embedding. Takes the embedding out."""
    strip_front(tree, info)
    given = mx.zeros((1, _ROWS, info.hidden_size), info.dtype)
    given = as_returned(given, info.shapes, info.returns[-1])
    problem, is_reached = _skip_layers(model, tree, given, (AttributeError,))
    if problem and not is_reached:
        raise ModelError(f"it asks its embedding for more than rows ({problem})")
    return bool(problem)


def _require_back_behind(model: Any, tree: ModuleTree) -> None:
    """Refuse a model whose parts of the last stage run before the layers. Takes norm and head out."""
    for _, (parent, key) in tree.back:
        drop_part(parent, key)
    problem, is_reached = _skip_layers(model, tree, None, _FAILURES)
    if problem and not is_reached:
        raise ModelError(f"a part behind its layers runs before them too ({problem})")


def _skip_layers(model: Any, tree: ModuleTree, given: Any, failures: tuple[type[Exception], ...]) -> tuple[str, bool]:
    """Run the forward with `given` as every layer's result.

    Returns:
        The text of its failure, "" if there is none, and whether it reached a layer. An exception's traceback would
        keep the model alive.
    """
    reached = []

    def skip(index: int, *call: Any) -> Any:
        reached.append(index)
        return given

    install_gates(tree.layers, skip)
    try:
        model(_ids(), cache=make_prompt_cache(model))
    except failures as error:
        return first_line(error), bool(reached)
    return "", True


def _parts(result: Any) -> Sequence[Any]:
    return result if isinstance(result, tuple | list) else [result]


def _flat(result: Any) -> Iterator[Any]:
    yield result
    if isinstance(result, tuple | list):
        for part in result:
            yield from _flat(part)
    elif isinstance(result, dict):
        for part in result.values():
            yield from _flat(part)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
