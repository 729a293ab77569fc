"""A model's folder: configuration, tensor headers, fingerprint. Reads headers only; tensors are read by shard.py."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from protos.brigade_pb2 import Fingerprint
from worker.errors import ModelError

DEMO = Path(__file__).parents[1] / "demo"
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")

_MAX_HEADER_BYTES = 100_000_000
_ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8,
}  # fmt: skip

Download = Callable[[Iterable[str], Callable[[int], None]], None]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file, as its header describes it."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Checkpoint:
    """A model's configuration and the headers of all its tensors, whether or not their files are here yet."""

    name: str
    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    download: Download | None = None

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Equal on two nodes exactly if they hold the same configuration, tokenizer and tensor layout."""
        layout = [(name, info.dtype, list(info.shape)) for name, info in sorted(self.tensors.items())]
        return Fingerprint(
            config=_sha256(_canonical(self.config)),
            tokenizer=_sha256(*(path.name.encode() + path.read_bytes() for path in self._tokenizer_files())),
            tensors=_sha256(_canonical(layout)),
        )

    def fetch(self, names: Iterable[str], progress: Callable[[int], None]) -> None:
        """Bring the files that hold these tensors into the folder; `progress` takes the bytes that arrived."""
        if self.download is not None:
            self.download(sorted(self.files_of(names)), progress)

    def files_of(self, names: Iterable[str]) -> set[str]:
        return {self.tensors[name].file for name in names}

    def stamp(self) -> tuple[tuple[str, int], ...]:
        """Changes when a weight file that is here changes."""
        files = sorted({info.file for info in self.tensors.values()})
        return tuple((f, (self.folder / f).stat().st_mtime_ns) for f in files if (self.folder / f).exists())

    def _tokenizer_files(self) -> list[Path]:
        """Only such as also come from a hub, or a folder and its repository would differ."""
        names = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
        small = {path for pattern in SMALL_FILES for path in self.folder.glob(pattern)}
        return sorted(path for path in small if path.name.startswith(names) and path.is_file())


def open_folder(folder: Path, name: str | None = None) -> Checkpoint:
    """Read a local model folder's configuration and headers.

    Raises:
        ModelError: the folder or its config.json is missing, or a safetensors file is missing, cut short or corrupt.
    """
    if not folder.is_dir():
        raise ModelError(
            f"model folder {folder} does not exist here; give a folder or a hub repository (owner/name), "
            "or a worker's own copy as `model:` in cluster.yaml"
        )
    config = read_config(folder)
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        tensors |= read_tensors(folder, file)
    return Checkpoint(name or str(folder), folder, config, tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dictionary. Raises ModelError if it is missing, not JSON, or names no model_type."""
    path = folder / "config.json"
    _require_file(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json; expected a model folder in Hugging Face layout") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no model_type; expected a model folder in Hugging Face layout")
    return config


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files that make up the model, by its index if it has one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return sorted({_inside(file) for file in files})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not a safetensors index ({error!r}); download the model again") from error
    for pattern in ("model*.safetensors", "*.safetensors"):  # beside the model's own there may be other forms of it
        if found := sorted(path.name for path in folder.glob(pattern)):
            return found
    raise ModelError(f"{folder} holds no *.safetensors; only safetensors checkpoints are read")


def _inside(file: str) -> str:
    """Raises ValueError for a name that leads out of the model's folder."""
    if Path(file).name != file:
        raise ValueError(f"it names {file!r}")
    return file


def read_tensors(folder: Path, file: str) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file that is here, by its header.

    Raises:
        ModelError: the file is missing, cut short or corrupt.
    """
    header, data_bytes = _read_header(folder / file)
    tensors = tensors_of(file, header)
    _check_extent(folder / file, header, data_bytes)
    return tensors


def tensors_of(file: str, header: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The tensors that a safetensors header describes.

    Raises:
        ModelError: an entry is malformed, of an unknown dtype, or its offsets do not fit its shape.
    """
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            info = TensorInfo(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), file)
            begin, end = entry["data_offsets"]
            span = end - begin
        except (KeyError, TypeError, ValueError) as error:
            problem = f"tensor {name} has a malformed header entry ({error!r})"
            raise ModelError(f"{file}: {problem}; download it again") from error
        if info.dtype not in _ITEM_BITS:
            problem = f"tensor {name} has dtype {info.dtype}, which is not supported"
            raise ModelError(f"{file}: {problem}; choose another conversion of the model")
        if info.nbytes != span:
            problem = f"tensor {name} takes {info.nbytes} bytes but its offsets span {span}"
            raise ModelError(f"{file}: {problem}; download it again")
        tensors[name] = info
    return tensors


def _require_file(path: Path) -> None:
    """Raise ModelError for what is there but no file: reading a pipe, say, could take for ever."""
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is not a file; expected a model folder in Hugging Face layout")


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and how many bytes of tensors follow it."""
    _require_file(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{path} is cut short or not safetensors ({size} bytes); download it again")
            header: dict[str, Any] = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing, though the model's index names it; download it again") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} has a corrupt safetensors header ({error}); download it again") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a corrupt safetensors header (not an object); download it again")
    return header, size - 8 - length


def _check_extent(path: Path, header: Mapping[str, Any], data_bytes: int) -> None:
    """The tensors must tile the data section: no gap at the end, no overlap."""
    spans = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
    expected = 0
    for begin, end in spans:
        if begin != expected or end < begin:
            raise ModelError(f"{path}: tensors overlap or leave a gap at byte {begin}; download it again")
        expected = end
    if expected != data_bytes:
        raise ModelError(f"{path}: expected {expected} bytes of tensors, found {data_bytes}; download it again")


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
