"""`brigade calibrate` on the bundled model, and what takes its file."""

import json
from pathlib import Path

from tests.cluster.commands import parse, run_here


def test_thresholds_are_found_for_the_kinds_that_reach_them_and_decode_by_their_name(tmp_path: Path) -> None:
    target = tmp_path / "thresholds.json"
    asked = ("calibrate", "--questions", "arithmetic", "-m", "32", "-o", target)
    none = run_here(*asked, "--agreement", "0.9999", "--limit", "2", "--local", "0")
    assert none.code == 1 and "arithmetic" in none.err and not target.exists()
    found = parse(run_here(*asked, "--agreement", "0.8", "--limit", "4", "--local", "1", "--json"))["kinds"][
        "arithmetic"
    ]
    assert found["low"] >= 0.8 and found["num_held"] <= found["num_kept"] <= found["num"]
    assert json.loads(target.read_text())["kinds"]["arithmetic"] == found
    prompt = ("generate", "What is 12 + 30?", "-m", "16", "--local", "0", "--decode", "diffusion-fast", "--json")
    by_name = parse(run_here(*prompt, "--entropy-threshold", f"{target}:arithmetic"))
    numbers = found["entropy_threshold"], found["position_penalty"]
    by_number = run_here(*prompt, "--entropy-threshold", str(numbers[0]), "--position-penalty", str(numbers[1]))
    assert by_name["tokens"] == parse(by_number)["tokens"]
    refused = run_here(*prompt, "--entropy-threshold", f"{target}:code")
    assert refused.code == 2 and "--entropy-threshold" in refused.err and "arithmetic" in refused.err
