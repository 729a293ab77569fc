"""`brigade batch` on real files: every request an answer, whatever became of the runs before."""

import json
from pathlib import Path
from typing import Any

from tests.cluster.commands import run_here
from tests.cluster.conftest import RECITED

Json = dict[str, Any]
NUM_BYTES = len(RECITED.encode())


def request(name: str, **body: Any) -> Json:
    body = {"messages": [{"role": "user", "content": name}], "max_tokens": NUM_BYTES, "model": "any"} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, *lines: Json | str) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def answers_of(path: Path) -> dict[str, Json]:
    """The answer lines by custom_id; those of input lines without one of their own by "line N"."""
    answers: dict[str, Json] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        name = line["custom_id"] or line["error"]["message"].partition(":")[0]
        assert name not in answers, "each once"
        answers[name] = line
    return answers


def test_a_batch_goes_on_where_it_stopped(reciter: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(request(f"r{n}") for n in range(20)))
    known = '{"custom_id": "r3", "from": "an earlier run"}\n{"custom_id": "r5", "response": {"status_code": 503}}\n'
    target = tmp_path / "out.jsonl"
    target.write_text(known + '{"custom_id": "r4", "resp')  # killed in the middle of a line
    outcome = run_here("batch", source, "-o", target, "--model", reciter, "--local", "0")
    assert outcome.code == 3 and outcome.out == "", outcome.err
    assert "2 of 20 requests, 1 of them with an error" in outcome.err and "18 requests answered" in outcome.err
    assert target.read_text().startswith(known)
    answers = answers_of(target)
    assert answers.pop("r3")["from"] == "an earlier run"
    assert answers.pop("r5")["response"] == {"status_code": 503} and len(answers) == 18
    for line in answers.values():
        [choice] = line["response"]["body"]["choices"]
        assert choice["message"]["content"] == RECITED and line["response"]["status_code"] == 200
        assert line["error"] is None


def test_a_wrong_request_is_an_error_line_and_a_wrong_line_is_named(reciter: Path, tmp_path: Path) -> None:
    wrong = [
        request("field", max_tokens=-2),
        request("place") | {"url": "/v1/\ud800"},
        request("x") | {"custom_id": "\ud800", "method": "GET"},
    ]
    prompt = {"prompt": ["user: x\nassistant: "] * 2, "max_tokens": NUM_BYTES, "echo": True}
    raw = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": prompt}
    source = write(tmp_path / "in.jsonl", "{torn", request("a"), *wrong, request("a"), '{"custom_id": 5}', raw)
    target = tmp_path / "out.jsonl"
    command = ("batch", source, "-o", target, "--model", reciter, "--local", "0")
    outcome = run_here(*command)
    assert outcome.code == 2
    assert [n for n in range(1, 10) if f"in.jsonl, line {n}:" in outcome.err] == [1, 6, 7]
    answers = answers_of(target)
    assert {name for name, line in answers.items() if line["error"] is None} == {"a", "b"}
    said = [choice["text"] for choice in answers["b"]["response"]["body"]["choices"]]
    assert said == [f"user: x\nassistant: {RECITED}"] * 2
    for n in (1, 6, 7):
        assert answers[f"line {n}"]["response"]["status_code"] == 400 and answers[f"line {n}"]["custom_id"] is None
    assert answers["field"]["response"]["status_code"] == 400
    assert "line 3: max_tokens" in answers["field"]["error"]["message"]
    assert answers["\ud800"]["error"]["message"].startswith("line 5: url: expected POST")
    assert "expected POST to /v1/chat/completions" in answers["place"]["error"]["message"]
    again = run_here(*command)
    assert answers_of(target) == answers, "nothing new"
    assert again.code == 2 and "has the answers to 8 of 8 requests, 6 of them with an error\n" in again.err
    write(source, *wrong, request("a"))
    target.unlink()
    assert [run_here(*command).code for _ in range(2)] == [2, 2], "without a wrong line too, and again"


def test_files_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", request("a"))
    for target, said in ((source, "another file"), (write(tmp_path / "notes", "text"), "line 1: expected the answers")):
        outcome = run_here("batch", source, "-o", target, "--local", "0")
        assert outcome.code == 2 and said in outcome.err
    assert "cannot be read" in run_here("batch", tmp_path / "none", "-o", tmp_path / "out").err
