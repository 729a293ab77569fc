"""The running copy of Brigade, a checkout or an installed one, as a wheel for other machines.

Its id is a digest of its files and of the versions of its packages, since many copies share one version number.
"""

import base64
import hashlib
import importlib
import io
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from worker.errors import ConfigError

NAME = "brigade"
_PACKAGES = ("protos", "worker", "coordinator")
_LEFT_OUT = {".pyc", ".proto"}  # an installed copy may lack them
_TAGS = "Wheel-Version: 1.0\nGenerator: brigade launch\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_ID_LENGTH = 16


@dataclass(frozen=True)
class Package:
    """A version to install.

    Args:
        files: contents by path in a wheel.
        constraints: the versions of its packages, as pip reads them.
    """

    version: str
    files: Mapping[str, bytes]
    constraints: str

    @cached_property
    def id(self) -> str:
        """A hexadecimal digest of all files and pinned packages."""
        whole = hashlib.sha256(self.constraints.encode())
        for name, content in sorted(self.files.items()):
            whole.update(f"\n{name} {hashlib.sha256(content).hexdigest()}".encode())
        return whole.hexdigest()[:_ID_LENGTH]

    @property
    def wheel_name(self) -> str:
        return f"{NAME}-{self.version}-py3-none-any.whl"

    @cached_property
    def wheel(self) -> bytes:
        """The wheel that pip and uv install (packaging.python.org, binary distribution format)."""
        info = f"{NAME}-{self.version}.dist-info"
        files = {**self.files, f"{info}/WHEEL": _TAGS.encode()}
        record = []
        for name, content in files.items():
            checksum = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={checksum},{len(content)}\n")
        files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
        packing = io.BytesIO()
        with zipfile.ZipFile(packing, "w") as archive:  # uncompressed: weights are most of it
            for name, content in files.items():
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)
        return packing.getvalue()


def installed() -> Package:
    """Return the running copy. Raises ConfigError if its version is unknown."""
    folders = [Path(importlib.import_module(package).__path__[0]) for package in _PACKAGES]
    project = project_at(folders[0].parent)
    files = {name: content for folder in folders for name, content in files_of(folder)}
    info = f"{NAME}-{project.version}.dist-info"
    files |= {f"{info}/METADATA": project.metadata.encode(), f"{info}/entry_points.txt": project.entry_points.encode()}
    return Package(project.version, files, pins(project.requirements))


def files_of(package: Path) -> Iterator[tuple[str, bytes]]:
    """Yield a package's files by path in a wheel, without the leftovers of Python, editors and Finder."""
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package.parent)
        is_left_out = path.suffix in _LEFT_OUT or any(part.startswith((".", "__pycache__")) for part in name.parts)
        if path.is_file() and not is_left_out:
            yield name.as_posix(), path.read_bytes()


class Project(NamedTuple):
    """The project's version, its requirements without those of extras, and two files of its wheel."""

    version: str
    requirements: Sequence[str]
    metadata: str  # METADATA (packaging.python.org, core metadata)
    entry_points: str  # entry_points.txt


def project_at(folder: Path) -> Project:
    """Return the metadata of the copy whose packages lie in this folder.

    It is read from pyproject.toml in a checkout, which may be newer than the metadata of its installation, else from
    the latter. Both give the same result, so that ids agree.

    Raises:
        ConfigError: there is neither.
    """
    pyproject = folder / "pyproject.toml"
    found = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {}) if pyproject.is_file() else {}
    if found.get("name") == NAME:  # other packages may have left theirs beside an installation
        version, python, requirements = found["version"], found["requires-python"], found["dependencies"]
        scripts = sorted(found["scripts"].items())
    else:
        try:
            noted = distribution(NAME)
        except PackageNotFoundError:
            raise ConfigError(f"expected {NAME} to be installed here, by uv, pipx or pip; see README.md") from None
        version, python, requirements = noted.version, noted.metadata["Requires-Python"], noted.requires or ()
        scripts = [(each.name, each.value) for each in noted.entry_points.select(group="console_scripts")]
    needed = sorted(str(each) for each in map(Requirement, requirements) if "extra" not in str(each.marker or ""))
    metadata = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\nRequires-Python: {python}\n"
    metadata += "".join(f"Requires-Dist: {each}\n" for each in needed)
    commands = "".join(f"{name} = {function}\n" for name, function in scripts)
    return Project(version, needed, metadata, f"[console_scripts]\n{commands}")


def pins(requirements: Iterable[str], find: Callable[[str], Distribution] = distribution) -> str:
    """Return constraints, a line each, with the present versions of these requirements and of what they require.

    Packages that no index has are left out: versions with a local part, installations from a folder or an address.
    """
    versions: dict[str, str] = {}
    waiting = [each for each in map(Requirement, requirements) if _applies(each)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            found = find(requirement.name)
        except PackageNotFoundError:
            continue
        if "+" not in found.version and found.read_text("direct_url.json") is None:
            versions[key[0]] = found.version
        waiting += [each for each in map(Requirement, found.requires or ()) if _applies(each, requirement.extras)]
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def _applies(requirement: Requirement, extras: Iterable[str] = ()) -> bool:
    """Return whether a requirement applies on this machine, for a package that is installed with these extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))
