"""The wheel that users install: it brings everything that the demo needs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_wheel_installs_into_an_empty_environment_and_runs_the_demo(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves files beside the code
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    wheels, python = tmp_path / "wheels", tmp_path / "venv" / "bin" / "python"
    if shutil.which("uv"):
        build = ["uv", "build", "--quiet", "--wheel", "--out-dir", wheels, source]
    else:
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, source]
    subprocess.run(build, check=True)
    (wheel,) = wheels.glob("brigade-*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", wheel], check=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    demo = [python.with_name("brigade"), "demo", "--local", "1", "--max-tokens", "8"]
    ran = subprocess.run(demo, cwd=elsewhere, check=True, capture_output=True, text=True)
    assert "the same tokens" in ran.stderr, ran.stderr
