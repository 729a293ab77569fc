"""The tables of --stats: no figure is cut or wrapped, however narrow the terminal."""

import pytest

from coordinator.cli.remote import answer_as_json
from coordinator.cli.report import print_stats, stages_of, stats_of
from coordinator.planning.plan import Assignment, Plan
from coordinator.sessions.output import Answer, Output, Token, Usage
from coordinator.sessions.waterfall import PARTS, StageTime, Waterfall
from protos.brigade_pb2 import StatusReply

NODES = [Assignment(name, 10 * i, 10 * i + 10, 0, 0, 0) for i, name in enumerate(("coordinator", "mac-mini-2", "gone"))]
HELD = StatusReply(clock=1, peak_memory_bytes=123 << 20, cache_bytes=999 << 20)


def tables(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is printed of two nodes and one that was lost."""
    stages = [StageTime(node, node.name == "gone", 123456.7, 12345.6, 1234.5, 0.99) for node in NODES]
    waterfall = Waterfall(1e5 * (len(PARTS) - 1), dict.fromkeys(PARTS, 1e5) | {"recovery": 0.0}, stages)
    monkeypatch.setenv("COLUMNS", str(width))
    print_stats(Answer(statuses=[HELD, HELD]), Plan(tuple(NODES[:2]), 1), waterfall)
    return capsys.readouterr().err.splitlines()


def test_no_row_is_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tables(60, monkeypatch, capsys)
    assert max(map(len, lines)) <= 60 and not any("…" in line for line in lines)
    for name, layers, held in (
        ("coordinator", "[0, 10)", "999.0 MiB 123.0 MiB"), ("mac-mini-2", "[10, 20)", "999.0 MiB 123.0 MiB"),
        ("gone", "lost", "- -"),
    ):  # fmt: skip
        rows = [line for line in lines if line.startswith(f"{name} ") and "compute" not in line]
        cells = " ".join(line.removeprefix(name) for line in rows)
        assert " ".join(cells.split()) == f"{layers} 123456.7 ms 12345.6 ms 1234.5 ms 99% {held}"
    for part in PARTS:
        assert sum(line.startswith(f"{part} ") for line in lines) == (part != "recovery"), part


def test_the_figures_of_a_lost_node_and_of_one_that_does_not_answer_are_null() -> None:
    stages = [StageTime(node, node.name == "gone", 1.0, 1.0, 1.0, 0.5) for node in NODES]
    found = stages_of(Answer(statuses=[HELD, HELD]), Plan(tuple(NODES[:2]), 1), Waterfall(1.0, {}, stages))
    assert [stage["cache_bytes"] for stage in found] == [999 << 20, 999 << 20, None]
    assert [stage["peak_memory_bytes"] for stage in found] == [123 << 20, 123 << 20, None]
    found = stages_of(Answer(statuses=[HELD, StatusReply()]), Plan(tuple(NODES[:2]), 1), Waterfall(1.0, {}, stages))
    assert [stage["cache_bytes"] for stage in found] == [999 << 20, None, None]


@pytest.mark.parametrize(("num_reused", "speed"), [(0, 100.0), (60, 40.0), (100, None)])
def test_the_speed_of_a_prompt_is_of_the_tokens_that_no_cache_held(num_reused: int, speed: float | None) -> None:
    answer = Answer()
    usage = Usage(num_prompt=100, started=10**9, num_reused=num_reused, num_steps=1, num_rows=1, num_generated=1)
    answer.add(Output("x", [Token(7)], 2 * 10**9, "stop", usage, num_steps=1, content="x"))
    assert stats_of(answer)["prompt_tokens_per_s"] == answer_as_json(answer)["stats"]["prompt_tokens_per_s"] == speed
