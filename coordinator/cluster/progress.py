"""Progress of long work on standard error: bars where that is a terminal, else a line for what takes long."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from coordinator.cluster.deployment import Progress as Report
from coordinator.cluster.log import log
from protos.brigade_pb2 import LoadProgress
from worker.process.sizes import format_bytes

STARTING = LoadProgress(phase="starting workers")
ASKING = LoadProgress(phase="asking nodes")

_FROM_AFAR = ("download", "feed")  # what may take minutes: its speed is shown
_IN_BYTES = (*_FROM_AFAR, "load", "kept")  # kept: the node holds its shard already
_WORK = (
    *_FROM_AFAR,
    "load",
    "warm-up",
    "installing packages",
)  # what is worth a line; waiting for nodes has deadlines of its own
_LONG_S = 2.0
_AGAIN_S = 20.0
_ALL = "all nodes"

Begin = Callable[[str], None]  # takes what begins now


def say(lines: str) -> None:
    """To people: standard error, as it stands; as JSON where a server's log is read by programs."""
    log("note", lines)


@contextmanager
def telling_interrupts(line: str | Callable[[], str]) -> Iterator[None]:
    """Say this, or what this makes then, if what is done here is interrupted."""
    try:
        yield
    except asyncio.CancelledError:
        say(line if isinstance(line, str) else line())
        raise


@contextmanager
def show_progress() -> Iterator[Report]:
    """Show what the nodes are at. What is yielded takes a report as a phase begins and whenever it comes on."""
    console = Console(stderr=True)
    with _bars(console) if console.is_terminal else _lines() as report:
        yield report


@contextmanager
def show_steps(total: int) -> Iterator[Begin]:
    """Draw one bar and what is being done; a call names the step that begins."""
    console = Console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)
    # standard output may be a pipe all the same: what is printed there must not be drawn here
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False
    ) as bars:
        task, done = bars.add_task("", total=total), count()
        yield lambda step: bars.update(task, completed=next(done), description=step, refresh=True)


@contextmanager
def _bars(console: Console) -> Iterator[Report]:
    """A row per node: its phase, how far it is, and for how long it has been at it."""
    columns = (
        TextColumn("{task.fields[node]:<12}", markup=False),
        TextColumn("{task.description:<16}", markup=False),
        *(BarColumn(), _Done(), TimeElapsedColumn(), _Pace()),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        rows: dict[str, TaskID] = {}
        phases: dict[str, str] = {}

        def begin(node: str, phase: str) -> None:
            """A row of its own for each node, or one for all."""
            for other in [other for other in rows if other == node or not (other and node)]:
                bars.remove_task(rows.pop(other))
            rows[node], phases[node] = bars.add_task(phase, node=node or _ALL, total=None), phase

        def report(node: str, progress: LoadProgress) -> None:
            is_new = node not in rows or phases[node] != progress.phase
            if is_new:
                begin(node, progress.phase)
            bars.update(rows[node], completed=progress.done, total=progress.total or None, refresh=is_new)

        yield report


@contextmanager
def _lines() -> Iterator[Report]:
    """One line per node and phase of work, once it has taken long."""
    loop = asyncio.get_running_loop()
    lines: dict[str, _Line] = {}

    def report(node: str, progress: LoadProgress) -> None:
        line = lines.get(node)
        if line and line.latest.phase == progress.phase:
            line.latest = progress
            return
        if line:
            line.stop()
        lines[node] = _Line(node or _ALL, progress, loop)

    try:
        yield report
    finally:
        for line in lines.values():
            line.stop()


class _Line:
    """What a node is at, said once it takes long; and again and again where that may take minutes."""

    def __init__(self, who: str, progress: LoadProgress, loop: asyncio.AbstractEventLoop) -> None:
        self.latest = progress
        self._who = who
        self._loop = loop
        self._began = loop.time()
        self._timer = loop.call_later(_LONG_S, self._tell) if progress.phase in _WORK else None

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _tell(self) -> None:
        phase, done, total = self.latest.phase, self.latest.done, self.latest.total
        size = f" {format_bytes(total)}" if phase in _IN_BYTES else ""
        if phase in _FROM_AFAR:
            speed = done / max(self._loop.time() - self._began, 1e-6)
            size += f", {_pace(speed, (total - done) / speed)}" if done else ""
            self._timer = self._loop.call_later(_AGAIN_S, self._tell)
        say(f"{self._who}: {phase}{size} ...")


class _Done(ProgressColumn):
    """How much is done: bytes or steps."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        form = format_bytes if task.description in _IN_BYTES else str
        return Text(f"{form(int(task.completed))} of {form(int(task.total))}")


class _Pace(ProgressColumn):
    """How quickly bytes come from another machine, and for how long they will."""

    def render(self, task: Task) -> Text:
        if task.description not in _FROM_AFAR or not task.speed or task.time_remaining is None:
            return Text("")
        return Text(_pace(task.speed, task.time_remaining))


def _pace(bytes_per_s: float, left_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s, {timedelta(seconds=round(left_s))} left"
