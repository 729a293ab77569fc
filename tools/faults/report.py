"""The rows of all cases as a table for a terminal, as a file of JSON, and as a page for docs/."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import groupby
from operator import attrgetter
from statistics import median

from tools.faults.case import Row, ending
from tools.figures import table
from worker.platform.machine import machine_name

_PARTS = {
    "kill": "kill -9 at every moment",
    "kinds": "kill -9 under every kind of answer",
    "stop": "A worker that is stopped and goes on",
    "link": "Links that are cut, slow or spoil what they carry",
    "gone": "Nodes that are lost for good, together, or again",
    "inside": "What breaks inside a worker",
    "coordinator": "The coordinator itself",
}
_EQUAL = ", every stream equal"
_HEAD = ("done", "promised", "seen", "tokens", "noticed after", "gap", "kept")
_CONTEXT = re.compile(r"^(?:ar|ngram|diffusion|diffusion-fast), [^:]+: ")  # the decoder and the load of a case
_WORKER = re.compile(r"\b(?:first and last|first|last)\b")


@dataclass
class Report:
    """One run of all cases."""

    rows: list[Row]
    minutes: float
    jobs: int  # groups at a time
    machine: str = field(default_factory=machine_name)
    day: str = field(default_factory=lambda: date.today().isoformat())
    repeated: list[str] = field(default_factory=list)  # parts that were run again later

    def with_part(self, other: "Report") -> "Report":
        """Return this report with the cases of another one in the place of those of the same groups."""
        groups = {row.group for row in other.rows}
        rows = [*other.rows, *(row for row in self.rows if row.group not in groups)]
        rows.sort(key=lambda row: list(_PARTS).index(row.part))
        return replace(self, rows=rows, repeated=sorted({*self.repeated, *(row.part for row in other.rows)}))

    @property
    def summary(self) -> str:
        kept = sum(row.seen.is_kept for row in self.rows)
        return f"{kept} of {len(self.rows)} promises kept in {self.minutes:.0f} minutes"

    def cases(self) -> str:
        """Return a table of every case."""
        return table(_HEAD, map(_cells, self.rows))

    def markdown(self) -> str:
        """The page: a line per kind of fault, and every case whose promise was broken."""
        lines = [
            "# Faults",
            "",
            "Made by `python -m tools.faults --json docs/faults.json --markdown docs/faults.md` (the JSON has every",
            "case): real processes, the bundled model on three nodes, faults while it answers. A promise is kept",
            "only if tokens, text and finish reason of every answer equal those of an undisturbed process. *Noticed*:",
            "the time from the fault, or inside a worker from the last token before it, until the coordinator acts.",
            "*Gap*: the longest time without a token, the restart of a worker included.",
            "",
            f"{self.summary}. On {self.day}, {self.machine}, {self.jobs} group{'s' * (self.jobs > 1)} at a time. Other",
            "work ran meanwhile, so times are upper bounds.",
            *(f"*{_PARTS[part]}* was run again later." for part in self.repeated),
        ]
        end = ending("")
        ends = [row for row in self.rows if (row.done, row.promised) == (end.done, end.promised)]
        if ends:
            kept = sum(row.seen.is_kept for row in ends)
            lines += ["", f"After each group, {end.done}: {end.promised}, {kept} of {len(ends)} times."]
        lines += ["", "| fault | promise | kept | noticed, median (longest) | gap, median (longest) |"]
        lines += ["| --- | --- | ---: | ---: | ---: |"]
        for part, found in groupby((row for row in self.rows if row not in ends), attrgetter("part")):
            lines += [f"| **{_PARTS[part]}** | | | | |", *_kinds_of(found)]
        broken = [row for row in self.rows if not row.seen.is_kept]
        if broken:
            cells = [tuple(map(_cell, (row.done, row.promised, row.seen.what))) for row in broken]
            lines += ["", "## Broken promises", "", table(("done", "promised", "seen"), cells).rstrip()]
        return "\n".join(lines) + "\n"


def _kinds_of(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a line of the table for each kind of fault."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((_kind_of(row.done), row.promised), []).append(row)
    for (kind, promised), found in kinds.items():
        kept = sum(row.seen.is_kept for row in found)
        times = (_times([row.seen.detect_s for row in found]), _times([row.seen.gap_s for row in found]))
        promise = promised.replace(_EQUAL, "")  # the head of the page says it of all answers
        yield f"| {_cell(kind)} | {_cell(promise)} | {kept} of {len(found)} | {' | '.join(times)} |"


def _kind_of(done: str) -> str:
    """Return the fault without its decoder, the worker's name and the moment."""
    return _WORKER.sub(
        lambda found: "both workers" if " " in found[0] else "a worker",
        re.sub(r" at token \w+| in the middle", "", _CONTEXT.sub("", done)),
    )


def _times(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    if not known:
        return ""
    return _seconds(known[0]) if len(known) == 1 else f"{_seconds(median(known))} ({_seconds(max(known))})"


def _cells(row: Row) -> tuple[str, ...]:
    seen = row.seen
    tokens = {None: "", True: "equal", False: "DIFFER"}[seen.are_equal]
    kept = "yes" if seen.is_kept else "NO"
    return row.done, row.promised, seen.what, tokens, _seconds(seen.detect_s), _seconds(seen.gap_s), kept


def _cell(text: str) -> str:
    return text.replace("|", "/")


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
