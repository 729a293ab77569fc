"""Pieces: a shard cut at its layers, each a safetensors file of its own that every node makes alike."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from worker.model.checkpoint import Checkpoint
from worker.model.describe import BACK, FRONT, described, shard_tensors
from worker.model.headers import TensorInfo, item_bits

_ALIGNMENT = 8  # of a file's tensors
_NAMES = {FRONT: "front", BACK: "back"}


@dataclass(frozen=True)
class Piece:
    """All tensors of one place of a model: a layer, or what stands before the layers or behind them."""

    place: int
    tensors: Mapping[str, TensorInfo]

    @property
    def name(self) -> str:
        return place_name(self.place)

    @cached_property
    def order(self) -> list[str]:
        """The tensors' names as they lie in the file, the widest numbers first: so each is aligned to its own."""
        return sorted(self.tensors, key=lambda name: (-item_bits(self.tensors[name].dtype), name))

    @property
    def nbytes(self) -> int:
        """Of its tensors alone."""
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def header(self) -> bytes:
        """What the file begins with. It follows from names, dtypes and shapes alone."""
        entries, at = {}, 0
        for name in self.order:
            info = self.tensors[name]
            entries[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [at, at + info.nbytes]}
            at += info.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def pieces_of(checkpoint: Checkpoint, start: int, end: int) -> list[Piece]:
    """What the shard [start, end) consists of; nothing of no layers."""
    tensors: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
    for name in shard_tensors(checkpoint, start, end) if start < end else ():
        tensors[described(checkpoint).places[name]][name] = checkpoint.tensors[name]
    return [Piece(place, found) for place, found in sorted(tensors.items())]


def place_name(place: int) -> str:
    """A layer's number as five digits or more, `front` or `back`: as it stands in file names."""
    return _NAMES.get(place) or f"{place:05}"


def place_of(name: str) -> int:
    """Of such a name."""
    return next((place for place, known in _NAMES.items() if known == name), None) or int(name)
