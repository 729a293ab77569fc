"""How the rows are shown: docs/models.md, and what differs between two versions of mlx-lm. Measures nothing."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from tools.figures import table
from tools.model_types.row import Row

_BESIDE = """## Block diffusion

Four types of [block diffusion](how_it_works.md#windows-several-tokens-per-round-trip) run on mlx-lm's layers, cut
anywhere, in lanes as `rows`: `sdar` (`qwen3`), `sdar_moe` (`qwen3_moe`), `Fast_dLLM_Qwen` (`qwen2`) and
`diffusion_gemma` (`gemma4_text`; logits and answers of a tiny model equal those recorded of mlx-vlm 0.7.10). Published
weights were not run.
"""
COMMAND = "python -m tools.models_table --json docs/models.json --markdown docs/models.md"
_LONGEST_CELL = 24

_INTRO = """\
# Model types

Output of

    {command}

with {versions}, on {machine}.

Tiny models of each type, with random weights, are saved as by `mlx_lm.convert`, loaded as on nodes, cut **between every
two layers**, and given a prompt of 11 tokens and 3 steps.
{counts}
Their logits equal those of mlx-lm's uncut model to the last bit in all rows, in float32 and in bfloat16; exceptions are
named. Each check detects one layer changed by 1 %.{experts}
For keys that leave a window, mlx-lm sums in the order of its buffer; the rows are `=` with keys in the order of their
tokens, and within rounding of mlx-lm's.

* **caches**: mlx-lm's caches of the layers: `kv` keys and values, `win` of a sliding window, `chunk` of a chunk, `s2` a
  state of two arrays, `a+b` two in one layer.
* **cut**: the rows that can be removed, as for rejected drafts: `any`, or those of the `last` window if layers have a
  state; then prefixes are shared up to a snapshot. `no`: a state exists outside the layers.
* **lanes**: how windows of several sessions go through modules with a cache: `rows` end to end, of any lengths;
  `batch` side by side, those of one length; `alone` one after another. Each is compared with the session alone.
* **calls**: how often a step of eight sessions reads a matrix that a step of one reads once.
* **int8**, **rotating**: whether these caches work, else a reason from the end of the page.
"""


@dataclass
class Survey:
    """All rows of one run, and what it ran with."""

    machine: str
    versions: dict[str, str]
    rows: list[Row]


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
    on_cpu = " On a CPU experts are\nmultiplied in float32, in both models."

    intro = _INTRO.format(
        command=COMMAND,
        versions=named(survey.versions),
        machine=survey.machine,
        counts=_counts(survey.rows),
        experts=on_cpu if survey.versions.get("device") == "cpu" else "",
    )
    notes = Notes()
    others = [(f"`{row.type}`", _why_not(row)) for row in survey.rows if not row.is_cut]
    sections = [
        intro,
        "## What runs\n\n" + _alike(survey.rows, notes),
        _BESIDE,
        "## What does not\n\n" + table(("type", "why"), others),
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


def _alike(rows: Sequence[Row], notes: Notes) -> str:
    """A table with a row for all types that have the same properties."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row.is_cut:
            exact = {row.fits, row.bf16} - {"="}
            name = f"`{row.type}`" + (f" (float32 {row.fits}, bfloat16 {row.bf16})" if exact else "")
            key = row.caches, row.cut, row.lanes, str(row.calls), notes.cell(row.int8), notes.cell(row.rotating)
            alike.setdefault(key, []).append(name)
    found = sorted(alike.items(), key=lambda each: -len(each[1]))
    lines = [f"| {' | '.join((*key, ', '.join(names)))} |" for key, names in found]
    return "\n".join(["| caches | cut | lanes | calls | int8 | rotating | types |", "| --- " * 7 + "|", *lines, ""])


def _why_not(row: Row) -> str:
    """Why a type does not run, without what the error repeats for every type."""
    return re.sub(r"^no: .*?(?:between its layers|is not supported): |; run it by mlx-lm on one machine$", "", row.fits)


def _quantised(rows: Sequence[Row], notes: Notes) -> str:
    """A line for the quantisations that have the same results in the same types."""
    alike: dict[str, list[str]] = {}
    for title in dict.fromkeys(title for row in rows for title in row.quantised):
        found: dict[str, list[str]] = {}
        for row in rows:
            if title in row.quantised:
                found.setdefault(notes.cell(row.quantised[title]), []).append(f"`{row.type}`")
        results = "; ".join(f"{result} {', '.join(types)}" for result, types in found.items())
        alike.setdefault(results, []).append(title)
    return "\n".join(f"* {' · '.join(titles)}: {results}" for results, titles in alike.items()) + "\n"
