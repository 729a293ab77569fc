"""Bars for work that counts tokens: how much is done, how fast, and how long it will take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

Report = Callable[[int, int], None]


class _Speed(ProgressColumn):
    """Tokens per second since the bar was there."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['tokens'] / task.elapsed:.0f} tok/s" if task.elapsed else "")


@contextmanager
def show_tokens(what: str, total: int, done: int = 0) -> Iterator[Report]:
    """Draw one bar on standard error, if that is a terminal; a call adds what was done, and tokens."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Speed(), TimeRemainingColumn()
    # standard output may be a pipe all the same: what is printed there must not be drawn here
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False
    ) as bars:
        task, tokens = bars.add_task(what, total=total, completed=done, tokens=0), 0

        def report(num_done: int, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            bars.update(task, advance=num_done, tokens=tokens)

        yield report
