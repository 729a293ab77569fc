"""Safetensors headers: the tensors of a weight file, read from the file or received from another node."""

import errno
import json
import math
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.errors import ModelError

_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 8  # bytes, of the first tensor
_MOST_SIZES = 32  # dimensions of a tensor: the product of a million sizes takes very long
_MOST_BYTES = 2**63  # of a tensor
_MOST_SIZE = 2**31  # MLX counts one dimension in 32 bits
_LONGEST_NAME = 255  # bytes of a file name, on usual file systems
ITEM_BITS = {
    "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8,
    "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E8M0": 8,
}  # fmt: skip
# ^ the dtypes that MLX reads: it refuses files with any other (F64, F8_E5M2, F4, ...)


@dataclass(frozen=True)
class TensorInfo:
    """The header entry of one tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int = field(default=0, compare=False)  # offset in the file's data; meaningless if the file is not here

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


def read_tensors(folder: Path, file: str) -> dict[str, TensorInfo]:
    """Return a safetensors file's tensors from its header. Raises ModelError if it is missing, cut short or corrupt."""
    path = folder / file
    header, data_bytes = _read_header(path)
    tensors = tensors_of(file, header)
    expected = 0  # the tensors must tile the data: no gap, no overlap
    for begin, end in sorted((info.begin, info.begin + info.nbytes) for info in tensors.values()):
        if begin != expected:
            raise ModelError(f"{path}: tensors overlap or leave a gap at byte {begin}; download it again")
        expected = end
    if expected != data_bytes:
        raise ModelError(f"{path}: expected {expected} bytes of tensors, found {data_bytes}; download it again")
    return tensors


def tensors_of(file: str, header: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the tensors that a safetensors header describes.

    Raises:
        ModelError: an entry is malformed, has an unknown dtype, or its offsets do not fit its shape.
    """
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = entry["data_offsets"]
            if not (isinstance(begin, int) and isinstance(end, int)):
                raise TypeError(f"offsets {begin!r} and {end!r}")
            info = TensorInfo(str(entry["dtype"]), _shape(entry["shape"]), file, begin)
            span = end - begin
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            problem = f"tensor {name:.200} has a malformed header entry ({error!r:.400})"
            raise ModelError(f"{file}: {problem}; download it again") from error
        if info.dtype not in ITEM_BITS:
            problem = f"tensor {name:.200} has dtype {info.dtype:.40}, which is not supported"
            raise ModelError(f"{file}: {problem}; choose another conversion of the model")
        if info.nbytes != span:
            problem = f"tensor {name:.200} takes {info.nbytes} bytes but its offsets span {span}"
            raise ModelError(f"{file}: {problem}; download it again")
        tensors[name] = info
    return tensors


def begin_of_file(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Any = None) -> bytes:
    """Return what precedes the data of a safetensors file; of each tensor, in order: name, dtype, shape, bytes."""
    entries, at = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, dtype, shape, nbytes in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def pack_headers(tensors: Mapping[str, TensorInfo]) -> bytes:
    """Pack all tensors' names, dtypes, shapes and files: about 3 bytes per tensor for a large checkpoint."""
    files: dict[str, dict[str, Any]] = {}
    for name, info in sorted(tensors.items()):
        files.setdefault(info.file, {})[name] = [info.dtype, info.shape]
    return zlib.compress(json.dumps(files, separators=(",", ":")).encode())


def unpack_headers(packed: bytes) -> dict[str, TensorInfo]:
    """Unpack the bytes of `pack_headers`; empty bytes mean no tensors. Raises ModelError for malformed bytes."""
    if not packed:
        return {}
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, _MAX_HEADER_BYTES)
        if not unpacker.eof:
            raise ValueError(f"not whole, or longer than {_MAX_HEADER_BYTES} bytes")
        return {
            name: TensorInfo(_known(dtype), _shape(shape), inside(file))
            for file, tensors in json.loads(text).items()
            for name, (dtype, shape) in tensors.items()
        }
    except (zlib.error, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        problem = f"got malformed tensor headers from the coordinator ({error!s:.400})"
        raise ModelError(f"{problem}; install the same version of brigade on both") from error


def inside(file: str) -> str:
    """Return the file's name. Raises ValueError if it leads out of the model's folder or is impossible."""
    is_name = Path(file).name == file and file not in ("", "..") and "\0" not in file
    if not is_name or len(os.fsencode(file)) > _LONGEST_NAME:
        raise ValueError(f"it names {file[:_LONGEST_NAME]!r}")
    return file


def read_json(path: Path, most_bytes: int, expected: str = "valid JSON") -> Any:
    """Return the content of a JSON file, None if it is missing.

    Raises:
        ModelError: it is not a file, cannot be read, is longer than `most_bytes`, or is not JSON; the message says what
            was `expected`.
    """
    try:
        with reading(path):
            require_file(path, most_bytes)
            return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not {expected} ({error}); download the model again") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ModelError, which names the file, for an error of the disk in the body, which reads `path` or below it."""
    try:
        yield
    except OSError as error:
        fix = ""
        if sys.platform == "darwin" and error.errno == errno.EPERM:  # of a service, for which macOS asks no user
            fix = "; allow Python there in System Settings, Privacy & Security, Full Disk Access, or move the folder"
        raise ModelError(f"cannot read {error.filename or path}: {error.strerror or error}{fix}") from error


def require_file(path: Path, most_bytes: int | None = None) -> None:
    """Raise ModelError if the path exists and is not a file (reading a pipe may never end), or is too long."""
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is not a file; expected a model folder in Hugging Face layout")
    if most_bytes is not None and path.exists() and (size := path.stat().st_size) > most_bytes:
        raise ModelError(f"{path} has {size} bytes; expected at most {most_bytes} of such a file")


def _known(dtype: str) -> str:
    if dtype not in ITEM_BITS:
        raise ValueError(f"dtype {dtype!r:.40}")
    return dtype


def _shape(sizes: Any) -> tuple[int, ...]:
    if len(sizes) > _MOST_SIZES:
        raise ValueError(f"{len(sizes)} sizes")
    shape = tuple(int(n) for n in sizes)
    if any(not 0 <= n < _MOST_SIZE for n in shape) or math.prod(shape) >= _MOST_BYTES:
        raise ValueError(f"shape {shape}")
    return shape


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the number of bytes after it."""
    require_file(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{path} is cut short or not safetensors ({size} bytes); download it again")
            header: dict[str, Any] = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing, though the model's index names it; download it again. Only a worker may lack files, "
            "those of other nodes' layers; each node downloads only its own from a hub repository (owner/name)"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a corrupt safetensors header ({error}); download it again") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a corrupt safetensors header (not an object); download it again")
    return header, size - 8 - length
