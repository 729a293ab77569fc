"""Progress of long work on standard error, where that is a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from coordinator.cluster.deployment import Progress as Report
from coordinator.planning.plan import Plan
from protos.brigade_pb2 import LoadProgress


@contextmanager
def show_progress(plan: Plan) -> Iterator[Report]:
    """Draw a bar per node while the shards load; draws nothing where standard error is not a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.fields[node]:<12}"), TextColumn("{task.fields[phase]:<8}"), BarColumn(), DownloadColumn(),
        TextColumn("layers {task.fields[layers]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {
            node.name: bars.add_task("", node=node.name, phase="", layers=f"[{node.start}, {node.end})", total=None)
            for node in plan.assignments
        }

        def report(node: str, progress: LoadProgress) -> None:
            bars.update(tasks[node], phase=progress.phase, completed=progress.done, total=progress.total)

        yield report


class Count:
    """One bar: says what is being done, and how much of all is done."""

    def __init__(self, bars: Progress, total: int) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=total)

    def at(self, what: str) -> None:
        """Name what begins now."""
        self._bars.update(self._task, description=what)

    def advance(self) -> None:
        """One more is done."""
        self._bars.update(self._task, advance=1)


@contextmanager
def show_count(total: int) -> Iterator[Count]:
    """Draw one bar; draws nothing where standard error is not a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield Count(bars, total)
