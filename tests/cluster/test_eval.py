"""`brigade eval` as a process: killed and resumed, of a server, and what it refuses."""

import json
import signal
import time
from pathlib import Path
from typing import Any

from tests.cluster.commands import parse, run_here
from tests.cluster.conftest import RECITED
from tests.cluster.processes import Starter
from tests.cluster.servers import start_server

HERE = ("--local", "0", "--model")
Row = dict[str, Any]


def write(path: Path, count: int) -> Path:
    """Questions of which the model that recites gets every other one right."""
    lines = ({"prompt": f"q{n}", "answer": RECITED[:3] if n % 2 else "no"} for n in range(count))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def without_times(found: dict[str, Any]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "ms_per_token"} for row in found["rows"]]


def test_a_killed_evaluation_goes_on_to_the_same_table(start: Starter, reciter: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "q.jsonl", 8), tmp_path / "a.jsonl"
    asked = ("eval", "--questions", source, "--check", "contains", "-m", "40", "--decode", "ar,ngram", *HERE, reciter)
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


def test_a_server_gives_equal_answers_and_wrong_files_are_refused(
    start: Starter, reciter: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "q.jsonl", 4)
    asked = ("eval", "--questions", source, "--check", "contains", "-m", "30", "--decode", "ar", "--json")
    server = start_server(start, reciter, "--local", "0")
    remote, local = parse(run_here(*asked, "--server", server.url)), parse(run_here(*asked, *HERE, reciter))
    assert without_times(remote) == without_times(local) and remote["rows"][0]["num_right"] == 2
    (tmp_path / "docs.jsonl").write_text('{"q": "x", "options": ["no", "yz"], "gold": 1}\n')  # what it recites next
    task = tmp_path / "task.yaml"
    task.write_text(
        "{dataset_path: json, dataset_kwargs: {data_files: docs.jsonl}, output_type: multiple_choice, doc_to_text: q, "
        'doc_to_choice: options, doc_to_target: gold, target_delimiter: ""}'
    )
    for model in (("--server", server.url), (*HERE, reciter)):
        [row] = parse(run_here("eval", "--questions", task, "--json", *model))["rows"]
        assert (row["num"], row["num_right"]) == (1, 1)
    source.write_text('{"prompt": "a", "answer": "b"}\n{\n')
    outcome = run_here(*asked, *HERE, reciter)
    assert outcome.code == 2 and "line 2" in outcome.err and not outcome.out
