"""What runs here, told by a copy that may be installed or not."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from worker.process.own_code import running, version_of


def test_a_checkout_runs_without_being_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(package: str) -> str:
        if package == "brigade":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr("worker.process.own_code.version", found)
    running.cache_clear()
    try:
        versions = running().versions
    finally:
        running.cache_clear()
    assert versions["brigade"] == "not installed" and versions["mlx"] == version_of("mlx") == version("mlx")
