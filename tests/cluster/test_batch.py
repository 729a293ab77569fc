"""`brigade batch` on real files: one answer for each request, whatever became of the runs before."""

import json
from pathlib import Path
from typing import Any

from tests.cluster.commands import run_here
from tests.cluster.conftest import RECITED

Json = dict[str, Any]
NUM_BYTES = len(RECITED.encode())
HERE = ("--local", "0", "--model")


def request(name: str, **body: Any) -> Json:
    body = {"messages": [{"role": "user", "content": name}], "max_tokens": NUM_BYTES, "model": "any"} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, *lines: Json) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_batch_continues_where_it_stopped(reciter: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(request(f"r{n}") for n in range(20)))
    known = '{"custom_id": "r3", "from": "an earlier run"}\n{"custom_id": "r5", "response": {"status_code": 503}}\n'
    target = tmp_path / "out.jsonl"
    target.write_text(known + '{"custom_id": "r4", "resp')  # killed in the middle of a line
    outcome = run_here("batch", source, "-o", target, *HERE, reciter)
    assert outcome.code == 3 and outcome.out == "", outcome.err
    assert "2 of 20 requests, 1 of them with an error" in outcome.err and "18 requests answered" in outcome.err
    assert target.read_text().startswith(known)
    answers = [json.loads(line) for line in target.read_text().splitlines()[2:]]
    assert {line["custom_id"] for line in answers} == {f"r{n}" for n in range(20)} - {"r3", "r5"}
    for line in answers:
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        assert line["response"]["body"]["choices"][0]["message"]["content"] == RECITED


def test_a_failed_request_names_its_field_and_alone_shows_in_the_exit_code(reciter: Path, tmp_path: Path) -> None:
    wrong = [
        request("field", max_tokens="many"),
        request("place") | {"url": "/v1/\ud800"},
        request("x") | {"custom_id": "\ud800", "method": "GET"},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    command = ("batch", source, "-o", target, *HERE, reciter)
    write(source, request("a"))
    sound = run_here(*command)
    assert sound.code == 0 and "1 request answered in" in sound.err and "with an error" not in sound.err, sound.err
    write(source, {}, *wrong, request("a"))
    runs = [run_here(*command) for _ in range(2)]
    assert [run.code for run in runs] == [2, 2]
    assert "4 requests answered, 4 of them with an error" in runs[0].err
    assert "5 of 5 requests, 4 of them with an error" in runs[1].err
    answers = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert {name for name, line in answers.items() if line["error"] is None} == {"a"} and len(answers) == 5
    assert answers["field"]["response"]["status_code"] == 400
    assert "line 2: max_tokens" in answers["field"]["error"]["message"]
    assert "expected POST to /v1/chat/completions" in answers["place"]["error"]["message"]
    assert answers["\ud800"]["error"]["message"].startswith("line 4: url: expected POST")


def test_files_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    source, notes = write(tmp_path / "in.jsonl", request("a")), tmp_path / "notes"
    notes.write_text("text\n")
    for read, target, field in (
        *((source, source, "-o"), (source, notes, "-o"), (tmp_path / "none", notes, "")),
        *((source, "-", "found -"), ("-", notes, "found -")),
    ):
        outcome = run_here("batch", read, "-o", target, *HERE, "demo")
        assert outcome.code == 2 and outcome.err.startswith("error: ") and field in outcome.err
    assert notes.read_text() == "text\n"
