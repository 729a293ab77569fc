"""Runs the tests of shards in a process of their own, whose memory is theirs alone."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = "tests/unit/compute/shards_alone.py"


def test_a_shard_holds_what_its_layers_need_and_nothing_else() -> None:
    options = (
        "-q",
        "-p",
        "timeout",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    )  # where plugins are not looked for, too
    command = [sys.executable, "-m", "pytest", *options, TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
