"""`brigade bridge` as another program uses it: lines in, lines out, nothing else on standard output."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.cluster.commands import run_here
from tests.cluster.conftest import RECITED
from tests.cluster.processes import run

Json = dict[str, Any]
NUM_BYTES = len(RECITED.encode())
ENDLESS = {"op": "generate", "prompt": "Hi", "max_tokens": 30_000, "ignore_eos": True}


def bridged(outcome: Any) -> dict[Any, list[Json]]:
    """The lines of a bridge that ended well, by id."""
    assert outcome.code == 0, outcome.err
    found = defaultdict(list)
    for line in map(json.loads, outcome.out.splitlines()):
        found[line["id"]].append(line)
    return found


def test_many_requests_are_answered_at_once_and_all_of_them_before_the_end(reciter: Path) -> None:
    hello = [{"role": "user", "content": "Hi"}]
    requests: list[Json] = [
        {"id": "endless", **ENDLESS},
        {"id": 2, "op": "chat", "messages": hello, "max_tokens": 2 * NUM_BYTES},
        {"id": 2, "op": "generate", "prompt": "Hi"},
        {"id": "endless", "op": "cancel"},
        {"id": "i", "op": "info"},
        {"id": "\ud800", "op": "info"},
        {"id": "wrong", "op": "generate", "prompt": "Hi", "max_tokens": 0},
        {"id": "nan", "op": "generate", "prompt": "Hi", "temperature": float("nan")},
        {"id": "two", "op": "generate", "prompt": "Hi", "n": 2},
        {"id": "logs", "op": "chat", "messages": hello, "logprobs": True},
        {"id": "long", "op": "chat", "messages": [{"role": "user", "content": "Hi" * 100_000}]},
    ]
    script = "".join(f"{json.dumps(each)}\n" for each in requests) + '{"id": "torn", "op": \n'
    found = bridged(run("bridge", "--model", reciter, "--local", "0", stdin=script))
    errors = {name: line["error"] for name, lines in found.items() for line in lines if "error" in line}
    assert {name: error["field"] for name, error in errors.items() if name is not None} == {
        2: "id", "wrong": "max_tokens", "nan": "temperature", "two": "n", "logs": "logprobs", "long": "messages",
    }  # fmt: skip
    assert "expected a JSON object" in errors[None]["message"]
    assert found["i"][0]["info"]["vocab_size"] == 320 and 2 in found["i"][0]["info"]["running"]
    assert "info" in found["\ud800"][0], "half a character is echoed as it came"
    assert found["endless"][-1]["finish_reason"] == "cancelled"
    *pieces, done = [line for line in found[2] if "error" not in line]
    assert all(set(piece) == {"id", "text", "tokens"} for piece in pieces) and len(pieces) > 1
    assert "".join(piece["text"] for piece in pieces) == done["text"] == 2 * RECITED
    assert [token for piece in pieces for token in piece["tokens"]] == done["tokens"]
    assert (done["done"], done["finish_reason"], done["stats"]["steps"]) == (True, "length", 2 * NUM_BYTES)


def test_quit_ends_running_requests(reciter: Path) -> None:
    script = "".join(f"{json.dumps(each)}\n" for each in ({"id": 1, **ENDLESS}, {"id": 2, "op": "quit"}))
    found = bridged(run_here("bridge", "--model", reciter, "--local", "0", stdin=script))
    assert found[1][-1]["finish_reason"] == "cancelled"
