"""Commands in this process: for claims that need no process of their own, and for coordinators of real workers.

A process spends more than a second on imports. What it is to be one (streams, signals, its end) is claimed elsewhere,
of processes that `tests.cluster.processes` starts.
"""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import typer

from coordinator.cli.app import app
from tests.cluster.processes import Outcome
from worker.cli import worker
from worker.platform import run as run_module

_WORKER = typer.Typer(add_completion=False)
_WORKER.command()(worker)
PROGRAMS = {"coordinator": app, "worker": _WORKER}


class _Heard(io.StringIO):
    """Standard output that says what comes."""

    def __init__(self, hear: Callable[[str], object]) -> None:
        super().__init__()
        self._hear = hear

    def write(self, text: str) -> int:
        self._hear(text)
        return super().write(text)


def run_here(
    *arguments: str | Path,
    stdin: str = "",
    program: str = "coordinator",
    hear: Callable[[str], object] = lambda text: None,
) -> Outcome:
    """How `python -m program ...` ends, what it writes to its streams included; `hear` gets its output as it comes."""
    out, err = _Heard(hear), io.StringIO()
    typed = io.TextIOWrapper(io.BytesIO(stdin.encode(errors="surrogateescape")))
    with (
        mock.patch.object(sys, "argv", [program, *map(str, arguments)]),
        mock.patch.object(sys, "stdin", typed),
        mock.patch.object(sys, "stdout", out),
        mock.patch.object(sys, "stderr", err),
        mock.patch.object(run_module, "calls_are_left", lambda: False),  # those of other tests
    ):
        try:
            run_module.run_command(PROGRAMS[program])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def answer_here(*arguments: str | Path, stdin: str = "") -> dict[str, Any]:
    """What `brigade generate ... --json` prints."""
    return parse(run_here("generate", *arguments, "--json", stdin=stdin))


def parse(outcome: Outcome) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    return dict(json.loads(outcome.out))
