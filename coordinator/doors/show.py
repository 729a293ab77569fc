"""How answers are shown as they come: as Markdown on a terminal, as they stand elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

_REDRAW_S = 0.08
_FENCES = ("```", "~~~")


class Show(Protocol):
    """Takes an answer's text, and what the model thinks before it."""

    def say(self, text: str) -> None: ...

    def think(self, text: str) -> None: ...


def num_final(text: str) -> int:
    """How much of a Markdown text nothing to come can change: all up to its last blank line outside a code block."""
    final = at = 0
    is_code = False
    for line in text.splitlines(keepends=True):
        at += len(line)
        if line.lstrip().startswith(_FENCES):
            is_code = not is_code
        elif not line.strip() and line.endswith("\n") and not is_code:
            final = at
    return final


class PlainShow:
    """Text to standard output as it stands; thoughts are left out."""

    def __init__(self) -> None:
        self._last = "\n"

    def say(self, text: str) -> None:
        if text:
            self._last = text
            sys.stdout.write(text)
            sys.stdout.flush()

    def think(self, text: str) -> None:
        pass

    def end(self) -> None:
        if not self._last.endswith("\n"):
            print(flush=True)


class MarkdownShow:
    """Blocks are printed once they are whole; the one that grows is drawn again and again."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live
        self._growing = ""
        self._drawn_at = 0.0
        self._is_thinking = False

    def say(self, text: str) -> None:
        if self._is_thinking and text:
            self._end_thought()
        self._growing += text
        if final := num_final(self._growing):
            self._console.print(Markdown(self._growing[:final]), end="\n")
            self._growing = self._growing[final:]
        if time.monotonic() - self._drawn_at > _REDRAW_S:
            self._draw()

    def think(self, text: str) -> None:
        if text:
            self._is_thinking = True
            self._growing += text
            self._live.update(Text(self._growing, style="dim"), refresh=True)

    def end(self) -> None:
        if self._is_thinking:
            self._end_thought()
        self._live.vertical_overflow = "visible"
        self._draw()

    def _end_thought(self) -> None:
        self._console.print(Text(self._growing.strip() + "\n", style="dim"))
        self._growing, self._is_thinking = "", False

    def _draw(self) -> None:
        self._live.update(Markdown(self._growing), refresh=True)
        self._drawn_at = time.monotonic()


@contextmanager
def showing(console: Console | None) -> Iterator[Show]:
    """For one answer: on this terminal, or on standard output as it stands. However it ends, its last line does."""
    if console is None:
        plain = PlainShow()
        try:
            yield plain
        finally:
            plain.end()
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis", redirect_stdout=False) as live:
        show = MarkdownShow(console, live)
        try:
            yield show
        finally:
            show.end()
