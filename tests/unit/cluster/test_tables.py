"""Tables that fit into a terminal: nothing is cut, nothing is folded, no line is too long."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from coordinator.cluster.tables import fitting, plain_console

HEADS = ("system", "at once", "prompt tok/s", "first token s", "busy")
ROWS = [("one process", "1", "281.0", "0.028", "86%"), ("cluster 4,4", "16", "2633.5", "0.030", "")]


def shown(width: int, heads: tuple[str, ...] = HEADS, rows: list[tuple[str, ...]] = ROWS, num_keys: int = 2) -> str:
    file = io.StringIO()
    Console(file=file, width=width, markup=False).print(fitting(heads, rows, width, num_keys=num_keys, num_left=1))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


WIDE = """\
system       at once  prompt tok/s  first token s  busy
one process        1         281.0          0.028   86%
cluster 4,4       16        2633.5          0.030"""

STACKED = """\
                           first
               at  prompt  token
system       once   tok/s      s  busy
one process     1   281.0  0.028   86%
cluster 4,4    16  2633.5  0.030"""

SEVERAL = """\
               at  prompt
system       once   tok/s
one process     1   281.0
cluster 4,4    16  2633.5

                   first
               at  token
system       once      s
one process     1  0.028
cluster 4,4    16  0.030

system       at once  busy
one process        1   86%"""


def test_with_less_room_heads_take_several_lines_and_with_still_less_there_are_several_tables() -> None:
    assert [shown(80), shown(43), shown(26)] == [WIDE, STACKED, SEVERAL]
    for width in range(25, 90):
        text = shown(width)
        assert all(len(line) <= width for line in text.splitlines())
        assert all(cell in text for row in ROWS for cell in row), "no figure is lost"
    text = shown(10, ("node", "address"), [("mini", "10.0.0.1:50070")], num_keys=1)
    assert all(len(line) <= 10 for line in text.splitlines())
    assert shown(80, ("node", "address"), [], num_keys=1) == "node  address"


def test_names_of_models_and_nodes_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a[/b] [red]c :smile:"
    plain_console().print(name, fitting(("node", "", "at"), [(name, Text(name, "red"), ":1")], 80), sep="\n")
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert told == [name, "node at", f"{name} {name} :1"]


def test_a_column_without_a_head_is_aligned_to_the_left() -> None:
    told = shown(80, ("node", "at", ""), [("mini", "1", "  ━━"), ("air", "20", "━━━━━━")], num_keys=1)
    assert told.splitlines()[1:] == ["mini   1    ━━", "air   20  ━━━━━━"]
