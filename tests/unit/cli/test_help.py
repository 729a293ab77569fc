"""What `--help` says."""

import re

from typer.testing import CliRunner

from coordinator.cli.app import app


def test_verify_names_one_default_for_its_seed() -> None:
    shown = CliRunner().invoke(app, ["verify", "--help"], env={"COLUMNS": "300"}).output
    [line] = [line for line in shown.splitlines() if "--seed" in line]
    assert re.findall(r"default: (\w+)", line) == ["0"]
