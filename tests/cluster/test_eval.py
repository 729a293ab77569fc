"""`brigade eval` as a process: killed and resumed. tests/cluster/test_chat.py has it ask a server."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.commands import parse, run_here
from tests.cluster.conftest import RECITED
from tests.cluster.processes import Starter

HERE = ("--local", "0", "--model")
Row = dict[str, Any]


def write_questions(path: Path, count: int) -> Path:
    """Questions of which the model that recites gets every other one right."""
    lines = ({"prompt": f"q{n}", "answer": RECITED[:3] if n % 2 else "no"} for n in range(count))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def without_times(found: dict[str, Any]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "ms_per_token"} for row in found["rows"]]


@pytest.mark.long
def test_a_killed_evaluation_goes_on_to_the_same_table(start: Starter, reciter: Path, tmp_path: Path) -> None:
    source, target = write_questions(tmp_path / "q.jsonl", 8), tmp_path / "a.jsonl"
    asked = ("eval", "--questions", source, "--check", "contains", "-m", "24", "--decode", "ar,ngram", *HERE, reciter)
    whole = parse(run_here(*asked, "--json"))
    assert [(row["decoder"], row["num"], row["num_right"], row["equal_to_ar"]) for row in whole["rows"]] == [
        ("ar", 8, 4, 1.0),
        ("ngram", 8, 4, 1.0),
    ]
    assert whole["rows"][0]["tokens_per_step"] == whole["rows"][0]["rows_per_token"] == 1.0
    killed = start.brigade(*asked, "-o", target, "--concurrency", "1")
    while not (target.exists() and target.read_bytes().count(b"\n") >= 3):
        assert killed.is_running
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    known = target.read_bytes()
    num_known = known.count(b"\n")
    assert 3 <= num_known < 16
    outcome = run_here(*asked, "-o", target, "--json")
    assert f"{num_known} of 16 answers are known" in outcome.err
    again = parse(outcome)
    assert target.read_bytes().startswith(known[: known.rfind(b"\n") + 1])
    for row, other in zip(without_times(again), without_times(whole), strict=True):
        if row["decoder"] == "ar":
            assert row == other
        assert (row["num_right"], row["equal_to_ar"]) == (other["num_right"], other["equal_to_ar"])
    judged = [(each["expected"], each["right"]) for each in map(json.loads, target.read_text().splitlines())]
    assert sorted(judged) == sorted([(["no"], False), ([RECITED[:3]], True)] * 8)
    table = run_here(*asked, "-o", target)
    assert table.code == 0 and "50.0%" in table.out and "16 of 16 answers are known" in table.err
    [weights] = reciter.glob("*.safetensors")
    held = weights.read_bytes()
    weights.write_bytes(held[: len(held) // 2] + bytes(len(held) - len(held) // 2))  # another model in its folder
    try:
        assert "are known" not in run_here(*asked, "-o", target).err
    finally:
        weights.write_bytes(held)
