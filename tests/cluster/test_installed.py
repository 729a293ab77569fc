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


# A Mac with Apple's own Python, and with a uv that notes how it is called.
OLD = '#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.6" && exit\nexit 1\n'
UV = '#!/bin/sh\necho "$*" >>called\nmkdir -p .venv\n'


def set_up(folder: Path, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("python3", OLD), ("uv", UV)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin"} | env
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_the_set_up_with_an_older_python_ends_with_one_line_that_says_what_to_set(tmp_path: Path) -> None:
    script = ROOT / "tools" / "setup.sh"
    given = set_up(tmp_path, "bash", script, PYTHON=str(tmp_path / "python3"))
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "python3").symlink_to(tmp_path / "python3")
    for done in (given, set_up(tmp_path, "bash", script, PATH=f"{tmp_path}/without:/usr/bin:/bin")):
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(r"error: expected .*3\.11.*found Python 3\.9\.6.*PYTHON=.*uv.*\n", done.stderr)
    assert not (tmp_path / "called").exists()


def test_where_there_is_uv_an_older_python_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = set_up(tmp_path, "make", "setup")
    assert done.returncode == 0, done.stderr
    made, filled = (tmp_path / "called").read_text().splitlines()
    assert made == "venv --quiet --allow-existing --python >=3.11.3,<3.15 .venv" and "--constraint" in filled
    assert (tmp_path / ".venv" / ".ready-dev").exists()
    (tmp_path / ".venv" / ".ready-dev").unlink()
    assert set_up(tmp_path, "make", "setup", "PYTHON=python3").returncode != 0, "one that is given is not replaced"
