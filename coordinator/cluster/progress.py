"""Progress of long work on standard error, where that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

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


@contextmanager
def show_count(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Draw one bar that a call moves on by one."""
    console = Console(stderr=True)
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=total)
        yield lambda: bars.update(task, advance=1)


@contextmanager
def show_steps(total: int) -> Iterator[Callable[[str], None]]:
    """Draw one bar and what is being done; a call names the step that begins."""
    console = Console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task, done = bars.add_task("", total=total), count()
        yield lambda step: bars.update(task, completed=next(done), description=step, refresh=True)
