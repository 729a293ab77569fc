"""README's first commands: the package is built, installed where nothing of the checkout can be imported, and run."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from tests.cluster.processes import ROOT
from tests.cluster.sshd import link_packages


def installed(folder: Path) -> Path:
    """Build the wheel and install it into an empty environment, which has the packages of this one; return its bin."""
    source, packages = folder / "source", link_packages(folder / "packages")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("protos", "worker", "coordinator"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    wheel, python = folder / "brigade-0.1.0-py3-none-any.whl", folder / "env" / "bin" / "python"
    pip = ["uv", "pip", "install", "--python", python]
    if not shutil.which("uv"):
        pip = [sys.executable, "-m", "pip", "--python", python, "install"]
    for command in (
        [sys.executable, "-c", build, folder],
        [sys.executable, "-m", "venv", "--without-pip", folder / "env"],
        [*pip, "--quiet", "--no-deps", "--no-index", wheel],
    ):
        done = subprocess.run(command, cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(wheel) as archive:
        assert modules <= set(archive.namelist())
    [site_packages] = (folder / "env").glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(f"{packages}\n")
    return python.parent


@pytest.mark.long
def test_the_installed_package_answers_the_demo_on_three_processes_and_leaves_none_behind(tmp_path: Path) -> None:
    bin = installed(tmp_path)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    mark = {"BRIGADE_TEST_MARK": str(tmp_path)}  # inherited by the processes of this demo only

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, cwd=tmp_path, env=env | mark, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done

    files = "import coordinator, protos, worker; print(coordinator.__file__, protos.__file__, worker.__file__)"
    for file in run(bin / "python", "-c", files).stdout.split():
        assert Path(file).is_relative_to(tmp_path / "env"), "not of the checkout"
    done = run(bin / "brigade", "demo")
    assert done.stdout.rstrip().endswith("Answer: 45")  # 48 + 27 - 30
    assert all(node in done.stderr for node in ("coordinator", "worker-1", "worker-2"))
    assert re.search(r"in windows +125 tokens in \d+ steps", done.stderr)
    assert re.search(r"one token per step 125 tokens in 125 steps, [\d.]+ tok/s: the same tokens", done.stderr)
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            left += [process] if mark.items() <= process.environ().items() else []
    assert not left


def test_the_set_up_with_an_older_python_ends_with_one_line_that_says_what_to_set(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.6" && exit\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", "tools/setup.sh"],
        cwd=ROOT, env={"PYTHON": str(old), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: expected .*3\.11.*found Python 3\.9\.6.*PYTHON=.*\n", done.stderr)
