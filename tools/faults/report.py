"""The rows of all cases as a table for a terminal and as a page for docs/."""

from collections.abc import Sequence
from datetime import date
from itertools import groupby
from operator import attrgetter
from statistics import median

from rich.table import Table

from tools.faults.case import Row
from tools.faults.trial import Seen
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
_HEAD = ("done", "promised", "seen", "tokens", "noticed after", "gap", "kept")


def table(rows: Sequence[Row], took_s: float) -> Table:
    found = Table(title=_summary(rows, took_s), title_justify="left")
    for name in _HEAD:
        found.add_column(name, justify="right" if name in ("noticed after", "gap") else "left")
    for row in rows:
        found.add_row(*_cells(row), style=None if row.seen.is_kept else "bold red", end_section=False)
    return found


def markdown(rows: Sequence[Row], took_s: float, jobs: int) -> str:
    """The page: what it is made by, what it amounts to, and a table per part."""
    lines = [
        "# Faults",
        "",
        "Made by `python -m tools.faults --markdown docs/faults.md`: real processes, the bundled model on three nodes",
        "(a coordinator and the workers `first` and `last`), faults while it answers. *Equal* means: tokens, text and",
        "the reason for the end are those of one process to which nothing happens. *Noticed after* is the time from",
        "the fault until the coordinator acts; for a fault inside a worker, from the last token before it. *Gap* is",
        "the longest that a reader got no token; where a worker is started again, its start is in it.",
        "",
        f"{_summary(rows, took_s)}. On {date.today().isoformat()}, {machine_name()}, {jobs} group"
        f"{'s' * (jobs > 1)} at a time; other work ran on the machine meanwhile, so times are upper bounds.",
        "",
        *_times(rows),
    ]
    for part, found in groupby(rows, attrgetter("part")):
        lines += [
            "",
            f"## {_PARTS[part]}",
            "",
            f"| {' | '.join(_HEAD)} |",
            "| --- | --- | --- | --- | ---: | ---: | --- |",
        ]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in _cells(row))} |" for row in found]
    return "\n".join(lines) + "\n"


def _times(rows: Sequence[Row]) -> list[str]:
    """Times of like faults together."""
    kinds: dict[str, list[Seen]] = {}
    for row in rows:
        if (kind := _kind_of(row.done)) and row.seen.detect_s is not None and row.seen.gap_s is not None:
            kinds.setdefault(kind, []).append(row.seen)
    lines = [
        "| fault | cases | noticed after, median | longest | gap, median | longest |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, found in kinds.items():
        detects, gaps = [seen.detect_s or 0 for seen in found], [seen.gap_s or 0 for seen in found]
        times = (median(detects), max(detects), median(gaps), max(gaps))
        lines.append(f"| {kind} | {len(found)} | {' | '.join(map(_seconds, times))} |")
    return lines


def _kind_of(done: str) -> str:
    if "kill -9" in done:
        is_back = "started again" in done and "not started again" not in done
        return "killed, started again" if is_back else "killed, done without"
    return "stopped" if "after 10 s" in done else "cut off" if "cut for" in done else ""


def _summary(rows: Sequence[Row], took_s: float) -> str:
    kept = sum(row.seen.is_kept for row in rows)
    return f"{kept} of {len(rows)} promises kept in {took_s / 60:.0f} minutes"


def _cells(row: Row) -> tuple[str, ...]:
    seen = row.seen
    tokens = {None: "", True: "equal", False: "DIFFER"}[seen.are_equal]
    kept = "yes" if seen.is_kept else "NO"
    return row.done, row.promised, seen.what, tokens, _seconds(seen.detect_s), _seconds(seen.gap_s), kept


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
