"""Progress of work that counts tokens: how much is done, how fast, how long it will take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from coordinator.cluster.progress import say

Report = Callable[[int, int], None]
_FIRST_S, _MOST_S = 5.0, 60.0  # after which a line is written; each waits twice as long as the one before


class _Speed(ProgressColumn):
    """Tokens per second since the bar was there."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['tokens'] / task.elapsed:.0f} tok/s" if task.elapsed else "")


@contextmanager
def show_tokens(what: str, total: int, done: int = 0) -> Iterator[Report]:
    """Draw one bar on standard error, or write lines if that is no terminal; a call adds what was done, and tokens."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what, total, done)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Speed(), TimeRemainingColumn()
    # standard output may be a pipe all the same: what is printed there must not be drawn here
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bars:
        task, tokens = bars.add_task(what, total=total, completed=done, tokens=0), 0

        def report(num_done: int, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            bars.update(task, advance=num_done, tokens=tokens)

        yield report


def _lines(what: str, total: int, done: int) -> Report:
    """What takes long is told, less and less often."""
    began = time.monotonic()
    due_s, tokens = _FIRST_S, 0

    def report(num_done: int, num_tokens: int) -> None:
        nonlocal due_s, done, tokens
        done += num_done
        tokens += num_tokens
        took_s = time.monotonic() - began
        if took_s >= due_s and done < total:
            due_s = took_s + min(took_s, _MOST_S)
            say(f"{what} {done} of {total}, {tokens / took_s:.0f} tok/s ...")

    return report
