"""`brigade calibrate` on the bundled model."""

import json
from pathlib import Path

import pytest

from tests.cluster.commands import parse, run_here


@pytest.mark.long
def test_thresholds_are_found_for_the_kinds_that_reach_them(tmp_path: Path) -> None:
    target = tmp_path / "thresholds.json"
    asked = ("calibrate", "--questions", "arithmetic", "-m", "32", "-o", target)
    none = run_here(*asked, "--agreement", "0.9999", "--limit", "2", "--local", "0")
    assert none.code == 1 and "arithmetic" in none.err and not target.exists()
    report = parse(run_here(*asked, "--agreement", "0.8", "--limit", "4", "--local", "0", "--json"))
    found = report["kinds"]["arithmetic"]
    assert found["low"] >= 0.8 and found["num_held"] <= found["num_kept"] <= found["num"]
    written = json.loads(target.read_text())
    assert (written["model"], written["kinds"]["arithmetic"]) == (report["model"], found)
    assert found.keys() >= {"entropy_threshold", "position_penalty"}
