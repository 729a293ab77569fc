"""A shard: layers [start, end) of an mlx-lm model, whose code stays unchanged.

A row that travels between shards has W numbers: D of the hidden state, and C features of earlier layers for a drafter.
Shapes: B slots, L window length, D hidden, V vocabulary, H heads, K head size, N rows with logits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from protos.brigade_pb2 import Cache
from worker.compute.batching import Attention, Lane, LaneWindow, View, canvas_rows, flat
from worker.compute.grammar import Grammars
from worker.compute.held_tensors import HeldTensors, TensorReader
from worker.errors import ModelError
from worker.memory.kv_cache import KVCache
from worker.memory.recurrent_state import LayerCall, RecurrentState
from worker.memory.slot_caches import Caches
from worker.model.build import build
from worker.model.checkpoint import Checkpoint
from worker.model.describe import layout_of, shard_tensors
from worker.model.families import LaneForm, lane_form, looks_at_positions
from worker.model.module_tree import final_norm, module_tree_of
from worker.model.probe_pass import ModelInfo, strip_front
from worker.model.stub_layers import RunLayer, as_returned, as_rows, drop_arrays, drop_part, install_gates, modules_in
from worker.platform.machine import multiplies_experts

T = TypeVar("T")


class Shard(HeldTensors):
    """Layers [start, end), the embedding if first, the final norm and head if last."""

    def __init__(self, checkpoint: Checkpoint, start: int, end: int, held: dict[str, mx.array] | None = None) -> None:
        """Build the shard; `materialise` reads its tensors.

        Args:
            held: `tensors` of another shard of the same checkpoint, to be reused; the others are freed.
        Raises:
            ModelError: a tensor is missing, unknown, or of another shape than the configuration says.
        """
        layout = layout_of(checkpoint)
        self.info, spec = layout.info, layout.spec
        self.start, self.end = start, end
        self.is_first, self.is_last = start == 0, end == self.info.num_layers
        self.context = spec.context  # tokens that the model can read
        reader = TensorReader(checkpoint, shard_tensors(checkpoint, start, end))
        model = build(checkpoint, reader)
        has_embedding = spec.has_embedding(start, end, serves_head=checkpoint.embeds_last)
        self.cut = CutModel(model, self.info, start, end, has_embedding=has_embedding)
        super().__init__(model, f"layers [{start}, {end})", held)
        if unread := next((name for name, array in self._listed if reader.name_of(array)), None):
            raise ModelError(f"{checkpoint.name}: cannot tell which node needs tensor {unread}")
        _require_experts_here(checkpoint, self.cut)
        self.grammars = Grammars(checkpoint.folder, self.info.vocab_size)
        self.mask_token = spec.mask_token
        self._grid = spec.canvas.grid if spec.canvas else 1
        self.refines = spec.refines
        self._lane_form = lane_form(checkpoint.config)
        self._looks_at_positions = looks_at_positions(checkpoint.config)
        self._no_caches = Caches(self.info.entries, (), Cache())  # for norm and head, which have no cache
        self.cut.serve_lanes(self._lane_form)

    @property
    def row_size(self) -> int:
        """W, the numbers per row that travels."""
        return self.info.hidden_size + self.cut.num_features

    def tap(self, taps: Mapping[int, mx.array], num_features: int) -> None:
        """Make rows carry the sum of the features of all tapped layers so far.

        Args:
            taps: for each tapped layer of this shard, the matrix [C, D] that multiplies its output.
            num_features: C.
        """
        self.cut.taps, self.cut.num_features = dict(taps), num_features

    def make_caches(self, cache: Cache) -> Caches:
        """Return empty caches of this kind for one slot."""
        return Caches(self.info.entries, self.info.entries_of(self.start, self.end), cache, self._grid)

    def __call__(
        self,
        x: mx.array,
        places: Sequence[LaneWindow],
        ids: mx.array | None = None,
        soft: mx.array | None = None,
        end: int | None = None,
    ) -> mx.array:
        """Run the layers over a lane, one window each of several slots, and append each window to its slot's caches.

        Args:
            x: token ids [1, sum L] on the first shard, rows [1, sum L, W] elsewhere, window after window.
            places: the places of the windows.
            ids: token ids [1, sum L] on the other shards, for models whose layers use them; 0 by default.
            soft: on the first shard of a model that `refines`, the conditioning of canvas rows [1, sum L, D], zeros for
                other rows; None: no conditioning.
            end: run only layers before this one; the others get their rows as segments from another stage.
        Returns:
            Rows [1, sum L, W].
        """
        ids = mx.zeros(x.shape[:2], mx.int32) if ids is None else ids
        with self.cut.ending_at(end):
            if self.refines:
                return run_windows(places, partial(self.cut.run, x, ids, canvas=canvas_rows(places), soft=soft))
            if len(places) == 1:
                return run_windows(places, partial(self.cut.run, x, ids))
            lane = Lane(places)
            whole = View(lane, [place.caches.listed for place in places])
            if self._looks_at_positions or (whole.is_batch and self._lane_form is not LaneForm.ALONE):
                h = whole.run(self.cut.run, [x, ids, whole], {}, self._lane_form)
            else:
                h = self.cut.run(x, ids, lane.views())
            lane.settle()
            return h

    def logits(self, rows: mx.array) -> mx.array:
        """Return the logits [N, V] float32 of rows [1, N, W] of the last layer. Last shard only.

        The MASK token's logit is minus infinity, so that it is never sampled.
        """
        logits = self._behind(self._hidden(rows), _NormMode.RUN)[0].astype(mx.float32)
        if self.mask_token is not None:
            logits[:, self.mask_token] = -mx.inf
        return logits

    def normed(self, rows: mx.array) -> mx.array:
        """Return the final norm's output [1, N, D] of rows [1, N, W]. Last shard only.

        Raises:
            ModelError: the model has no single norm there.
        """
        return self._behind(self._hidden(rows), _NormMode.STOP)

    def head(self, h: mx.array) -> mx.array:
        """Return the logits [N, V] float32 of h [1, N, D], which replaces the final norm's output.

        Last shard of a checkpoint that `embeds_last`.
        """
        return self._behind(h, _NormMode.SKIP)[0].astype(mx.float32)

    def embed(self, ids: mx.array) -> mx.array:
        """Return the input of the first layer [1, N, D] for ids [1, N]. Shards as for `head`."""
        found = self.cut.embed(ids, self._no_caches.listed)
        self._no_caches.cut(0)
        return found

    def soften(self, logits: mx.array) -> mx.array:
        """Return the expected embedding [N, D] under logits [N, V] float32. Last shard of a model that `refines`."""
        return self._module.model.embed_tokens.soften(logits).astype(self.info.dtype)

    def mix(self, ids: mx.array, shares: mx.array) -> mx.array:
        """Return the sum [N, D] of candidates' embeddings [N, K], weighted by their probabilities.

        First shard of a model that `refines`.
        """
        return self._module.model.embed_tokens.mix(ids, shares).astype(self.info.dtype)

    def _hidden(self, rows: mx.array) -> mx.array:
        return rows[..., : self.info.hidden_size] if self.cut.num_features else rows

    def _behind(self, h: mx.array, mode: _NormMode) -> mx.array:
        found = self.cut.behind(h, self._no_caches.listed, mode)
        self._no_caches.cut(0)
        return found


def _require_experts_here(checkpoint: Checkpoint, cut: CutModel) -> None:
    """Raise ModelError for experts of a dtype that MLX would refuse at the first step."""
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


class _Only(Enum):
    """A part of the model that runs without any layer."""

    EMBEDDING = "embedding"
    HEAD = "head"  # everything behind the layers


class _NormMode(Enum):
    """What happens at the final norm."""

    RUN = "run"
    STOP = "stop"  # behind it
    SKIP = "skip"


class _StageGate:
    """The gate of a stage: passes the input on before the stage's layers and leaves the forward after them."""

    def __init__(self, start: int, end: int, info: ModelInfo) -> None:
        self.incoming: mx.array | None = None
        self._start, self.end = start, end
        self._info = info
        self.only: _Only | None = None
        self._has_states = any(memory.state_arrays for entry in info.entries for memory in flat(entry))
        self.unit = _UnitGate()
        self.on_result: Callable[[int, Any], None] = _nothing  # called after every layer of the stage
        self.with_units: set[int] = set()  # layers that contain units: they run once for a whole lane

    def __call__(self, index: int, run: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if index < self._start or self.only is not None:
            if self.only is _Only.EMBEDDING:
                raise _Left(args[0])
            assert self.incoming is not None
            return as_returned(self.incoming, self._info.shapes, self._info.returns[index])
        if self._has_states:
            _replay_and_record(run, args, kwargs)
        result = run(*args, **kwargs) if index in self.with_units else self.unit(index, run, args, kwargs)
        self.on_result(index, result)
        if index == self.end - 1:
            raise _Left(result)
        return result


def _replay_and_record(run: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Replay the accepted rows of each slot's last window, then record the layer's call for the next one."""
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
        if replays:  # the result is unused, so only the states are computed
            replay_args, replay_kwargs = replays[0].arguments(_with_empty_rows(caches, replays[0].num_rows))
            run(*replay_args, **replay_kwargs)
        for state in states:
            state.record_window(call)


def _call_of(caches: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> LayerCall:
    """Return a layer's call for the window of a single slot with these caches."""
    num_rows = next(v.shape[1] for v in (*args, *kwargs.values()) if isinstance(v, mx.array) and v.ndim > 2)
    here = {key: LayerCall.HERE if value is caches else value for key, value in kwargs.items()}
    return LayerCall([LayerCall.HERE if value is caches else value for value in args], here, num_rows)


def _with_empty_rows(caches: Any, num_rows: int) -> Any:
    """Return these caches, with empty ones instead of those that hold rows."""
    if isinstance(caches, tuple | list):
        return tuple(_with_empty_rows(each, num_rows) for each in caches)
    if isinstance(caches, RecurrentState):
        return caches
    empty = KVCache(caches.window, caches.keep)  # nothing uses what is appended
    empty.reserve(num_rows, None)
    return empty


class _UnitGate:
    """The gate of units: runs a module through the lane's view if that is among its arguments."""

    form = LaneForm.ALONE

    def __call__(self, index: int, run: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        view = next((value for value in (*args, *kwargs.values()) if isinstance(value, View)), None)
        return run(*args, **kwargs) if view is None else view.run(run, args, kwargs, self.form)


class _NormGate:
    """The gate of the final norm: runs it, leaves the forward with its result, or skips it."""

    def __init__(self) -> None:
        self.mode = _NormMode.RUN

    def __call__(self, index: int, run: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.mode is _NormMode.SKIP:
            return args[0]
        result = run(*args, **kwargs)
        if self.mode is _NormMode.STOP:
            raise _Left(result)
        return result


class CutModel:
    """Layers [start, end) of one of mlx-lm's models."""

    def __init__(self, model: Any, info: ModelInfo, start: int, end: int, *, has_embedding: bool) -> None:
        """Remove the arrays of other stages from the model and install the gates."""
        tree = module_tree_of(model)
        is_last = end == info.num_layers
        self.layers = tree.layers[start:end]
        for layer in [*tree.layers[:start], *tree.layers[end:]]:
            drop_arrays(layer, besides=self.layers)
        if not has_embedding:
            strip_front(tree, info)
        if not is_last:
            for _, (parent, key) in tree.back:
                drop_part(parent, key, besides=self.layers)
        self._model = model
        self._is_first = start == 0
        self._gate = _StageGate(start, end, info)
        self._tree = tree
        self._norm_gate: _NormGate | None = None  # installed when needed
        self._info = info
        self.taps: dict[int, mx.array] = {}
        self.num_features = 0
        install_gates(tree.layers, self._gate)
        self._start = start

    def serve_lanes(self, form: LaneForm) -> None:
        """Make the layers accept a lane; other inputs work as before.

        If parts of a layer take its cache, these parts are the units, in this form; otherwise the layer itself is one.
        """
        self._gate.unit.form = form
        for index, layer in enumerate(self.layers, self._start):
            if units := [
                part for child in layer.children().values() for part in modules_in(child) if _takes_cache(part)
            ]:
                install_gates(units, self._gate.unit)
                self._gate.with_units.add(index)
            if form is LaneForm.ROWS:
                accept_rows(layer)

    def run(self, x: mx.array, ids: mx.array, caches: Sequence[Any], **more: Any) -> mx.array:
        """Run the stage's layers and return rows [B, L, W].

        Args:
            x: token ids [B, L] on the first stage, rows [B, L, W] elsewhere.
            ids: token ids [B, L] on the other stages, for layers that use them.
            caches: the whole model's list of caches, to which the rows are appended.
            more: further arguments of this model's forward.
        """
        features: list[mx.array] = []
        if self.num_features:
            if self._is_first:
                features.append(mx.zeros((*x.shape, self.num_features), self._info.dtype))
            else:
                x, before = x.split((self._info.hidden_size,), axis=-1)
                features.append(before)
        self._gate.on_result = partial(self._add_features, features)
        self._gate.incoming = None if self._is_first else x
        try:
            self._model(x if self._is_first else ids, cache=caches, **more)
        except _Left as left:
            h = as_rows(left.result, self._info.shapes)
            return mx.concatenate([h, *features], axis=-1) if features else h
        finally:
            self._gate.incoming, self._gate.on_result = None, _nothing
        raise AssertionError("the forward ended before the stage's last layer")

    def _add_features(self, features: list[mx.array], index: int, result: Any) -> None:
        if (weight := self.taps.get(index)) is not None:
            rows = as_rows(result, self._info.shapes)
            found = rows @ weight.T
            if self.num_features > found.shape[-1]:  # for a norm over all tapped outputs
                squares = rows.astype(mx.float32).square().mean(axis=-1, keepdims=True)  # float16 would overflow
                found = mx.concatenate([found, squares], axis=-1)
            features[0] = features[0] + found.astype(rows.dtype)

    @contextmanager
    def ending_at(self, end: int | None) -> Iterator[None]:
        """During this context, leave the forward after layer `end` - 1; None: after the stage's last layer."""
        last = self._gate.end
        self._gate.end = end or last
        try:
            yield
        finally:
            self._gate.end = last

    def behind(self, h: mx.array, caches: Sequence[Any], mode: _NormMode = _NormMode.RUN) -> mx.array:
        """Run everything after the layers (norm, head and the like) on hidden states [1, N, D] of the last layer.

        Args:
            caches: empty caches; the caller discards what an embedding leaves in them.
            mode: run the norm, stop after it, or skip it.
        Returns:
            The logits [1, N, V], or the norm's output [1, N, D] if `mode` is STOP.
        Raises:
            ModelError: `mode` is not RUN and the model has no single norm.
        """
        if self._norm_gate is None and mode is not _NormMode.RUN:
            gate = _NormGate()
            install_gates([final_norm(self._tree)], gate)
            self._norm_gate = gate
        norm_gate = self._norm_gate or _NormGate()
        self._gate.incoming, self._gate.only, norm_gate.mode = h, _Only.HEAD, mode
        try:
            return self._model(mx.zeros(h.shape[:2], mx.int32), cache=caches)
        except _Left as left:
            return left.result
        finally:
            self._gate.incoming, self._gate.only, norm_gate.mode = None, None, _NormMode.RUN

    def embed(self, ids: mx.array, caches: Sequence[Any]) -> mx.array:
        """Return the input of the first layer [1, N, D] for ids [1, N]."""
        self._gate.only = _Only.EMBEDDING
        try:
            self._model(ids, cache=caches)
        except _Left as left:
            return left.result
        finally:
            self._gate.only = None
        raise AssertionError("the forward ended before the first layer")


def _nothing(index: int, result: Any) -> None: ...


def run_windows(places: Sequence[LaneWindow], run: Callable[[Sequence[Any]], T]) -> T:
    """Return `run` of one slot's caches, or of a lane's views, and append the windows to the caches."""
    if len(places) > 1:
        lane = Lane(places)
        h = run(lane.views())
        lane.settle()
        return h
    place = places[0]
    place.caches.begin()
    place.reserve()
    h = run(place.caches.listed)
    place.caches.settle(place.base + place.num_rows)
    return h


def _takes_cache(module: nn.Module) -> bool:
    return "cache" in inspect.signature(type(module).__call__).parameters


def accept_rows(layer: nn.Module) -> None:
    """Make a layer's attention accept a lane, whose rows lie end to end. Other inputs work as before."""
    for module in list(layer.modules()):
        code: Any = sys.modules[type(module).__module__]
        attention = getattr(code, "scaled_dot_product_attention", None)
        if attention is not None and not isinstance(attention, LaneAttention):
            code.scaled_dot_product_attention = LaneAttention(attention)
        for name, part in list(module.items()):
            if _is_rope(part):
                setattr(module, name, WindowRope(part))


class LaneAttention:
    """The attention function of a model's module, extended to accept a lane's view."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention

    def __call__(
        self, queries: mx.array, keys: Any, values: Any, cache: Any = None, *rest: Any, **more: Any
    ) -> mx.array:
        """Do what mlx-lm's `scaled_dot_product_attention` does; with a lane's view, for each slot on its own keys."""
        if isinstance(cache, View):
            named = dict(zip(("scale", "mask", "sinks"), rest, strict=False)) | more
            return cache.attend(self._attention, queries, keys, values, **named)
        return self._attention(queries, keys, values, cache, *rest, **more)


class WindowRope:
    """A layer's RoPE, extended to accept a position for every row (WeDLM, arXiv 2512.22737, section 4)."""

    def __init__(self, rope: Callable[..., mx.array]) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **more: Any) -> mx.array:
        """Rotate [B, H, L, K] by `offset`: the first row's position, [B] one per slot, or [L] one per row of a slot."""
        if isinstance(offset, int) or offset.ndim == 0 or x.shape[0] > 1:
            return self._rope(x, offset=offset, **more)
        return self._rope(x.transpose(2, 1, 0, 3), offset=offset, **more).transpose(2, 1, 0, 3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rope, name)


def _is_rope(part: Any) -> bool:
    """Return whether a part of a module rotates rows: it takes an offset and has no parameters."""
    is_leaf = isinstance(part, nn.Module) and not part.parameters() and not part.children()
    return is_leaf and "offset" in inspect.signature(type(part).__call__).parameters
