"""What all draft heads share: their tensors on a node, the rows of a slot that they have read, and the way of a step.

A head has a cache row per known token that it has read. It is cut to the base of each window that it sees, and reads
the rows of that window which hold. What it has missed is skipped: it then begins anew, since only the distances between
rotated positions count.
Shapes: B slots, L window length, D hidden, V vocabulary, W numbers of a row, C features, N rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from protos.brigade_pb2 import Cache
from worker.compute.batching import LaneWindow
from worker.compute.drafting import Drafter, DraftRequest, fit_vocabulary
from worker.compute.held_tensors import HeldTensors, TensorReader
from worker.compute.shard import Shard, accept_rows, run_windows
from worker.errors import CacheMismatch, ModelError, first_line
from worker.memory.slot_caches import Caches, close_all
from worker.model.build import quantise, tensors_of_module
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe, shard_tensors
from worker.model.draft_heads import FEATURE_TENSORS, mlx_dtype_of
from worker.model.model_spec import MOST_PENDING, DraftHead, LayerSpec
from worker.model.quantisation import MISFITS, misfit


class HeadModule(nn.Module, ABC):
    """The computation of a kind of head. Its parameters have the names of the published layout, after `sanitize`."""

    layers: list[nn.Module]

    @abstractmethod
    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the tensors by the module's own names."""

    @abstractmethod
    def dry_run(self, rows: mx.array, tapped: mx.array, caches: Sequence[Any]) -> mx.array:
        """Use every tensor once: hidden states [1, N, D], tapped outputs [1, N, taps * D], empty caches."""


class HeadPart(HeldTensors):
    """A draft head on the last stage; on another one that holds tapped layers, what reads these."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        make: Callable[[DraftHead], HeadModule],
        end: int,
        held: dict[str, mx.array] | None,
    ) -> None:
        """Build it; its tensors stay unread until `materialise`.

        Args:
            make: makes the module.
            end: the number of its layers, or 0 for the part that reads tapped layers.
        Raises:
            ModelError: configuration and tensors do not fit together.
        """
        spec = describe(checkpoint)
        assert spec.head
        self.spec, self.layers, self.is_whole, self.name = spec.head, spec.layers, end > 0, spec.name
        reader = TensorReader(checkpoint, shard_tensors(checkpoint, 0, end))
        try:
            self.module = make(self.spec)
            weights = self.module.sanitize({n: reader(n, info) for n, info in checkpoint.tensors.items()})
            quantise(self.module, checkpoint, weights)
            self.module.load_weights(list(weights.items()), strict=True)
        except MISFITS as error:
            raise misfit(checkpoint, str(error).splitlines()[0].rstrip(".,")) from error
        if not self.is_whole:
            for name, module in self.module.named_modules():
                for key in [key for key, value in module.items() if isinstance(value, mx.array)]:
                    if not f"{name}.{key}".lstrip(".").startswith(FEATURE_TENSORS):
                        del module[key]
        self.module.eval()
        if self.is_whole:
            self._dry_run(checkpoint)
        super().__init__(self.module, f"the draft head {checkpoint.name}", held)

    def _dry_run(self, checkpoint: Checkpoint) -> None:
        """Build the graph of one pass without evaluating it. Raises ModelError if a shape, dtype or option is wrong."""
        head, dtype = self.spec, mlx_dtype_of(checkpoint)
        quantised = {
            name for name, module in self.module.named_modules() if isinstance(getattr(module, "bits", None), int)
        }
        for name, array in tensors_of_module(self.module):
            is_packed = name.rpartition(".")[0] in quantised
            if name != "d2t" and not is_packed and not mx.issubdtype(array.dtype, mx.floating):
                raise ModelError(f"{checkpoint.name}: {name}: expected floating point numbers, found {array.dtype}")
        caches = make_caches(self.layers)
        rows = mx.zeros((1, 2, head.hidden_size), dtype)
        tapped = mx.zeros((1, 2, head.num_taps * head.target_hidden_size), dtype)
        try:
            run_windows([LaneWindow(caches, 0, 2)], lambda listed: self.module.dry_run(rows, tapped, listed))
        except MISFITS as error:
            raise misfit(checkpoint, first_line(error)) from error

    def check_ids(self, vocab_size: int) -> None:
        """Raise ModelError unless the head's own embedding and its draft vocabulary are of the model's ids.

        MLX does not check indices: an id outside would read or write beyond an array.
        """
        V = vocab_size
        if self.spec.embeds and (num_rows := self.module["embed_tokens"].weight.shape[0]) < V:
            raise ModelError(f"{self.name}: embed_tokens: expected at least {V} rows, found {num_rows}")
        if (d2t := self.module.get("d2t")) is not None:
            if not mx.issubdtype(d2t.dtype, mx.integer):
                raise ModelError(f"{self.name}: d2t: expected integers, found {d2t.dtype}")
            ids = mx.arange(d2t.shape[0]) + d2t.astype(mx.int64)
            least, most = ids.min().item(), ids.max().item()
            if least < 0 or most >= V:
                raise ModelError(f"{self.name}: d2t: expected ids from 0 to {V - 1}, found {least} to {most}")

    def taps(self, shard: Shard) -> dict[int, mx.array]:
        """Return the matrix [C, D] for each tapped layer of a shard: the part of `fc` that multiplies its output."""
        if not self.spec.num_taps:
            return {}
        fc: Any = self.module["fc"]
        weight = fc.weight
        if isinstance(fc, nn.QuantizedLinear):
            weight = mx.dequantize(fc.weight, fc.scales, fc.biases, fc.group_size, fc.bits, fc.mode)
        if self.spec.norms_features:
            weight = weight * self.module["input_norm"].weight
        numbers = self.spec.taps(shard.info.num_layers)
        parts = zip(numbers, weight.split(len(numbers), axis=1), strict=True)
        return {number: part for number, part in parts if shard.start <= number < shard.end}


@dataclass
class ReadRows:
    """What a head holds of one slot: cache rows of tokens [first, end), and rows after them that it has yet to read."""

    caches: Caches
    first: int = 0
    end: int = 0
    tokens: list[int] = field(default_factory=list)  # known from `end` on
    pending: list[mx.array] = field(default_factory=list)  # rows [1, N, C] of tokens from `end` on

    @property
    def num_pending(self) -> int:
        return sum(rows.shape[1] for rows in self.pending)

    @property
    def nbytes(self) -> int:
        return self.caches.nbytes + sum(rows.nbytes for rows in self.pending)

    def add(self, base: int, tokens: Sequence[int], rows: mx.array) -> None:
        """Cut to `base` and add the rows [1, N, C] that hold, with the known tokens from there on."""
        rows = mx.contiguous(rows)  # a view would keep the whole step's rows in memory
        if not self.first <= base <= self.end + self.num_pending:
            self.first = self.end = base
            self.tokens, self.pending = [], []
        if base <= self.end:
            self.end, self.tokens, self.pending = base, list(tokens), [rows]
        else:
            kept = base - self.end
            if self.num_pending > kept:
                self.pending = [mx.concatenate(self.pending, axis=1)[:, :kept]]
            self.pending.append(rows)
            self.tokens = [*self.tokens[:kept], *tokens]

    def take(self, num_rows: int) -> tuple[list[int], mx.array]:
        """Take the first pending rows [1, N, C]; return them with the tokens from theirs on."""
        rows = self.pending[0] if len(self.pending) == 1 else mx.concatenate(self.pending, axis=1)
        tokens = self.tokens
        self.pending = [mx.contiguous(rows[:, num_rows:])] if rows.shape[1] > num_rows else []
        self.tokens, self.end = tokens[num_rows:], self.end + num_rows
        return tokens, rows[:, :num_rows]

    def fork(self, length: int) -> ReadRows:
        held = self.end + self.num_pending
        if not self.first < length <= held:
            raise CacheMismatch(f"cannot continue after {length} tokens: the head holds [{self.first}, {held})")
        end = min(length, self.end)
        kept = length - end
        caches = self.caches.fork(end - self.first)
        pending = [mx.contiguous(mx.concatenate(self.pending, axis=1)[:, :kept])] if kept else []
        return replace(self, caches=caches, end=end, tokens=self.tokens[:kept], pending=pending)

    def close(self) -> None:
        close_all([self.caches])
        self.pending = []


class HeadDrafter(Drafter, ABC):
    """Drafts by a head beside the model's last shard; the slots of a step go through its layers together."""

    reads_rows = True

    def __init__(self, part: HeadPart, shard: Shard) -> None:
        """`shard` is the last one of the model that it drafts for."""
        part.check_ids(shard.info.vocab_size)
        self._part, self._shard = part, shard
        self._module: Any = part.module
        for layer in part.module.layers:
            accept_rows(layer)

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return drafts; rows of windows that ask for none are read now and then."""
        texts = [self._text_of(request) for request in requests]
        drafting, reading = [], []
        for at, (request, text) in enumerate(zip(requests, texts, strict=True)):
            text.add(request.base, request.tokens, self._features(request.own_rows))
            if request.count:
                drafting.append(at)
            elif request.is_chunk or text.num_pending >= MOST_PENDING:
                reading.append(at)
        if reading:
            self._read([texts[at] for at in reading])
            # all layers: those of DFlash do not depend on each other
            mx.eval([array for at in reading for cache in texts[at].caches.own for array in cache.arrays()])
        found: list[list[int]] = [[0] * request.count for request in requests]
        if drafting:
            asked = [requests[at] for at in drafting]
            drafts = self._draft(asked, [texts[at] for at in drafting])
            mx.eval(drafts)
            for at, tokens in zip(drafting, drafts, strict=True):
                found[at] = tokens.tolist()  # type: ignore[assignment]
        mx.async_eval([rows for text in texts for rows in text.pending])  # frees what they were computed from
        return found

    def _features(self, rows: mx.array) -> mx.array:
        """Return what the head reads [1, N, C] of rows [1, N, W] of the last layer."""
        return rows[..., self._shard.info.hidden_size :]

    @abstractmethod
    def _read(self, texts: Sequence[ReadRows]) -> mx.array | None:
        """Read the pending rows of these slots, as far as the tokens that they need are known.

        Returns:
            What the last row of each slot gave [1, B, D], for kinds that go on from there.
        """

    @abstractmethod
    def _draft(self, requests: Sequence[DraftRequest], texts: Sequence[ReadRows]) -> list[mx.array]:
        """Read what is pending and return the drafts of each slot, not evaluated."""

    def _logits(self, h: mx.array) -> mx.array:
        """Return the logits [N, V], in the model's vocabulary, of the head's output [1, N, D]."""
        return fit_vocabulary(self._shard.head(h), self._shard.info.vocab_size, self._shard.mask_token)

    def _embed(self, ids: mx.array) -> mx.array:
        """Return the embeddings [1, N, D] of ids [1, N]; an id outside of the vocabulary, from a peer, counts as 0."""
        embed = self._module.embed_tokens if self._part.spec.embeds else self._shard.embed
        return embed(mx.where((ids >= 0) & (ids < self._shard.info.vocab_size), ids, 0))

    def _text_of(self, request: DraftRequest) -> ReadRows:
        slot, text = request.slot, request.slot.drafting
        if not isinstance(text, ReadRows):
            text = slot.drafting = ReadRows(make_caches(self._part.layers), first=request.base, end=request.base)
        return text


def make_caches(layers: Sequence[LayerSpec]) -> Caches:
    """Return empty caches of one slot for a head's layers."""
    entries = tuple(memory for layer in layers for memory in layer.memories)
    return Caches(entries, range(len(entries)), Cache())


def project(features: mx.array, head: DraftHead, eps: float = 1e-6) -> mx.array:
    """Return `fc` of the tapped outputs [1, N, D] from their features [1, N, C], which are its sum over the taps.

    With a norm before `fc`, C is D + 1: the last feature is the sum over taps of the mean of squares.
    """
    if not head.norms_features:
        return features
    mean = features[..., -1:].astype(mx.float32) / head.num_taps
    return (features[..., :-1] * mx.rsqrt(mean + eps)).astype(features.dtype)
