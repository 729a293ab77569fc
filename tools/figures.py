"""How tools keep their figures and show them: dataclasses as JSON, tables as Markdown."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


def save(figures: Any, path: Path) -> None:
    """Write a dataclass as JSON."""
    path.write_text(json.dumps(asdict(figures), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(kind: type[T], path: Path) -> T:
    """Return the dataclass that `save` wrote."""
    return TypeAdapter(kind).validate_json(path.read_bytes())


def table(header: Sequence[str], lines: Iterable[Sequence[str]], num_left: int | None = None) -> str:
    """Return a Markdown table; all columns but the first `num_left` (None: all) are aligned to the right."""
    cells = [tuple(header), *map(tuple, lines)]
    aligned = [str.ljust if num_left is None or i < num_left else str.rjust for i in range(len(header))]
    cells.insert(1, tuple("---" if align is str.ljust else "---:" for align in aligned))
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    rows = (
        " | ".join(align(cell, width) for align, cell, width in zip(aligned, line, widths, strict=True))
        for line in cells
    )
    return "".join(f"| {row} |\n" for row in rows)
