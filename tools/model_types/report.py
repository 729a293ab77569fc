"""How the rows are shown: docs/models.md, and what differs between two versions of mlx-lm. Measures nothing."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tools.model_types.row import Row
from tools.windows_report import table

COMMAND = "python -m tools.models_table --json docs/models.json --markdown docs/models.md"
_LONGEST_CELL = 24
COLUMNS = ("type", "fits", "bf16", "caches", "cut", "lanes", "int8", "rotating")

_INTRO = """\
# Model types

Output of

    {command}

with {versions}, on {machine}.

Every type of this mlx-lm that a tiny configuration makes is written to a folder as `mlx_lm.convert` writes it, with
random weights, loaded as nodes load it, cut **between every two layers**, and given a prompt of 11 tokens and 3 steps.
`=` is equal to the last bit, `≈` within rounding, a number in brackets is a reason at the end of the page.
{counts}

* **fits**: the logits of all rows are those of mlx-lm's own uncut model, in float32. A control with one layer changed
  by 1 % is noticed in each of them. Where keys slide out of sight mlx-lm's own caches write the newest over the oldest
  and sum in that order: such rows are `≈` with them, and `=` with keys in the order of their tokens.
* **bf16**: the same in bfloat16, and `=` wherever it fits.{experts}
* **caches**: what mlx-lm makes for its layers. `kv` keys and values, `win` of a sliding window, `chunk` of a chunk,
  `s2` a state of two arrays, `a+b` two in one layer.
* **cut**: rows can be taken back, as windows and drafts that fail need it, and prefixes shared at any length. With a
  state they cannot: such models decode a token per step and share only whole prefixes. Both are tried.
* **lanes**: how windows of several sessions go through a pass, which is tried against each alone: `rows` end to end, of
  any lengths; `batch` side by side, those of one length; `alone` one after another.
* **int8**: caches of 8 bits stay near whole ones, or why there are none.
* **rotating**: caches that let go of tokens are the same wherever the model is cut, or why there are none.

Quantised models of six families are further down.
"""


@dataclass
class Survey:
    """All rows of one run, and what it ran with."""

    machine: str
    versions: dict[str, str]
    rows: list[Row]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> Survey:
    """What `save` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return Survey(found["machine"], found["versions"], [Row(**row) for row in found["rows"]])


class Notes:
    """Reasons that are too long for a table: numbers in their cells, and each once below."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def cell(self, text: str) -> str:
        """The text itself if it is short; else its number, after its first word."""
        if len(text) <= _LONGEST_CELL:
            return text
        first, colon, rest = text.partition(": ")
        mark = f"({self._numbers.setdefault(rest if colon else text, len(self._numbers) + 1)})"
        return f"{first} {mark}" if colon else mark

    def __str__(self) -> str:
        return "\n".join(f"({number}) {reason}  " for reason, number in self._numbers.items())


def to_markdown(survey: Survey) -> str:
    """The whole page."""
    on_cpu = "\n  A CPU multiplies experts in float32 only, so they are cast to it and back, in both models."
    intro = _INTRO.format(
        command=COMMAND,
        versions=named(survey.versions),
        machine=survey.machine,
        counts=_counts(survey.rows),
        experts=on_cpu if survey.versions.get("device") == "cpu" else "",
    )
    notes = Notes()
    others = [(f"`{row.type}`", row.caches, row.fits) for row in survey.rows if not row.is_cut]
    sections = [
        intro,
        "## What runs\n\n" + table(COLUMNS, [_cells(row, notes) for row in survey.rows if row.is_cut]),
        "## What does not\n\n" + table(("type", "caches", "why"), others),
        "## Quantised\n\n" + _quantised(survey.rows, notes),
        f"## Reasons\n\n{notes}\n",
    ]
    return "\n".join(sections)


def named(versions: dict[str, str]) -> str:
    """As `mlx-lm 0.32.2, mlx 0.32.4`."""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if name != "device")


def differences(ours: Survey, theirs: Survey) -> str:
    """A table of all that differs, row by row; `theirs` is of another version or machine."""
    lines = []
    before, now = ({row.type: row for row in survey.rows} for survey in (theirs, ours))
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            lines.append((name, "type", "" if old is None else "there", "" if new is None else "there"))
            continue
        lines += [(name, *line) for line in _changes(old, new)]
    if not lines:
        return f"all {len(now)} rows are the same"
    return table(("type", "what", named(theirs.versions), named(ours.versions)), lines)


def _changes(old: Row, new: Row) -> Iterable[tuple[str, str, str]]:
    """What differs; of a type that fits one of them only just that, for nothing else is known of the other."""
    if old.is_cut != new.is_cut:
        yield "fits", old.fits, new.fits
        return
    for field in fields(Row):
        was, is_ = getattr(old, field.name), getattr(new, field.name)
        if not isinstance(was, dict):
            was, is_ = {"": was}, {"": is_}
        for key in [*was, *(key for key in is_ if key not in was)]:
            if was.get(key) != is_.get(key):
                yield f"{field.name} {key}".strip(), was.get(key, ""), is_.get(key, "")


def _counts(rows: Sequence[Row]) -> str:
    missing = sum(row.is_missing for row in rows)
    fitting = sum(row.is_cut for row in rows)
    return f"{fitting} of the {len(rows) - missing} that mlx-lm itself runs here fit."


def _cells(row: Row, notes: Notes) -> Sequence[str]:
    found = (row.fits, row.bf16, row.caches, row.cut, row.lanes, row.int8, row.rotating)
    return (f"`{row.type}`", *map(notes.cell, found))


def _quantised(rows: Sequence[Row], notes: Notes) -> str:
    """A row per quantisation, a column per family."""
    families = [row for row in rows if len(row.quantised) > 1]
    titles = dict.fromkeys(title for row in families for title in row.quantised)
    lines = [(title, *(notes.cell(row.quantised.get(title, "")) for row in families)) for title in titles]
    others = ", ".join(
        f"`{row.type}` ({title}: {notes.cell(found)})"
        for row in rows
        if row not in families
        for title, found in row.quantised.items()
    )
    return table(("", *(f"`{row.type}`" for row in families)), lines) + (f"\nOthers: {others}.\n" if others else "")
