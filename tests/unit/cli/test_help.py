"""What `--help` says."""

import re
import subprocess
import sys

from typer.testing import CliRunner

from coordinator.cli.app import app


def test_verify_names_one_default_for_its_seed() -> None:
    shown = CliRunner().invoke(app, ["verify", "--help"], env={"COLUMNS": "300"}).output
    [line] = [line for line in shown.splitlines() if "--seed" in line]
    assert re.findall(r"default: (\w+)", line) == ["0"]


def test_help_is_there_before_what_computes_is_imported() -> None:
    program = "import sys, coordinator.cli.app; print(*{'mlx', 'mlx_lm', 'grpc', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
