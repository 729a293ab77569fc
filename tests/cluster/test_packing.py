"""The wheel that `brigade launch` makes itself, as pip sees it."""

import subprocess
import sys
from pathlib import Path

from coordinator.deploy.package import Package


def test_pip_installs_the_wheel(tmp_path: Path) -> None:
    """A small one, by the rules of the large."""
    info = "brigade-1.0.dist-info"
    files = {"toy.py": b"print('it runs')", f"{info}/METADATA": b"Metadata-Version: 2.1\nName: brigade\nVersion: 1.0\n"}
    package = Package("1.0", files | {f"{info}/entry_points.txt": b""}, "")
    (tmp_path / package.wheel_name).write_bytes(package.wheel)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", tmp_path / "there", tmp_path / package.wheel_name], check=True)
    assert (tmp_path / "there" / "toy.py").read_bytes() == files["toy.py"]
