"""What `brigade status` shows, and which answers it takes for those of a server."""

from functools import partialmethod
from typing import Any

import httpx2
import pytest

from coordinator.cli.status import ask_server, tables
from coordinator.cluster.tables import plain_console
from worker.errors import BrigadeError
from worker.platform.text import Json

FOUND: Json = {
    "standing": {"state": "ready", "why": ""},
    "nodes": [
        {"name": name, "state": "active", "start": 0, "end": 12, "utilisation": 0.5, "weight_bytes": 123 << 30,
         "cache_held_bytes": 456 << 20, "peak_memory_bytes": 789 << 20, "memory_bytes": 321 << 30}
        for name in ("coordinator", "mac-studio-of-anna")
    ],
    "hops": [{"source": "coordinator", "target": "mini", "latency_ms": 1.5, "sent_bytes": 654 << 20}],
    "requests": [
        {"id": "chatcmpl-abcdefghijkl", "prompt_tokens": 12345, "prompt_computed": 512, "generated": 678,
         "decoder": "lookahead", "age_s": 90.0, "state": "running"}
    ] * 9,
    "recoveries": [{"at": 1.0, "age_s": 130.0, "story": "mini was lost"}],
}  # fmt: skip


def test_no_name_and_no_figure_is_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    plain_console().print(tables(FOUND, 40))
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 40
    for cell in (
        "coordinator ", "mac-studio-of-anna ", "[0,12)", "123.0 GiB", "456.0 MiB", "789.0 MiB", "50%", "active",
        "321.0 GiB", "coordinator → mini", "1.50 ms", "654.0 MiB", "abcdefghijkl", "512 of 12345", "678", "lookahead",
        "90 s", "running", "and 1 more", "2 min ago: mini was lost",
    ):  # fmt: skip
        assert cell in told


def test_an_answer_that_lacks_what_is_shown_is_one_of_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [FOUND]
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, json=answers[-1]))
    monkeypatch.setattr(httpx2.Client, "__init__", partialmethod(httpx2.Client.__init__, transport=transport))
    assert ask_server("http://other:1", None) == FOUND
    node = FOUND["nodes"][0]
    answers += [
        [], {"nodes": []}, {"standing": FOUND["standing"]}, FOUND | {"nodes": [{"name": "a"}]},
        FOUND | {"nodes": ["a"]}, FOUND | {"nodes": [node | {"name": 7}]}, FOUND | {"standing": {"state": "ready"}},
        FOUND | {"hops": [{"source": "a"}]}, FOUND | {"recoveries": [{"story": "a"}]},
        FOUND | {"nodes": [node | {"utilisation": "much"}]},
    ]  # fmt: skip
    while answers[1:]:
        with pytest.raises(BrigadeError, match=r"^http://other:1 answers, but not as `brigade serve` does$"):
            ask_server("http://other:1", None)
        answers.pop()
