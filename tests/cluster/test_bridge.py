"""`brigade bridge` as another program uses it: lines in, lines out, nothing else on standard output."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.commands import run_here
from tests.cluster.conftest import RECITED
from tests.cluster.processes import run

Json = dict[str, Any]
NUM_BYTES = len(RECITED.encode())
LONG = 30_000


def lines_of(*lines: Json | str) -> str:
    return "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)


def by_id(out: str) -> dict[Any, list[Json]]:
    found: dict[Any, list[Json]] = {}
    for line in out.splitlines():
        each = json.loads(line)
        found.setdefault(each["id"], []).append(each)
    return found


def require_whole(lines: Sequence[Json], text: str, num_tokens: int) -> None:
    """Pieces that make up what the last line says."""
    *pieces, done = lines
    assert all(set(piece) == {"id", "text", "tokens"} for piece in pieces) and len(pieces) > 1
    assert "".join(piece["text"] for piece in pieces) == done["text"] == text
    assert [token for piece in pieces for token in piece["tokens"]] == done["tokens"]
    assert len(done["tokens"]) == num_tokens and done["done"] is True and done["finish_reason"] == "length"
    assert done["stats"]["steps"] == num_tokens


def test_many_requests_are_answered_at_once_and_all_of_them_before_the_end(reciter: Path) -> None:
    script = lines_of(
        {"id": "endless", "op": "generate", "prompt": "Hi", "max_tokens": LONG, "ignore_eos": True},
        {"id": "a", "op": "generate", "prompt": "Hi", "max_tokens": NUM_BYTES, "temperature": 0},
        {"id": "a", "op": "generate", "prompt": "Hi"},
        '{"id": "torn", "op": ',
        {"id": 2, "op": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2 * NUM_BYTES},
        {"id": "endless", "op": "cancel"},
        {"id": "i", "op": "info"},
        {"id": "\ud800", "op": "info"},
        '{"id": "nan", "op": "generate", "prompt": "Hi", "temperature": NaN}',
        {"id": "wrong", "op": "generate", "prompt": "Hi", "max_tokens": 0},
    )
    outcome = run("bridge", "--model", reciter, "--local", "0", stdin=script)
    assert outcome.code == 0, outcome.err
    found = by_id(outcome.out)
    [twice] = [line for line in found["a"] if "error" in line]
    assert twice["error"]["field"] == "id"
    require_whole([line for line in found["a"] if line != twice], RECITED, NUM_BYTES)
    require_whole(found[2], 2 * RECITED, 2 * NUM_BYTES)
    assert "expected a JSON object" in found[None][0]["error"]["message"]
    assert found["wrong"][0]["error"]["field"] == "max_tokens"
    assert found["i"][0]["info"]["vocab_size"] == 320 and 2 in found["i"][0]["info"]["running"]
    assert "info" in found["\ud800"][0], "half a character is echoed as it came"
    assert found["nan"] == [
        {"id": "nan", "error": {"message": "expected a number of JSON, found NaN", "field": "temperature"}}
    ]
    assert found["endless"][-1]["finish_reason"] == "cancelled"


def test_quit_ends_what_is_under_way(reciter: Path) -> None:
    endless = {"id": 1, "op": "generate", "prompt_tokens": [5], "max_tokens": LONG, "ignore_eos": True}
    outcome = run_here("bridge", "--model", reciter, "--local", "0", stdin=lines_of(endless, {"id": 2, "op": "quit"}))
    assert outcome.code == 0, outcome.err
    assert by_id(outcome.out)[1][-1]["finish_reason"] == "cancelled"
