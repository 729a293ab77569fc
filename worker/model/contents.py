"""What a node knows of its weights, for another node to compare with its own; and what it lacks.

Two fine-tunes may have one configuration and one tensor layout, so some bytes of most tensors are hashed too. Of a file
that is still on the hub no bytes are known, but the hub's own hash is. Copies are compared in what both nodes know.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from protos.brigade_pb2 import Contents
from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint
from worker.model.describe import layout_of, shard_tensors
from worker.model.headers import TensorInfo, pack_headers

_SAMPLES = 4096  # tensors; a checkpoint that has more is seen through as many that its names' checksums choose
_SAMPLE_BYTES = 512
_MARK_BYTES = 4
_UNKNOWN = bytes(_MARK_BYTES)


def contents_of(checkpoint: Checkpoint) -> Contents:
    """What this node knows of the weights: every header, a mark per sampled tensor that is here, the hub's hashes.

    Raises:
        ModelError: a weight file cannot be read.
    """
    marks = b"".join(mark for _, mark in _marks(checkpoint))
    return Contents(headers=pack_headers(checkpoint.tensors), marks=marks, hub_hashes=dict(checkpoint.hub_hashes))


def check_contents(checkpoint: Checkpoint, theirs: Contents, note_read: Callable[[], None] = lambda: None) -> None:
    """Refuse a copy whose weights differ from the coordinator's, as far as both are known. The layouts must be equal.

    Args:
        note_read: is called for each tensor of which some bytes were read.
    Raises:
        ModelError: naming a file with other weights.
    """
    marks = [theirs.marks[i : i + _MARK_BYTES] for i in range(0, len(theirs.marks), _MARK_BYTES)]
    if not marks and not theirs.hub_hashes:
        return
    ours = list(_marks(checkpoint, note_read))
    if marks and len(marks) != len(ours):
        raise ModelError(
            f"expected marks of {len(ours)} tensors from the coordinator, got {len(marks)}; "
            "install the same version of brigade on both"
        )
    compared = set()
    for (name, mark), other in zip(ours, marks, strict=False):
        if _UNKNOWN not in (mark, other):
            _require_equal(mark == other, checkpoint.tensors[name].file)
            compared.add(checkpoint.tensors[name].file)
    for file in checkpoint.hub_hashes.keys() & theirs.hub_hashes.keys() - compared:
        _require_equal(checkpoint.hub_hashes[file] == theirs.hub_hashes[file], file)


def check_files(checkpoint: Checkpoint, start: int, end: int) -> None:
    """Refuse a folder without the files of layers [start, end), before anything is read.

    Raises:
        ModelError: naming the first file that is not here, and its layers.
    """
    if checkpoint.download is not None:
        return
    names = shard_tensors(checkpoint, start, end)
    if not (lacking := checkpoint.lacking(names)):
        return
    places = layout_of(checkpoint).places
    numbers = [places[n] for n in names if checkpoint.tensors[n].file == lacking[0] and places[n] >= 0]
    what = f"layers [{min(numbers)}, {max(numbers) + 1})" if numbers else "the embedding or the head"
    more = len(lacking) - 1
    others = f" (and {more} more such file{'s' if more > 1 else ''})" if more else ""
    remedy = f"copy it to {checkpoint.folder}"
    if checkpoint.hub_hashes:
        repository, _, commit = checkpoint.name.partition("@")
        remedy = f"`hf download {repository} --revision {commit}`, or set `pull: hub` in its own cluster.yaml"
    raise ModelError(f"lacks {lacking[0]}, which holds {what}{others}; {remedy}")


def _require_equal(equal: bool, file: str) -> None:
    if not equal:
        raise ModelError(f"its weights in {file} differ from the coordinator's; copy the same model to both nodes")


def _marks(checkpoint: Checkpoint, note_read: Callable[[], None] = lambda: None) -> Iterator[tuple[str, bytes]]:
    """Each sampled tensor's name and mark, by name: which they are follows from the layout alone."""
    tensors = checkpoint.tensors
    sampled = sorted(tensors, key=lambda name: (zlib.crc32(name.encode()), name))[:_SAMPLES]
    marks: dict[str, bytes] = {}
    for file, names in groupby(sorted(sampled, key=lambda name: tensors[name].file), lambda name: tensors[name].file):
        marks |= _read_marks(checkpoint.folder / file, {name: tensors[name] for name in names}, note_read)
    for name in sorted(sampled):
        yield name, marks.get(name, _UNKNOWN)


def _read_marks(path: Path, tensors: Mapping[str, TensorInfo], note_read: Callable[[], None]) -> dict[str, bytes]:
    """A hash of bytes from the middle of each of these tensors; nothing of a file that is not here."""
    marks = {}
    try:
        with path.open("rb", buffering=0) as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            for name, info in sorted(tensors.items(), key=lambda item: item[1].begin):
                size = min(info.nbytes, _SAMPLE_BYTES)
                file.seek(data + info.begin + (info.nbytes - size) // 2)
                marks[name] = hashlib.sha256(file.read(size)).digest()[:_MARK_BYTES]
                note_read()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return marks
