"""A model's folder: configuration, tensor headers and fingerprint. Reads no tensors; shard.py does."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from protos.brigade_pb2 import Fingerprint
from worker.errors import ModelError
from worker.model.headers import TensorInfo, inside, read_json, read_tensors, reading, require_file

DEMO = Path(__file__).parents[1] / "demo"
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model", "*.tiktoken", "tokenizer.jsonl")

MOST_CONFIG_BYTES = 16 << 20
MOST_TOKENIZER_BYTES = 1 << 28  # per file
_MOST_INDEX_BYTES = 100_000_000  # like a safetensors header
_TOKENIZER_NAME = re.compile(  # copies that a browser or a desktop has made have blanks in their names
    r"(tokenizer|tiktoken|vocab|merges|special_tokens|added_tokens|chat_template)[A-Za-z0-9_.-]{0,80}"
)

Download = Callable[[Iterable[str], Callable[[int], None]], None]
Stamp = tuple[tuple[str, str, int, int], ...]  # of files: names, where they are, sizes, modification times


@dataclass(frozen=True, eq=False)  # hashed by identity, as a key of caches
class Checkpoint:
    """A model's configuration and the headers of all its tensors, whose files may still be missing."""

    name: str
    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    download: Download | None = None
    hub_hashes: Mapping[str, str] = field(default_factory=dict)  # the hub's own hash of each weight file
    drafter: "Checkpoint | None" = None  # its drafter, if any: a small model or a draft head
    embeds_last: bool = False  # the last shard holds the embedding too, for a draft head
    opened: Stamp = ()  # of the weight files that were here, before their headers were read

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Hashes of the configuration, the tokenizer and the tensor layout.

        Fine-tunes of one model may be equal in all three; contents.py distinguishes them.

        Raises:
            ModelError: a file of the tokenizer cannot be read.
        """
        with reading(self.folder):
            tokenizer = _sha256(*(path.name.encode() + path.read_bytes() for path in self.tokenizer_files()))
        tensors = _sha256(self._canonical_tensors())
        return Fingerprint(config=_sha256(_canonical(self.config)), tokenizer=tokenizer, tensors=tensors)

    @property
    def description(self) -> str:
        """A hash of everything that determines the model's layout: name, configurations and headers."""
        named = [self.name, self.config, self.generation_config]
        return _sha256(_canonical(named), self._canonical_tensors())

    def _canonical_tensors(self) -> bytes:
        return _canonical([(name, info.dtype, list(info.shape)) for name, info in sorted(self.tensors.items())])

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json, empty if it is missing. Raises ModelError if it is no JSON object."""
        path = self.folder / "generation_config.json"
        found = read_json(path, MOST_CONFIG_BYTES)
        if found is not None and not isinstance(found, dict):
            raise ModelError(f"{path} is not valid JSON (expected keys and values)")
        return found or {}

    def fetch(self, names: Iterable[str], progress: Callable[[int], None]) -> None:
        """Download the files of these tensors into the folder; `progress` gets the number of bytes that arrived."""
        if self.download is not None:
            self.download(sorted(self.files_of(names)), progress)

    def files_of(self, names: Iterable[str]) -> set[str]:
        return {self.tensors[name].file for name in names}

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Return the files of these tensors that are not here."""
        return sorted(file for file in self.files_of(names) if not (self.folder / file).exists())

    def require_unchanged(self) -> Stamp:
        """Return the stamp of the weight files that are here now.

        Raises:
            ModelError: one of `opened` has changed since, so that its layers would not be of the model in memory.
        """
        now = stamp_of(self.folder, self.files_of(self.tensors).union(file for file, *_ in self.opened))
        if changed := sorted(set(self.opened) - set(now)):
            path = self.folder / changed[0][0]
            raise ModelError(f"{path} was changed or removed after the model was opened; start again")
        return now

    def vocabulary(self) -> dict[int, str]:
        """Return the tokens of tokenizer.json by id; empty if the file or its list of tokens is missing.

        Raises:
            ModelError: the file is no JSON object.
        """
        found = read_json(self.folder / "tokenizer.json", MOST_TOKENIZER_BYTES) or {}
        if not isinstance(found, dict):
            raise ModelError(f"{self.folder / 'tokenizer.json'} is not valid JSON (expected keys and values)")
        vocab = (found.get("model") or {}).get("vocab") or {}
        if isinstance(vocab, list):  # pairs of token and score
            vocab = {pair[0]: number for number, pair in enumerate(vocab)}
        added = {token["id"]: token["content"] for token in found.get("added_tokens") or ()}
        return {number: token for token, number in vocab.items()} | added

    def tokenizer_files(self) -> list[Path]:
        """Return the tokenizer's data files: only those that are also downloaded, so that copies match, and no code."""
        files = sorted(path for path in self.folder.iterdir() if is_tokenizer_file(path.name) and path.is_file())
        for path in files:
            require_file(path, MOST_TOKENIZER_BYTES)
        return files


def stamp_of(folder: Path, files: Iterable[str]) -> Stamp:
    """Return the stamp of those of these files that are in the folder."""
    paths = {file: folder / file for file in sorted(files) if (folder / file).exists()}
    return tuple(
        (file, str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for file, path in paths.items()
    )


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file of this name is one of a tokenizer's data files."""
    return bool(_TOKENIZER_NAME.fullmatch(name)) and any(fnmatchcase(name, pattern) for pattern in SMALL_FILES)


def open_folder(folder: Path, name: str | None = None, known: Mapping[str, TensorInfo] | None = None) -> Checkpoint:
    """Read a local model folder's configuration and headers.

    Args:
        known: the headers of another node's copy; they describe the tensors of missing files.
    Raises:
        ModelError: the folder or its config.json is missing, or a safetensors file is missing, cut short or corrupt,
            or one of them cannot be read; or the folder's path is not UTF-8, which tokenizers and MLX expect.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"expected a path in UTF-8, found {folder}: rename it, or give a link to it") from error
    with reading(folder):
        if folder.is_file():
            raise ModelError(f"{folder} is a file; expected the folder of a model, such as {folder.parent}")
        if not folder.is_dir():
            raise ModelError(
                f"model folder {folder} does not exist here; give a folder or a hub repository (owner/name)"
            )
        config = read_config(folder)
        tensors: dict[str, TensorInfo] = {}
        files = weight_files(folder)
        opened = stamp_of(folder, files)
        for file in files:
            if not known or (folder / file).exists():
                tensors |= read_tensors(folder, file)
        here, places = {path.name for path in folder.iterdir() if path.exists()}, _index(folder) or {} if known else {}
        for key, info in (known or {}).items():
            info = replace(info, file=places.get(key, info.file))  # the folder's own index has other file names
            if key not in tensors and info.file not in here:
                tensors[key] = info
        return Checkpoint(name or str(folder), folder, config, tensors, opened=opened)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises ModelError if it is missing, not JSON, or names no model_type."""
    path = folder / "config.json"
    if not path.exists():
        raise ModelError(f"{folder} has no config.json; expected a model folder in Hugging Face layout")
    config = read_json(path, MOST_CONFIG_BYTES)
    if isinstance(config, dict):
        config.setdefault("model_type", config.get("speculators_model_type"))  # used by drafters of that library
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no model_type; expected a model folder in Hugging Face layout")
    return config


def weight_files(folder: Path) -> list[str]:
    """Return the names of the model's safetensors files, from its index if it has one."""
    if (places := _index(folder)) is not None:
        return sorted(set(places.values()))
    if found := choose_weight_files(path.name for path in folder.iterdir()):
        return found
    raise ModelError(f"{folder} holds no *.safetensors; only safetensors checkpoints are read")


def choose_weight_files(names: Iterable[str]) -> list[str]:
    """Choose a model's files without an index: the folder may also hold other formats of the model."""
    found = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    return [name for name in found if name.startswith("model")] or found


def _index(folder: Path) -> dict[str, str] | None:
    """Return each tensor's file from the folder's index; None without an index."""
    path = folder / "model.safetensors.index.json"
    index = read_json(path, _MOST_INDEX_BYTES, "a safetensors index")
    if index is None and not path.exists():
        return None
    try:
        return {name: inside(file) for name, file in index["weight_map"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{path} is not a safetensors index ({error!r}); download the model again") from error


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
