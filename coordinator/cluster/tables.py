"""Tables of figures: one, or several with the same first columns if the terminal is too narrow for one. Pure."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

_GAP = 2  # columns of the terminal between two of the table
_LEAST_KEY = 8  # columns of a key that is wrapped, so that no figure is


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that prints texts as they are, also those with brackets or colons."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


@dataclass(frozen=True)
class _Column:
    head: str
    cells: Sequence[str | Text]
    is_left: bool

    @property
    def width(self) -> int:
        return max(cell_len(str(each)) for each in [self.head, *self.cells])

    @property
    def least_width(self) -> int:
        """The width with a head of several lines; cells have one line."""
        return max(cell_len(str(each)) for each in ["", *self.head.split(), *self.cells])


def fitting(
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    *,
    num_keys: int = 1,
    num_left: int | None = None,
) -> Group:
    """Return the table in parts that are no wider than `width` if possible; heads take several lines if needed.

    Args:
        heads: the columns' names; columns without one are aligned to the left.
        rows: a text for each column; a part leaves out rows that are empty there.
        num_keys: the number of first columns that identify a row, which every part repeats.
        num_left: the number of first columns aligned to the left; by default the keys.
    """
    num_left = num_keys if num_left is None else num_left
    columns = [_Column(head, [row[i] for row in rows], i < num_left or not head) for i, head in enumerate(heads)]
    keys, figures = columns[:num_keys], columns[num_keys:]
    first, *others = (_table(keys, part, width) for part in _parts(keys, figures, width))
    return Group(first, *(each for table in others for each in (Text(), table)))


def _parts(keys: list[_Column], figures: Sequence[_Column], width: int) -> Iterator[list[_Column]]:
    """Yield the figures, as many at a time as fit beside the keys, but at least one."""
    part: list[_Column] = []
    for figure in figures:
        if part and _span([each.least_width for each in (*keys, *part, figure)]) > width:
            yield part
            part = []
        part.append(figure)
    yield part


def _span(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _table(keys: list[_Column], figures: list[_Column], width: int) -> Table:
    columns = keys + figures
    is_narrow = _span([each.width for each in columns]) > width
    excess = _span([each.least_width for each in columns]) - width
    longest = max(keys, key=lambda each: each.least_width)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, _GAP, 0, 0))
    for each in columns:
        head = "\n".join(textwrap.wrap(each.head, each.least_width)) if is_narrow else each.head
        room = max(_LEAST_KEY, each.least_width - excess) if each is longest and excess > 0 else None
        table.add_column(head, justify="left" if each.is_left else "right", overflow="fold", max_width=room)
    for row in zip(*(each.cells for each in columns), strict=True):
        if any(row[len(keys) :]):
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table
