"""The tables of `brigade status`."""

from io import StringIO

from rich.console import Console

from coordinator.cli.status import tables

NODE = {
    "name": "coordinator", "state": "active", "start": 0, "end": 53, "utilisation": 0.5, "memory_bytes": 96 << 30,
    "weight_bytes": 70 << 30, "cache_held_bytes": 999 << 20, "cache_promised_bytes": 12 << 30,
    "peak_memory_bytes": 80 << 30, "active_memory_bytes": 71 << 30, "cached_memory_bytes": 3 << 30,
}  # fmt: skip


def lines_of(*nodes: dict[str, object]) -> list[str]:
    found = {"standing": {"state": "ready", "why": ""}, "nodes": list(nodes)}
    console = Console(file=StringIO(), width=60)
    console.print(tables(found))
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


def test_without_nodes_there_is_no_table_of_their_memory() -> None:
    assert not [line for line in lines_of() if line.startswith("memory")]
