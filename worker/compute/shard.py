"""A shard: layers [start, end) of one mlx-lm model, cut out from outside.

Shapes: B slots, L window length, D hidden, V vocabulary, H heads, K head size, N rows with logits.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchLinear

from protos.brigade_pb2 import Cache
from worker.compute.batching import Attention, Lane, LaneWindow, View, flat
from worker.compute.grammar import Grammars
from worker.errors import ModelError
from worker.memory.layer_cache import LayerCall, RecurrentState
from worker.memory.slot_caches import Caches
from worker.model.build import Absent, build, tensors_of_module
from worker.model.checkpoint import Checkpoint
from worker.model.describe import layout_of, shard_tensors
from worker.model.families import LaneForm, lane_form, looks_at_positions, mask_token_of
from worker.model.headers import TensorInfo
from worker.model.module_tree import module_tree_of
from worker.model.probe_pass import ModelInfo, strip_front
from worker.model.stub_layers import RunLayer, as_returned, as_rows, drop_arrays, drop_part, install_gates
from worker.platform.machine import multiplies_experts
from worker.platform.mlx_memory import out_of_memory

_DIGEST_BYTES = 4 * 2**20  # of a tensor that are hashed at once


class Shard:
    """Layers [start, end), the embedding if first, the final norm and head if last."""

    def __init__(self, checkpoint: Checkpoint, start: int, end: int, held: dict[str, mx.array] | None = None) -> None:
        """Build the shard; its tensors stay unread until `materialise`.

        Args:
            held: `tensors` of another shard of the same checkpoint; those that are of no use here are freed.
        Raises:
            ModelError: a tensor is missing, left over, or of another shape than the configuration says.
        """
        self.info = layout_of(checkpoint).info
        self.start, self.end = start, end
        self.is_first, self.is_last = start == 0, end == self.info.num_layers
        reader = _Reader(checkpoint, shard_tensors(checkpoint, start, end))
        self._cut = CutModel(build(checkpoint, reader), self.info, start, end)
        if held:
            self._cut.replace({name: held[name] for name, _ in self._cut.tensors if name in held})
            held.clear()
        self.nbytes = sum(array.nbytes for _, array in self._cut.tensors)
        if unread := next((name for name, array in self._cut.tensors if reader.name_of(array)), None):
            raise ModelError(f"{checkpoint.name}: cannot tell which node needs tensor {unread}")
        _require_experts_here(checkpoint, self._cut)
        self.grammars = Grammars(checkpoint.folder, self.info.vocab_size)
        self.mask_token = mask_token_of(checkpoint.config, self.info.vocab_size)
        self._lane_form = lane_form(checkpoint.config)
        self._looks_at_positions = looks_at_positions(checkpoint.config)
        self._no_caches = Caches(self.info.entries, (), Cache())  # for norm and head, which have no cache
        self._cut.serve_lanes(self._lane_form)

    def make_caches(self, cache: Cache) -> Caches:
        """Return empty caches of this kind for one slot."""
        return Caches(self.info.entries, self.info.entries_of(self.start, self.end), cache)

    def __call__(self, x: mx.array, places: Sequence[LaneWindow], ids: mx.array | None = None) -> mx.array:
        """Run the layers over a lane, one window each of several slots, and append each window to its slot's caches.

        Args:
            x: token ids [1, sum L] on the first shard, hidden states [1, sum L, D] elsewhere, window after window.
            places: where each window goes.
            ids: token ids [1, sum L] on the other shards, for models whose layers look at them; 0 by default.
        Returns:
            Hidden states [1, sum L, D].
        """
        ids = mx.zeros(x.shape[:2], mx.int32) if ids is None else ids
        if len(places) == 1:
            place = places[0]
            place.caches.begin()
            place.caches.reserve(place.num_rows, place.positions, has_drafts=place.has_drafts)
            h = self._cut.run(x, ids, place.caches.listed)
            place.caches.settle(place.base + place.num_rows)
            return h
        lane = Lane(places)
        if self._looks_at_positions:
            whole = View(lane, [place.caches.listed for place in places])
            h = whole.run(self._cut.run, [x, ids, whole], {}, self._lane_form)
        else:
            h = self._cut.run(x, ids, lane.views())
        lane.settle()
        return h

    def logits(self, h: mx.array) -> mx.array:
        """Return the logits [N, V] float32 of hidden states [1, N, D] of the last layer. Last shard only.

        The MASK token's logit is minus infinity, so that it is never sampled.
        """
        logits = self._cut.logits(h, self._no_caches.listed)[0].astype(mx.float32)
        self._no_caches.cut(0)
        if self.mask_token is not None:
            logits[:, self.mask_token] = -mx.inf
        return logits

    def materialise(self, progress: Callable[[int], None]) -> None:
        """Read the shard's tensors from disk, one after another; `progress` takes the bytes that became resident.

        Raises:
            ModelError: a file ends early or cannot be read.
            OutOfMemory: the tensors do not fit.
        """
        layers = f"layers [{self.start}, {self.end})"
        for _, array in self._cut.tensors:
            try:
                mx.eval(array)
            except RuntimeError as error:
                named = out_of_memory(str(error), f"with {layers}, {self.nbytes / 2**30:.2f} GiB")
                raise named or ModelError(f"cannot read the tensors of {layers}: {error}") from error
            progress(array.nbytes)

    @property
    def tensors(self) -> dict[str, mx.array]:
        """The tensors held, by the model's own names, which are the same in every shard."""
        return dict(self._cut.tensors)

    def digests(self) -> dict[str, str]:
        """Return the BLAKE2b digest of every tensor held, by name."""
        found: dict[str, str] = {}
        for _ in self.digest_into(found):
            pass
        return found

    def digest_into(self, found: dict[str, str]) -> Generator[None, None, None]:
        """Fill `found` with what `digests` returns, yielding every few milliseconds."""
        for name, array in self._cut.tensors:
            raw = np.array(array.reshape(-1).view(mx.uint8), copy=False)
            digest = hashlib.blake2b(digest_size=16)
            for first in range(0, len(raw), _DIGEST_BYTES):
                digest.update(raw[first : first + _DIGEST_BYTES].data)
                yield
            found[name] = digest.hexdigest()


class _Reader(Absent):
    """Unread tensors of a checkpoint, and stand-ins for those of other nodes."""

    def __init__(self, checkpoint: Checkpoint, wanted: Sequence[str]) -> None:
        super().__init__()
        self._folder = checkpoint.folder
        self._wanted = set(wanted)
        self._files: dict[str, dict[str, mx.array]] = {}

    def __call__(self, name: str, info: TensorInfo) -> mx.array:
        if name not in self._wanted:
            return super().__call__(name, info)
        if info.file not in self._files:
            path = self._folder / info.file
            try:
                self._files[info.file] = mx.load(str(path))  # type: ignore[assignment]
            except RuntimeError as error:
                raise ModelError(f"cannot read {path}: {error}") from error
        return self._files[info.file][name]


def _require_experts_here(checkpoint: Checkpoint, cut: CutModel) -> None:
    """Raise ModelError for experts whose dtype MLX would refuse at the first step."""
    for module in (module for layer in cut.layers for module in layer.modules()):
        if isinstance(module, SwitchLinear) and "weight" in module and not multiplies_experts(module.weight.dtype):
            dtype = str(module.weight.dtype).rpartition(".")[2]
            raise ModelError(
                f"{checkpoint.name}: its experts are in {dtype}, which MLX computes on a GPU only; take a quantised "
                "conversion, or one in float32"
            )


class _Left(Exception):
    """Raised to leave the forward after the stage's last layer, with that layer's result."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


class _StageGate:
    """The gate of a stage: hands on the input before the stage's layers and leaves the forward after them."""

    def __init__(self, start: int, end: int, info: ModelInfo) -> None:
        self.incoming: mx.array | None = None
        self._start, self._end = start, end
        self._info = info
        self.is_past = False  # whether only norm and head run
        self._has_states = any(memory.state_arrays for entry in info.entries for memory in flat(entry))
        self.unit = _UnitGate()
        self.open: set[int] = set()  # layers that pass a lane on to units inside

    def __call__(self, index: int, run: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if index < self._start or self.is_past:
            assert self.incoming is not None
            return as_returned(self.incoming, self._info.shapes, self._info.returns[index])
        if self._has_states:
            _replay_and_record(run, args, kwargs)
        result = run(*args, **kwargs) if index in self.open else self.unit(index, run, args, kwargs)
        if index == self._end - 1:
            raise _Left(result)
        return result


def _replay_and_record(run: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Replay the accepted rows of each slot's last window, then have its states record the next one."""
    given = (*args, *kwargs.values())
    if view := next((value for value in given if isinstance(value, View)), None):
        calls = view.layer_calls(args, kwargs)
    elif caches := next(
        (value for value in given if any(isinstance(each, RecurrentState) for each in flat(value))), None
    ):
        calls = iter([(caches, partial(_call_of, caches, args, kwargs))])
    else:
        return
    for caches, call in calls:
        states = [cache for cache in flat(caches) if isinstance(cache, RecurrentState)]
        replays = [replay for state in states if (replay := state.take_replay())]
        if replays:  # nothing asks for the result: only what the states need is computed
            replay_args, replay_kwargs = replays[0].arguments(_with_empty_rows(caches, replays[0].num_rows))
            run(*replay_args, **replay_kwargs)
        for state in states:
            state.record_window(call)


def _call_of(caches: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> LayerCall:
    """Return what a layer is given for the window of a single slot with these caches."""
    num_rows = next(v.shape[1] for v in (*args, *kwargs.values()) if isinstance(v, mx.array) and v.ndim > 2)
    here = {key: LayerCall.HERE if value is caches else value for key, value in kwargs.items()}
    return LayerCall([LayerCall.HERE if value is caches else value for value in args], here, num_rows)


def _with_empty_rows(caches: Any, num_rows: int) -> Any:
    """Return these caches with empty ones in the place of those that hold rows."""
    if isinstance(caches, tuple | list):
        return tuple(_with_empty_rows(each, num_rows) for each in caches)
    if isinstance(caches, RecurrentState):
        return caches
    empty = type(caches)(caches.window, caches.keep)
    empty.reserve(num_rows, None)
    return empty


class _UnitGate:
    """The gate of modules that take a cache: runs a module through the lane's view if one is among its arguments."""

    form = LaneForm.ALONE

    def __call__(self, index: int, run: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        view = next((value for value in (*args, *kwargs.values()) if isinstance(value, View)), None)
        return run(*args, **kwargs) if view is None else view.run(run, args, kwargs, self.form)


class CutModel:
    """Layers [start, end) of one of mlx-lm's models."""

    def __init__(self, model: Any, info: ModelInfo, start: int, end: int) -> None:
        """Remove the arrays of other stages from the model and install the gates."""
        tree = module_tree_of(model)
        is_last = end == info.num_layers
        self.layers = tree.layers[start:end]
        for layer in [*tree.layers[:start], *tree.layers[end:]]:
            drop_arrays(layer, besides=self.layers)
        if start > 0 and not (is_last and info.tied):
            strip_front(tree, info)
        if not is_last:
            for _, (parent, key) in tree.back:
                drop_part(parent, key, besides=self.layers)
        self._model = model
        self._is_first = start == 0
        self._gate = _StageGate(start, end, info)
        self._info = info
        install_gates(tree.layers, self._gate)
        self._start = start

    def serve_lanes(self, form: LaneForm) -> None:
        """Make the layers accept a lane; other inputs work as before.

        A layer whose parts take its cache runs once, and each of these parts in this form; another layer is a unit.
        """
        self._gate.unit.form = form
        for index, layer in enumerate(self.layers, self._start):
            if units := [part for child in layer.children().values() for part in _modules(child) if _takes_cache(part)]:
                install_gates(units, self._gate.unit)
                self._gate.open.add(index)
            if form is LaneForm.ROWS:
                accept_rows(layer)

    @property
    def tensors(self) -> list[tuple[str, mx.array]]:
        """The stage's tensors by the model's own names."""
        return tensors_of_module(self._model)

    def replace(self, tensors: dict[str, mx.array]) -> None:
        """Replace the tensors of these names."""
        self._model.load_weights(list(tensors.items()), strict=False)

    def run(self, x: mx.array, ids: mx.array, caches: Sequence[Any]) -> mx.array:
        """Run the stage's layers and return hidden states [B, L, D].

        Args:
            x: token ids [B, L] on the first stage, hidden states [B, L, D] elsewhere.
            ids: token ids [B, L] on the other stages, for layers that look at them.
            caches: the whole model's list of caches, to which the rows are appended.
        """
        self._gate.incoming = None if self._is_first else x
        try:
            self._model(x if self._is_first else ids, cache=caches)
        except _Left as left:
            return as_rows(left.result, self._info.shapes)
        finally:
            self._gate.incoming = None
        raise AssertionError("the forward ended before the stage's last layer")

    def logits(self, h: mx.array, caches: Sequence[Any]) -> mx.array:
        """Return the logits [1, N, V] of hidden states [1, N, D] of the last layer: run norm, head and the like.

        `caches` are empty; the caller discards what an embedding leaves in them.
        """
        self._gate.incoming, self._gate.is_past = h, True
        try:
            return self._model(mx.zeros(h.shape[:2], mx.int32), cache=caches)
        finally:
            self._gate.incoming, self._gate.is_past = None, False


def _modules(child: Any) -> list[nn.Module]:
    return [part for part in (child if isinstance(child, list) else [child]) if isinstance(part, nn.Module)]


def _takes_cache(module: nn.Module) -> bool:
    return "cache" in inspect.signature(type(module).__call__).parameters


def accept_rows(layer: nn.Module) -> None:
    """Make a layer's attention accept a lane whose rows lie end to end. Other inputs work as before."""
    for module in list(layer.modules()):
        code: Any = sys.modules[type(module).__module__]
        attention = getattr(code, "scaled_dot_product_attention", None)
        if attention is not None and not isinstance(attention, LaneAttention):
            code.scaled_dot_product_attention = LaneAttention(attention)
        for name, part in list(module.items()):
            if _is_rope(part):
                setattr(module, name, WindowRope(part))


class LaneAttention:
    """A module's own attention that also accepts a lane's view."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention

    def __call__(
        self, queries: mx.array, keys: Any, values: Any, cache: Any = None, *rest: Any, **more: Any
    ) -> mx.array:
        """Do what mlx-lm's `scaled_dot_product_attention` does; with a lane's view, per slot on its own keys."""
        if isinstance(cache, View):
            named = dict(zip(("scale", "mask", "sinks"), rest, strict=False)) | more
            return cache.attend(self._attention, queries, keys, values, **named)
        return self._attention(queries, keys, values, cache, *rest, **more)


class WindowRope:
    """A layer's own RoPE that also accepts a position for every row (WeDLM, arXiv 2512.22737, section 4)."""

    def __init__(self, rope: Callable[..., mx.array]) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **more: Any) -> mx.array:
        """Rotate [B, H, L, K]; `offset` is the first row's position, [B] of each slot's first, or [L] for one slot."""
        if isinstance(offset, int) or offset.ndim == 0 or x.shape[0] > 1:
            return self._rope(x, offset=offset, **more)
        return self._rope(x.transpose(2, 1, 0, 3), offset=offset, **more).transpose(2, 1, 0, 3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rope, name)


def _is_rope(part: Any) -> bool:
    """Return whether a part of a module rotates rows by an offset, whatever its name."""
    is_leaf = isinstance(part, nn.Module) and not part.parameters() and not part.children()
    return is_leaf and "offset" in inspect.signature(type(part).__call__).parameters
