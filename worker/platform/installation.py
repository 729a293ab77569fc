"""This installation of Brigade: its versions, a digest of its code, its cache folder, and how to import it."""

import contextlib
import hashlib
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import msgpack

from worker.platform.files import replacing

ROOT = Path(__file__).resolve().parents[2]  # the folder that this code is imported from
_OWN = ("protos", "worker", "coordinator")
_PACKAGES = ("mlx", "mlx-lm", "brigade")


@dataclass(frozen=True)
class RunningCode:
    """The versions and the code digest of this process; files on disk may be replaced later."""

    versions: dict[str, str]
    code: str


def version_of(package: str) -> str:
    """Return a package's version, "not installed" for Brigade itself if it runs from a checkout."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@cache
def running_code() -> RunningCode:
    """Return what this process runs. Call it at the start of a long-lived process: the result is cached."""
    versions = {"python": platform.python_version()} | {package: version_of(package) for package in _PACKAGES}
    return RunningCode(versions, code_on_disk())


def code_on_disk() -> str:
    """Return the first twelve hex digits of the SHA-256 of Brigade's Python files on disk."""
    digest = hashlib.sha256()
    for package in _OWN:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(f"{file.relative_to(ROOT).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def cache_folder() -> Path:
    """Return the folder for files that can be recomputed or downloaded again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "brigade"


def record_path(kind: str, key: bytes) -> Path:
    """Return the path in the cache folder of a record of this kind, named by a digest of all that it depends on."""
    return cache_folder() / kind / f"{hashlib.sha256(key).hexdigest()[:32]}.msgpack"


def read_record(path: Path) -> Any:
    """Return the record that `write_record` stored at this path; None if it is missing, unreadable or damaged."""
    try:
        return msgpack.unpackb(path.read_bytes())
    except (OSError, ValueError, TypeError, msgpack.UnpackException):
        return None


def write_record(path: Path, record: Any) -> None:
    """Store a record atomically. Do nothing if the folder is not writable: records are only caches."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_bytes(msgpack.packb(record))


def skip_init(package: str) -> None:
    """Register a package without running its `__init__`; its modules import as usual.

    mlx-lm's `__init__` imports transformers, which only tokenizers need and which takes two thirds of a worker's
    start-up time.
    """
    spec = find_spec(package)
    if package not in sys.modules and spec is not None:
        sys.modules[package] = module_from_spec(spec)


def search_path() -> str:
    """Return a PYTHONPATH that finds this code, without empty entries, which would mean the current folder."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([str(ROOT), *map(os.path.abspath, given)])
