"""Samples of a node's weights, which another node compares with its own; and checks for missing files.

Two fine-tunes may share configuration and tensor layout, so nodes also compare hashes of some bytes of most tensors. Of
a file that is still on the hub only the hub's own hash is known. Nodes compare the hashes that both of them have.
"""

import hashlib
import zlib
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path

from protos.brigade_pb2 import Contents
from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint
from worker.model.describe import layout_of, shard_tensors
from worker.model.headers import TensorInfo, pack_headers

_SAMPLES = 4096  # the most tensors, chosen by the checksums of their names
_SAMPLE_BYTES = 512
_MARK_BYTES = 4
_UNKNOWN = bytes(_MARK_BYTES)


def contents_of(checkpoint: Checkpoint) -> Contents:
    """Return all headers, a mark of each sampled tensor (zero if its file is not here), and the hub's hashes.

    Raises:
        ModelError: a weight file cannot be read.
    """
    marks = b"".join(_marks(checkpoint).values())
    return Contents(headers=pack_headers(checkpoint.tensors), marks=marks, hub_hashes=dict(checkpoint.hub_hashes))


def check_contents(checkpoint: Checkpoint, theirs: Contents, note_read: Callable[[], None] = lambda: None) -> None:
    """Refuse weights that differ from the coordinator's, as far as both nodes have hashes. The layouts must be equal.

    Args:
        note_read: called after each tensor whose bytes are sampled.
    Raises:
        ModelError: names a file whose weights differ.
    """
    marks = [theirs.marks[i : i + _MARK_BYTES] for i in range(0, len(theirs.marks), _MARK_BYTES)]
    if not marks and not theirs.hub_hashes:
        return
    ours = _marks(checkpoint, note_read)
    if marks and len(marks) != len(ours):
        raise ModelError(
            f"expected marks of {len(ours)} tensors from the coordinator, got {len(marks)}; "
            "install the same version of brigade on both"
        )
    equal: dict[str, bool] = {}  # by file
    for (name, mark), other in zip(ours.items(), marks, strict=False):
        if _UNKNOWN not in (mark, other):
            file = checkpoint.tensors[name].file
            equal[file] = equal.get(file, True) and mark == other
    for file in checkpoint.hub_hashes.keys() & theirs.hub_hashes.keys() - equal.keys():
        equal[file] = checkpoint.hub_hashes[file] == theirs.hub_hashes[file]
    if differs := next((file for file, is_equal in equal.items() if not is_equal), None):
        raise ModelError(f"its weights in {differs} differ from the coordinator's; copy the same model to both nodes")


def check_files(checkpoint: Checkpoint, start: int, end: int) -> None:
    """Refuse a folder that lacks files of layers [start, end), before any tensor is read.

    Raises:
        ModelError: names the first missing file and its layers.
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


def _marks(checkpoint: Checkpoint, note_read: Callable[[], None] = lambda: None) -> dict[str, bytes]:
    """Return the marks of the sampled tensors, sorted by name. The choice of samples depends on the layout only."""
    tensors = checkpoint.tensors
    sampled = sorted(tensors, key=lambda name: (zlib.crc32(name.encode()), name))[:_SAMPLES]
    marks = dict.fromkeys(sorted(sampled), _UNKNOWN)
    for file, names in groupby(sorted(sampled, key=lambda name: tensors[name].file), lambda name: tensors[name].file):
        marks |= read_marks(checkpoint.folder / file, {name: tensors[name] for name in names}, note_read)
    return marks


def read_marks(path: Path, tensors: Mapping[str, TensorInfo], note_read: Callable[[], None]) -> dict[str, bytes]:
    """Return hashes of some bytes from the middle of each tensor of a file; none if the file is not here."""
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
