"""Shard: layers [start, end) of one mlx-lm model, cut out from outside.

Shape letters, here and everywhere: B slots, L window length, D hidden, V vocabulary, H heads, K head size.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import SwitchLinear

from protos.brigade_pb2 import Cache
from worker.compute.attention import serve_lanes
from worker.compute.cut import CutModel
from worker.compute.exhaustion import out_of_memory
from worker.compute.grammar import Grammars
from worker.errors import ModelError
from worker.memory.caches import Caches
from worker.memory.lane import Lane, Place
from worker.model.build import absent, build
from worker.model.checkpoint import Checkpoint
from worker.model.describe import described, shard_tensors
from worker.model.families import LaneForm, lane_form, mask_token_of
from worker.model.headers import TensorInfo
from worker.process.machine import multiplies_experts

_DIGEST_BYTES = 4 * 2**20  # of a tensor that are hashed at once


class Shard:
    """Layers [start, end), the embedding if first, the final norm and head if last."""

    def __init__(self, checkpoint: Checkpoint, start: int, end: int, held: dict[str, mx.array] | None = None) -> None:
        """Build the shard; its tensors stay unread until `materialise`.

        Args:
            held: `tensors` of another shard of this very checkpoint: what is of use here is taken over, all else is let
                go of.
        Raises:
            ModelError: a tensor is missing, left over, or of another shape than the configuration says.
        """
        self.anatomy = described(checkpoint).anatomy
        self.start, self.end = start, end
        self.is_first, self.is_last = start == 0, end == self.anatomy.num_layers
        reader = _Reader(checkpoint, shard_tensors(checkpoint, start, end))
        self._cut = CutModel(build(checkpoint, reader), self.anatomy, start, end)
        if held:
            self._cut.replace({name: held[name] for name, _ in self._cut.tensors if name in held})
            held.clear()
        self.nbytes = sum(array.nbytes for _, array in self._cut.tensors)
        reader.require_none_absent(self._cut.tensors)
        _require_experts_here(checkpoint, self._cut)
        self.grammars = Grammars(checkpoint.folder, self.anatomy.vocab_size)
        self.mask_token = mask_token_of(checkpoint.config, self.anatomy.vocab_size)
        self._lane_form = lane_form(checkpoint.config)
        self._no_caches = Caches(self.anatomy.entries, (), Cache())  # for what has none, norm and head
        if self._lane_form is LaneForm.ROWS:
            for layer in self._cut.layers:
                serve_lanes(layer)

    def make_caches(self, cache: Cache) -> Caches:
        """Empty caches of the wanted kind for one slot."""
        return Caches(self.anatomy.entries, self.anatomy.entries_of(self.start, self.end), cache)

    def __call__(self, x: mx.array, places: Sequence[Place], ids: mx.array | None = None) -> mx.array:
        """Run the layers over a lane, one window each of several slots, and append each window to its slot's caches.

        Args:
            x: token ids [1, sum L] on the first shard, hidden states [1, sum L, D] elsewhere, window after window.
            places: where each window goes.
            ids: the token ids elsewhere, for models some of whose layers look at them; without them they are 0.
        Returns:
            Hidden states [1, sum L, D].
        """
        ids = mx.zeros(x.shape[:2], mx.int32) if ids is None else ids
        if len(places) == 1:
            return self._run_alone(x, ids, places[0])
        if self._lane_form is LaneForm.ROWS:
            return self._run_lane(x, ids, Lane(places))
        firsts = _firsts(places)
        outputs: dict[int, mx.array] = {}
        for numbers in self._batches(places):
            spans = [slice(firsts[n], firsts[n] + places[n].num_rows) for n in numbers]
            rows, own_ids = (mx.concatenate([whole[:, span] for span in spans]) for whole in (x, ids))
            if len(numbers) == 1:
                outputs[numbers[0]] = self._run_alone(rows, own_ids, places[numbers[0]])
            else:
                batch = self._run_lane(rows, own_ids, Lane([places[n] for n in numbers], side_by_side=True))
                outputs |= zip(numbers, batch.split(len(numbers)), strict=True)
        return mx.concatenate([outputs[number] for number in range(len(places))], axis=1)

    def _batches(self, places: Sequence[Place]) -> list[list[int]]:
        """Numbers of places that may go side by side through this model."""
        alike: dict[Any, list[int]] = defaultdict(list)
        for number, place in enumerate(places):
            alike[place.is_alike if self._lane_form is LaneForm.BATCH else number].append(number)
        return list(alike.values())

    def _run_alone(self, x: mx.array, ids: mx.array, place: Place) -> mx.array:
        place.caches.begin()
        place.caches.reserve(place.num_rows, place.positions)
        h = self._cut.run(x, ids, place.caches.listed)
        place.caches.settle(place.base + place.num_rows)
        return h

    def _run_lane(self, x: mx.array, ids: mx.array, lane: Lane) -> mx.array:
        h = self._cut.run(x, ids, lane.views)
        lane.settle()
        return h

    def logits(self, h: mx.array) -> mx.array:
        """Hidden states [1, N, D] of the last layer to logits [N, V] float32. Last shard only.

        A MASK token is no token to say: its logit is minus infinity.
        """
        logits = self._cut.logits(h, self._no_caches.listed)[0].astype(mx.float32)
        self._no_caches.cut(0)
        if self.mask_token is not None:
            logits[:, self.mask_token] = -mx.inf
        return logits

    def materialise(self, progress: Callable[[int], None]) -> None:
        """Read the shard's tensors from disk, one after another; `progress` takes the bytes that became resident.

        Raises:
            ModelError: a file ends early or cannot be read. OutOfMemory: they do not fit.
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
        """All that is held, by the model's own names, which are the same in every shard."""
        return dict(self._cut.tensors)

    def digests(self) -> dict[str, str]:
        """The BLAKE2b digest of every tensor held, by name."""
        found: dict[str, str] = {}
        for _ in self.digest_into(found):
            pass
        return found

    def digest_into(self, found: dict[str, str]) -> Generator[None, None, None]:
        """As `digests`, a few milliseconds at a time: yields after each piece of a tensor."""
        for name, array in self._cut.tensors:
            raw = np.array(array.reshape(-1).view(mx.uint8), copy=False)
            digest = hashlib.blake2b(digest_size=16)
            for first in range(0, len(raw), _DIGEST_BYTES):
                digest.update(raw[first : first + _DIGEST_BYTES].data)
                yield
            found[name] = digest.hexdigest()


class _Reader:
    """The tensors of a checkpoint, unread; those that another node reads are stood in for."""

    def __init__(self, checkpoint: Checkpoint, wanted: Sequence[str]) -> None:
        self._checkpoint = checkpoint
        self._wanted = set(wanted)
        self._files: dict[str, dict[str, mx.array]] = {}
        self._absent: dict[int, tuple[str, mx.array]] = {}  # by id, which lasts as long as the array is held

    def __call__(self, name: str, info: TensorInfo) -> mx.array:
        if name not in self._wanted:
            array = absent(name, info)
            self._absent[id(array)] = name, array
            return array
        if info.file not in self._files:
            self._files[info.file] = _open_file(self._checkpoint.folder / info.file)
        return self._files[info.file][name]

    def require_none_absent(self, tensors: Sequence[tuple[str, mx.array]]) -> None:
        """Raise ModelError if a shard would compute with what it has not got."""
        for name, array in tensors:
            if id(array) in self._absent:
                raise ModelError(f"{self._checkpoint.name}: cannot tell which node needs tensor {name}")


def _require_experts_here(checkpoint: Checkpoint, cut: CutModel) -> None:
    """Refuse what MLX would refuse at the first step."""
    for module in (module for layer in cut.layers for module in layer.modules()):
        if isinstance(module, SwitchLinear) and "weight" in module and not multiplies_experts(module.weight.dtype):
            dtype = str(module.weight.dtype).rpartition(".")[2]
            raise ModelError(
                f"{checkpoint.name}: its experts are in {dtype}, which MLX computes on a GPU only; take a quantised "
                "conversion, or one in float32"
            )


def _open_file(path: Path) -> dict[str, mx.array]:
    try:
        return mx.load(str(path))  # type: ignore[return-value]
    except RuntimeError as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _firsts(places: Sequence[Place]) -> Sequence[int]:
    """Each window's first row."""
    return list(accumulate((place.num_rows for place in places[:-1]), initial=0))
