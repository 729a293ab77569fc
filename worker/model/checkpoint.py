"""A model's folder: configuration, tensor headers, fingerprint. Reads headers only; tensors are read by shard.py."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from protos.brigade_pb2 import Fingerprint
from worker.errors import ModelError
from worker.model.headers import TensorInfo, inside, read_tensors, require_file

DEMO = Path(__file__).parents[1] / "demo"
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model", "*.tiktoken", "tokenizer.jsonl")

MOST_CONFIG_BYTES = 16 << 20
MOST_TOKENIZER_BYTES = 1 << 28  # of a file
_MOST_INDEX_BYTES = 100_000_000  # as many as a safetensors header may have
_TOKENIZER_NAMES = ("tokenizer", "tiktoken", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")

Download = Callable[[Iterable[str], Callable[[int], None]], None]


@dataclass(frozen=True, eq=False)  # one object is one copy: what is found out about it is kept by it
class Checkpoint:
    """A model's configuration and the headers of all its tensors, whether or not their files are here yet."""

    name: str
    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    download: Download | None = None
    hub_hashes: Mapping[str, str] = field(default_factory=dict)  # the hub's own, of weight files, here or not

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Equal on two nodes exactly if they hold the same configuration, tokenizer and tensor layout.

        Fine-tunes of one model may be equal in all three: contents.py tells them apart.
        """
        layout = [(name, info.dtype, list(info.shape)) for name, info in sorted(self.tensors.items())]
        return Fingerprint(
            config=_sha256(_canonical(self.config)),
            tokenizer=_sha256(*(path.name.encode() + path.read_bytes() for path in self.tokenizer_files())),
            tensors=_sha256(_canonical(layout)),
        )

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json as it stands; empty if there is none. Raises ModelError if it holds no JSON object."""
        path = self.folder / "generation_config.json"
        require_file(path, MOST_CONFIG_BYTES)
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{path} is not valid JSON ({error})") from error
        if not isinstance(found, dict):
            raise ModelError(f"{path} is not valid JSON (expected keys and values)")
        return found

    def fetch(self, names: Iterable[str], progress: Callable[[int], None]) -> None:
        """Bring the files that hold these tensors into the folder; `progress` takes the bytes that arrived."""
        if self.download is not None:
            self.download(sorted(self.files_of(names)), progress)

    def files_of(self, names: Iterable[str]) -> set[str]:
        return {self.tensors[name].file for name in names}

    def lacking(self, names: Iterable[str]) -> list[str]:
        """The files that hold these tensors and are not here."""
        return sorted(file for file in self.files_of(names) if not (self.folder / file).exists())

    def stamp(self) -> tuple[tuple[str, int], ...]:
        """Changes when a weight file that is here changes."""
        files = sorted({info.file for info in self.tensors.values()})
        return tuple((f, (self.folder / f).stat().st_mtime_ns) for f in files if (self.folder / f).exists())

    def tokenizer_files(self) -> list[Path]:
        """Only such as also come from a hub, or a folder and its repository would differ. So none that are code."""
        files = sorted(path for path in self.folder.iterdir() if is_tokenizer_file(path.name) and path.is_file())
        for path in files:
            require_file(path, MOST_TOKENIZER_BYTES)
        return files


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer: plain data, as fingerprints count it."""
    return name.startswith(_TOKENIZER_NAMES) and any(fnmatchcase(name, pattern) for pattern in SMALL_FILES)


def open_folder(folder: Path, name: str | None = None, known: Mapping[str, TensorInfo] | None = None) -> Checkpoint:
    """Read a local model folder's configuration and headers.

    Args:
        known: the headers of another node's copy. With them files may be missing: their tensors are taken from there.
    Raises:
        ModelError: the folder or its config.json is missing, or a safetensors file is missing, cut short or corrupt.
    """
    if not folder.is_dir():
        raise ModelError(
            f"model folder {folder} does not exist here; give a folder or a hub repository (owner/name), "
            "or a worker's own copy as `model:` in its configuration"
        )
    config = read_config(folder)
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        if not known or (folder / file).exists():
            tensors |= read_tensors(folder, file)
    if known:
        tensors |= _absent(folder, {key: info for key, info in known.items() if key not in tensors})
    return Checkpoint(name or str(folder), folder, config, tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dictionary. Raises ModelError if it is missing, not JSON, or names no model_type."""
    path = folder / "config.json"
    require_file(path, MOST_CONFIG_BYTES)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json; expected a model folder in Hugging Face layout") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no model_type; expected a model folder in Hugging Face layout")
    return config


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files that make up the model, by its index if it has one."""
    if (places := _index(folder)) is not None:
        return sorted(set(places.values()))
    if found := choose_weight_files(path.name for path in folder.iterdir()):
        return found
    raise ModelError(f"{folder} holds no *.safetensors; only safetensors checkpoints are read")


def choose_weight_files(names: Iterable[str]) -> list[str]:
    """A model's files where no index names them: beside its own there may be other forms of it."""
    found = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    return [name for name in found if name.startswith("model")] or found


def _index(folder: Path) -> dict[str, str] | None:
    """Each tensor's file, if the folder says so itself."""
    index = folder / "model.safetensors.index.json"
    require_file(index, _MOST_INDEX_BYTES)
    if not index.exists():
        return None
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: inside(file) for name, file in places.items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{index} is not a safetensors index ({error!r}); download the model again") from error


def _absent(folder: Path, known: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Those of these tensors whose file is not in the folder, each with its file by the folder's own index."""
    here = {path.name for path in folder.iterdir() if path.exists()}
    places = _index(folder) or {}
    absent = {name: replace(info, file=places.get(name, info.file)) for name, info in known.items()}
    return {name: info for name, info in absent.items() if info.file not in here}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
