"""What the project says of itself: of a checkout pyproject.toml, which may be newer than what was noted at its
installation; of an installed copy that note. The same words either way, so that digests agree."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from worker.errors import ConfigError

NAME = "brigade"


@dataclass(frozen=True)
class About:
    """`needs` are requirements, without those of extras; `scripts` are commands and their functions."""

    version: str
    python: str
    needs: tuple[str, ...]
    scripts: tuple[tuple[str, str], ...]

    @property
    def metadata(self) -> str:
        """Of a wheel (packaging.python.org, core metadata)."""
        needs = "".join(f"Requires-Dist: {each}\n" for each in self.needs)
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {self.version}\nRequires-Python: {self.python}\n{needs}"

    @property
    def entry_points(self) -> str:
        return "[console_scripts]\n" + "".join(f"{name} = {function}\n" for name, function in self.scripts)


def about(folder: Path) -> About:
    """Of the copy whose packages lie in this folder. Raises ConfigError if nothing says it."""
    project = folder / "pyproject.toml"
    if project.is_file():
        return _of_checkout(tomllib.loads(project.read_text(encoding="utf-8"))["project"])
    try:
        found = distribution(NAME)
    except PackageNotFoundError:
        raise ConfigError(f"expected {NAME} to be installed here, by uv, pipx or pip; see README.md") from None
    scripts = tuple((each.name, each.value) for each in found.entry_points.select(group="console_scripts"))
    return About(found.version, found.metadata["Requires-Python"], _in_one_form(found.requires or ()), scripts)


def _of_checkout(project: dict[str, object]) -> About:
    needs, scripts = project["dependencies"], project["scripts"]
    assert isinstance(needs, list) and isinstance(scripts, dict)
    return About(
        str(project["version"]), str(project["requires-python"]), _in_one_form(needs), tuple(sorted(scripts.items()))
    )


def _in_one_form(needs: Iterable[str]) -> tuple[str, ...]:
    found = [Requirement(each) for each in needs]
    return tuple(sorted(str(each) for each in found if "extra" not in str(each.marker or "")))
