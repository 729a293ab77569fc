"""The tables of --stats: no figure is cut or wrapped, however narrow the terminal."""

from io import StringIO

import pytest
from rich.console import Console

from coordinator.cli.report import print_stats, stages_of
from coordinator.cli.status import tables as status_tables
from coordinator.planning.plan import Assignment, Plan
from coordinator.sessions.output import Answer
from coordinator.sessions.waterfall import PARTS, StageTime, Waterfall
from protos.brigade_pb2 import StatusReply

NODES = [Assignment(name, 10 * i, 10 * i + 10, 0, 0, 0) for i, name in enumerate(("coordinator", "mac-mini-2", "gone"))]
HELD = StatusReply(peak_memory_bytes=123 << 20, cache_bytes=999 << 20)


def tables(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is printed of two nodes and one that was lost."""
    stages = [StageTime(node, node.name == "gone", 123456.7, 12345.6, 1234.5, 0.99) for node in NODES]
    waterfall = Waterfall(1e5 * (len(PARTS) - 1), dict.fromkeys(PARTS, 1e5) | {"recovery": 0.0}, stages)
    monkeypatch.setenv("COLUMNS", str(width))
    print_stats(Answer(statuses=[HELD, HELD]), Plan(tuple(NODES[:2]), 1), waterfall)
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_row_is_one_line_with_all_its_figures(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tables(width, monkeypatch, capsys)
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    [coordinator] = {" ".join(line.split()[1:]) for line in lines if line.startswith("coordinator  ") and "ms" in line}
    assert "123456.7 ms 12345.6 ms 1234.5 ms 99%" in coordinator
    [held] = [line for line in lines if line.startswith("mac-mini-2 ") and "[10, 20)" in line]
    assert "999.0 MiB" in held and held.endswith("123.0 MiB")
    assert any(line.split()[:2] == ["gone", "lost"] and line.split()[-2:] == ["-", "-"] for line in lines)
    for part in PARTS:
        assert sum(line.startswith(f"{part} ") for line in lines) == (part != "recovery"), part


NODE = {
    "name": "coordinator", "state": "active", "start": 0, "end": 53, "utilisation": 0.5, "memory_bytes": 96 << 30,
    "weight_bytes": 70 << 30, "cache_held_bytes": 999 << 20, "cache_promised_bytes": 12 << 30,
    "peak_memory_bytes": 80 << 30, "active_memory_bytes": 71 << 30, "cached_memory_bytes": 3 << 30,
}  # fmt: skip


def lines_of(*nodes: dict[str, object]) -> list[str]:
    found = {"standing": {"state": "ready", "why": ""}, "nodes": list(nodes)}
    console = Console(file=StringIO(), width=60)
    console.print(status_tables(found))
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_what_each_node_may_use_has_promised_and_holds_is_told_in_sixty_columns() -> None:
    lines = lines_of(NODE, {"name": "mini", "state": "lost", "why": "stopped answering"})
    head = next(i for i, line in enumerate(lines) if line.startswith("memory"))
    assert [line.split() for line in lines[head : head + 3]] == [
        ["memory", "may", "use", "promised", "active", "cached"],
        ["coordinator", "96.0", "G", "12.0", "G", "71.0", "G", "3.0", "G"],
        ["mini", "–", "–", "–", "–"],
    ]
    assert "mini: stopped answering" in lines
    assert not [line for line in lines_of() if line.startswith("memory")]


def test_the_figures_of_a_lost_node_are_null() -> None:
    stages = [StageTime(node, node.name == "gone", 1.0, 1.0, 1.0, 0.5) for node in NODES]
    found = stages_of(Answer(statuses=[HELD, HELD]), Plan(tuple(NODES[:2]), 1), Waterfall(1.0, {}, stages))
    assert [stage["cache_bytes"] for stage in found] == [999 << 20, 999 << 20, None]
    assert [stage["peak_memory_bytes"] for stage in found] == [123 << 20, 123 << 20, None]
