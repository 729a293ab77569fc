"""Progress of long work on standard error: bars on a terminal, elsewhere lines about work that takes long."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from coordinator.cluster.log import log
from coordinator.cluster.tables import plain_console
from protos.brigade_pb2 import LoadProgress
from worker.platform.text import format_bytes

STARTING = LoadProgress(phase="starting workers")
ASKING = LoadProgress(phase="asking nodes")

_TRANSFERS = ("download", "feed", "shared")  # may take minutes: show the speed; shared: fed to another worker of a node
_IN_BYTES = (*_TRANSFERS, "load", "kept")  # kept: the node holds its shard already
_WORK = (*_TRANSFERS, "load", "warm-up", "installing packages")  # worth a line; waiting has its own deadlines
_ALL = "all nodes"
_LONG_S = 2.0
_MOST_LEFT_S = 1e9
_REPEAT_S = 20.0
_WIDEST = 1000  # columns of a terminal, more than any row has
TOKENS_FIRST_S, _TOKENS_MOST_S = 5.0, 60.0  # the pauses between lines about tokens grow from the first to the second

NodeProgress = Callable[[str, LoadProgress], None]  # gets a node, or "" for all nodes, and its progress
Begin = Callable[[str], None]  # gets the step that begins
ByteReport = Callable[[int, bool], None]  # gets the bytes done since the last call, and whether an earlier run did them
TokenReport = Callable[[int, int], None]  # gets the items done and the tokens made since the last call


def say(lines: str) -> None:
    """Write lines to standard error: as they are, or as JSON if the server's log is in JSON."""
    log("note", lines)


@contextmanager
def telling_interrupts(line: str | Callable[[], str]) -> Iterator[None]:
    """Write this line, or the result of this function, if the body is interrupted."""
    try:
        yield
    except asyncio.CancelledError:
        say(line if isinstance(line, str) else line())
        raise


@contextmanager
def show_progress() -> Iterator[NodeProgress]:
    """Show what the nodes do. Yield a function for reports of the begin and the progress of phases."""
    console = plain_console(stderr=True)
    if console.is_terminal:
        node = TextColumn("{task.fields[node]:<12}", markup=False)
        phase = TextColumn("{task.description:<16}", markup=False)
        with _Bars(console, node, phase, BarColumn(), TimeElapsedColumn(), _Pace(), _Done()) as bars:
            yield _Rows(bars).report
        return
    lines: dict[str, _Line] = {}

    def report(node: str, progress: LoadProgress) -> None:
        line = lines.get(node)
        if line and line.latest.phase == progress.phase:
            line.latest = progress
            return
        if line:
            line.stop()
        lines[node] = _Line(node or _ALL, progress, asyncio.get_running_loop())

    try:
        yield report
    finally:
        for line in lines.values():
            line.stop()


@contextmanager
def show_steps(total: int) -> Iterator[Begin]:
    """Draw one bar with the latest step. Show nothing outside a terminal."""
    console = plain_console(stderr=True)
    step = TextColumn("{task.completed:.0f}/{task.total:.0f} {task.description}", markup=False)
    with _Bars(console, step, BarColumn(), TimeRemainingColumn()) as bars:
        task, done = bars.add_task("", total=total), count()
        yield lambda step: bars.update(task, completed=next(done), description=step, refresh=True)


@contextmanager
def show_tokens(what: str, total: int, done: int = 0) -> Iterator[TokenReport]:
    """Draw one bar with the speed, if items have tokens. Outside a terminal write lines, less and less often.

    Lines tell the time left from twice the time of the first item on: if many items run at once, none ends for long.
    """
    console = plain_console(stderr=True)
    began, due_s, num_tokens, first, first_s = time.monotonic(), TOKENS_FIRST_S, 0, done, math.inf
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _Speed(),
        TimeRemainingColumn(),
    )
    with _Bars(console, *columns) as bars:
        task = bars.add_task(what, total=total, completed=done, tokens=0)

        def report(more: int, more_tokens: int) -> None:
            nonlocal due_s, done, num_tokens, first_s
            done, num_tokens = done + more, num_tokens + more_tokens
            bars.update(task, completed=done, tokens=num_tokens)
            took_s = time.monotonic() - began
            first_s = min(first_s, took_s) if more else first_s
            if not console.is_terminal and took_s >= due_s and done < total:
                due_s = took_s + min(took_s, _TOKENS_MOST_S)
                speed = f", {num_tokens / took_s:.0f} tok/s" if num_tokens else ""
                left_s = took_s * (total - done) / max(1, done - first)
                left = f", {timedelta(seconds=round(left_s))} left" if took_s >= 2 * first_s else ""
                say(f"{what} {done} of {total}{speed}{left} ...")

        yield report


@contextmanager
def show_bytes(what: str, total: int) -> Iterator[ByteReport]:
    """Draw one bar of bytes. Outside a terminal write lines, less and less often."""
    console = plain_console(stderr=True)
    began, due_s, done, known = time.monotonic(), TOKENS_FIRST_S, 0, 0
    speed_columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with _Bars(console, TextColumn("{task.description}", markup=False), BarColumn(), *speed_columns) as bars:
        task = bars.add_task(what, total=total)

        def report(more: int, is_known: bool) -> None:
            nonlocal due_s, done, known
            done, known = done + more, known + more * is_known
            bars.update(task, completed=done)
            took_s = time.monotonic() - began
            if not console.is_terminal and took_s >= due_s and known < done < total:
                due_s = took_s + min(took_s, _TOKENS_MOST_S)
                speed = (done - known) / took_s
                say(f"{what} {format_bytes(done)} of {format_bytes(total)}, {_pace(speed, (total - done) / speed)} ...")

        yield report


class _Bars(Progress):
    """Bars in one line each, which vanish at the end. A terminal that is too narrow lacks the last columns.

    They leave standard output alone, which may be a pipe.
    """

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self._terminal = console
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = console.width // 5
        disable = not console.is_terminal
        super().__init__(*columns, console=console, transient=True, disable=disable, redirect_stdout=False)

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        table, width = super().make_tasks_table(tasks), self._terminal.width
        unlimited = self._terminal.options.update_width(_WIDEST)
        while len(table.columns) > 1 and self._terminal.measure(table, options=unlimited).maximum > width:
            table.columns.pop()
        return table


class _Rows:
    """A row per node: its phase, progress and elapsed time."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._rows: dict[str, tuple[TaskID, str]] = {}  # by node, with the phase

    def report(self, node: str, progress: LoadProgress) -> None:
        row, phase = self._rows.get(node, (None, ""))
        if is_new := row is None or phase != progress.phase:
            for other in [other for other in self._rows if other == node or not (other and node)]:
                self._bars.remove_task(self._rows.pop(other)[0])  # either one row per node, or one for all nodes
            row = self._bars.add_task(progress.phase, node=node or _ALL, total=None)
            self._rows[node] = row, progress.phase
        self._bars.update(row, completed=progress.done, total=progress.total or None, refresh=is_new)


class _Line:
    """A line about a node's phase once it takes long, repeated for transfers."""

    def __init__(self, node: str, progress: LoadProgress, loop: asyncio.AbstractEventLoop) -> None:
        self.latest = progress
        self._node = node
        self._loop = loop
        self._began = loop.time()
        self._timer = loop.call_later(_LONG_S, self._tell) if progress.phase in _WORK else None

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _tell(self) -> None:
        phase, done, total = self.latest.phase, self.latest.done, self.latest.total
        size = f" {format_bytes(total)}" if phase in _IN_BYTES else ""
        if phase in _TRANSFERS:
            speed = done / max(self._loop.time() - self._began, 1e-6)
            size += f", {_pace(speed, (total - done) / speed)}" if done else ""
            self._timer = self._loop.call_later(_REPEAT_S, self._tell)
        say(f"{self._node}: {phase}{size} ...")


class _Done(ProgressColumn):
    """The bytes or steps that are done."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        form = format_bytes if task.description in _IN_BYTES else str
        return Text(f"{form(int(task.completed))} of {form(int(task.total))}")


class _Pace(ProgressColumn):
    """The speed of a transfer and the remaining time."""

    def render(self, task: Task) -> Text:
        if task.description not in _TRANSFERS or not task.speed or task.time_remaining is None:
            return Text("")
        return Text(_pace(task.speed, task.time_remaining))


class _Speed(ProgressColumn):
    """Tokens per second since the bar was drawn."""

    def render(self, task: Task) -> Text:
        return Text(f"{num / task.elapsed:.0f} tok/s" if (num := task.fields["tokens"]) and task.elapsed else "")


def _pace(bytes_per_s: float, left_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s, {timedelta(seconds=round(min(left_s, _MOST_LEFT_S)))} left"
