"""The copy of Brigade that runs here as a wheel, a checkout or an installed one, and the digest that tells it from
others: of its files and of the packages that it runs with. Many copies have one and the same version number."""

import base64
import hashlib
import importlib.util
import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from coordinator.fleet.about import NAME, about
from coordinator.fleet.pinned import pins

_PACKAGES = ("protos", "worker", "coordinator")
_LEFT_OUT = {".pyc", ".proto"}  # what an installed copy may lack
_TAGS = "Wheel-Version: 1.0\nGenerator: brigade launch\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_ID_LENGTH = 16


@dataclass(frozen=True)
class Package:
    """What is to be installed.

    `files` are by their path in a wheel; `constraints` pin the packages that it needs, as pip reads them.
    """

    version: str
    files: Mapping[str, bytes]
    constraints: str

    @cached_property
    def id(self) -> str:
        """Another one for any other file or package."""
        whole = hashlib.sha256(self.constraints.encode())
        for name, content in sorted(self.files.items()):
            whole.update(f"\n{name} {hashlib.sha256(content).hexdigest()}".encode())
        return whole.hexdigest()[:_ID_LENGTH]

    @property
    def wheel_name(self) -> str:
        return f"{NAME}-{self.version}-py3-none-any.whl"

    @cached_property
    def wheel(self) -> bytes:
        """All of it as one file that pip and uv install (packaging.python.org, binary distribution format)."""
        info = f"{NAME}-{self.version}.dist-info"
        files = {**self.files, f"{info}/WHEEL": _TAGS.encode()}
        record = [f"{name},sha256={_hash(content)},{len(content)}\n" for name, content in files.items()]
        files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
        packing = io.BytesIO()
        with zipfile.ZipFile(packing, "w") as archive:  # most of it are weights, which get hardly smaller
            for name, content in files.items():
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)
        return packing.getvalue()


def installed() -> Package:
    """This very copy. Raises ConfigError if nothing says which version it is."""
    folders = [_folder_of(package) for package in _PACKAGES]
    said = about(folders[0].parent)
    files = {name: content for folder in folders for name, content in files_of(folder)}
    info = f"{NAME}-{said.version}.dist-info"
    files |= {f"{info}/METADATA": said.metadata.encode(), f"{info}/entry_points.txt": said.entry_points.encode()}
    return Package(said.version, files, pins(said.needs))


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def files_of(package: Path) -> Iterator[tuple[str, bytes]]:
    """A package's files by their path in a wheel, without what Python, an editor or a Finder left there."""
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package.parent)
        is_left_out = path.suffix in _LEFT_OUT or any(part.startswith((".", "__pycache__")) for part in name.parts)
        if path.is_file() and not is_left_out:
            yield name.as_posix(), path.read_bytes()


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
