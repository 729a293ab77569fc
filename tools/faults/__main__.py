"""The whole matrix of faults: python -m tools.faults [--part kill] [--jobs 2] [--json FILE] [--markdown FILE]

Every case is a fault that is made on purpose while the bundled model answers on three nodes: two worker processes and
a coordinator. The table says what was done, what is promised, and what was seen. Exit code 1 if a promise was broken.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from pydantic import TypeAdapter

from tools.faults.case import Case, Row, ending, try_case
from tools.faults.inside import inside
from tools.faults.kills import kills, kinds
from tools.faults.losses import coordinators, gone
from tools.faults.pauses import links, stops
from tools.faults.picture import draw, record
from tools.faults.report import Report
from tools.faults.rig import Rig
from tools.figures import load, save
from worker.errors import InputError
from worker.platform.run import run_command

PARTS = (kills, kinds, stops, links, gone, inside, coordinators)
_ROW = TypeAdapter(Row)


def main(
    part: Annotated[str, typer.Option(help="Only the groups whose names begin so: kill, kill-ar, link ...")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Groups at a time; times are true with one.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every case there; with --part, only its cases are replaced.")
    ] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write a table of the kinds there.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Kill a worker once, and draw what the reader sees.")] = None,
    group: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Make faults, and see whether every promise is kept."""
    if group:
        uvloop.run(print_rows(group))
        return
    if picture is not None:
        picture.write_text(draw(uvloop.run(record())), encoding="utf-8")
        return
    groups = {name: cases for name, cases in all_groups().items() if name.startswith(part)}
    if not groups:
        raise InputError("part", f"expected the beginning of one of {', '.join(all_groups())}, got {part!r}")
    began = time.monotonic()
    rows = asyncio.run(run_groups(groups, jobs))
    took_s = time.monotonic() - began
    report = Report(rows, took_s / 60, jobs)
    print(report.summary, report.cases(), sep="\n\n")
    if json_file is not None and json_file.exists() and part:
        report = load(Report, json_file).with_part(report)
    if json_file is not None:
        save(report, json_file)
    if markdown_file is not None:
        markdown_file.write_text(report.markdown(), encoding="utf-8")
    if not all(row.seen.is_kept for row in rows):
        raise typer.Exit(1)


def all_groups() -> dict[str, list[Case]]:
    """Cases that share worker processes, by the name of their group."""
    cases = (case for part in PARTS for case in part())
    return {name: [*found, ending(name)] for name, found in groupby(cases, attrgetter("group"))}


async def run_groups(groups: dict[str, list[Case]], jobs: int) -> list[Row]:
    """The rows of all groups, in order; so many groups at a time, each in a process of its own."""
    free = asyncio.Semaphore(jobs)
    total = sum(map(len, groups.values()))
    done: list[Row] = []

    async def run(name: str) -> list[Row]:
        async with free:
            rows = []
            async for row in _rows_of(name):
                rows.append(row)
                done.append(row)
                _say(row, f"{len(done)}/{total}")
            return rows

    found = await asyncio.gather(*map(run, groups))
    return [row for rows in found for row in rows]


async def _rows_of(group: str) -> AsyncIterator[Row]:
    """As they come. Raises RuntimeError if the process ends without having tried every case."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.faults", "--group", group), stdout=asyncio.subprocess.PIPE, env=os.environ
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            yield _ROW.validate_json(line)
        if code := await process.wait():
            raise RuntimeError(f"group {group} ended with exit code {code}")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def print_rows(group: str) -> None:
    """Try every case of a group on the same processes; a line of JSON each."""
    with tempfile.TemporaryDirectory() as folder:
        async with Rig(Path(folder)) as rig:
            for case in all_groups()[group]:
                print(_ROW.dump_json(await try_case(case, rig)).decode(), flush=True)


def _say(row: Row, place: str) -> None:
    kept = "ok" if row.seen.is_kept else f"BROKEN ({row.seen.what})"
    print(f"{place} {row.done}: {kept}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
