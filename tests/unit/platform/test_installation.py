"""What runs here, told by a copy that may be installed or not."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from worker.platform.installation import code_on_disk, running_code, version_of


def test_a_checkout_runs_without_being_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(package: str) -> str:
        if package == "brigade":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr("worker.platform.installation.version", found)
    running_code.cache_clear()
    try:
        versions = running_code().versions
    finally:
        running_code.cache_clear()
    assert versions["brigade"] == "not installed" and versions["mlx"] == version_of("mlx") == version("mlx")


def test_code_is_another_once_a_file_of_ours_has_another_text_or_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.platform.installation._ROOT", tmp_path)
    file = tmp_path / "worker" / "node" / "a.py"
    file.parent.mkdir(parents=True)
    found = []
    for text in ("1", "2", "2"):
        file.write_text(text)
        (tmp_path / "elsewhere.py").write_text(f"{len(found)}")  # no file of ours
        found.append(code_on_disk())
    file.rename(file.with_name("b.py"))
    found.append(code_on_disk())
    assert found[1] == found[2] and len(set(found)) == 3 and {len(each) for each in found} == {12}
