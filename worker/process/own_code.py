"""What this process runs: versions, and a digest of Brigade's own files, since installs of one version may differ."""

import hashlib
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_OWN = ("protos", "worker", "coordinator")
_PACKAGES = ("mlx", "mlx-lm", "brigade")


@dataclass(frozen=True)
class Running:
    """As it was when it was asked for first: files may be replaced while a process goes on with the old ones."""

    versions: dict[str, str]
    code: str


def version_of(package: str) -> str:
    """Of an installed package; a checkout may run without being installed itself."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@cache
def running() -> Running:
    """To be asked for at the start of a process that goes on for long."""
    versions = {"python": platform.python_version()} | {package: version_of(package) for package in _PACKAGES}
    return Running(versions, code_on_disk())


def code_on_disk() -> str:
    """The first twelve hex digits of the digest of all files as they are now."""
    digest = hashlib.sha256()
    for package in _OWN:
        for file in sorted((_ROOT / package).rglob("*.py")):
            digest.update(f"{file.relative_to(_ROOT).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
