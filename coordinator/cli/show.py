"""How answers are shown as they come: as Markdown in a chat on a terminal, else as plain text."""

import asyncio
import re
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.constrain import Constrain
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from coordinator.cluster.progress import say, show_tokens
from coordinator.sessions.output import Answer, Output
from worker.platform.tasks import cancel_all
from worker.platform.text import counted

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine
    from coordinator.sessions.request import Request

_REDRAW_S = 0.08
LONG_PROMPT_S, REPORT_S = 1.0, 0.25
_FENCES = ("```", "~~~")
_LINE_END = re.compile(r"(?<=\S)\n(?=.)")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0 without tab and line end, DEL, C1


def without_controls(text: str) -> str:
    """Return the text without control characters, which could change a terminal's colours, title or clipboard."""
    return _CONTROLS.sub("", text)


def num_final(text: str) -> int:
    """Return the length of the part of a Markdown text that is final: up to its last blank line outside of code."""
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
    """Writes text to standard output at once, on a terminal without control characters; omits reasoning."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._last = "\n"

    def say(self, text: str) -> None:
        if self._is_terminal:
            text = without_controls(text)
        if text:
            self._last = text
            sys.stdout.write(text)
            sys.stdout.flush()

    def think(self, text: str) -> None:
        pass

    def end(self, *, is_whole: bool = False) -> None:
        """End the last line if it is open, and always after a whole answer."""
        if is_whole or not self._last.endswith("\n"):
            print(flush=True)


class MarkdownShow:
    """Prints Markdown blocks once they are complete, and redraws the one that is not."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live
        self._growing = ""
        self._drawn_at = 0.0
        self._is_thinking = False

    def say(self, text: str) -> None:
        if self._is_thinking and text:
            self._end_thought()
        self._growing += without_controls(text)
        if final := num_final(self._growing):
            self._console.print(self._rendered(self._growing[:final]), "")
            self._growing = self._growing[final:]
        if time.monotonic() - self._drawn_at > _REDRAW_S:
            self._draw()

    def think(self, text: str) -> None:
        if text:
            self._is_thinking = True
            self._growing += without_controls(text)
            self._live.update(Text(self._growing, style="dim"), refresh=True)

    def end(self) -> None:
        if self._is_thinking:
            self._end_thought()
        self._live.vertical_overflow = "visible"
        self._draw()

    def _end_thought(self) -> None:
        self._console.print(Text(self._growing.strip() + "\n", style="dim"))
        self._growing, self._is_thinking = "", False

    def _rendered(self, text: str) -> Constrain:
        """Return Markdown in lines so short that what the terminal echoes of an interrupt begins no further line."""
        lines = _LINE_END.sub("  \n", text)  # as written: Markdown would join lines that no blank one parts
        return Constrain(Markdown(lines), max(1, self._console.width - 2 * len("^C")))

    def _draw(self) -> None:
        self._live.update(self._rendered(self._growing), refresh=True)
        self._drawn_at = time.monotonic()


async def with_prompt_shown(
    outputs: AsyncGenerator[Output, None], engine: "Engine", request: "Request"
) -> AsyncGenerator[Output, None]:
    """Yield a request's outputs; before the first one show how much of its prompt is computed."""
    showing_it = asyncio.create_task(_show_prompt(engine, request))
    try:
        async with aclosing(outputs):
            async for output in outputs:
                if not showing_it.done():
                    await cancel_all(showing_it)
                yield output
    finally:
        await cancel_all(showing_it)


async def _show_prompt(engine: "Engine", request: "Request") -> None:
    """Show it once it takes long, until this is cancelled."""
    await asyncio.sleep(LONG_PROMPT_S)
    session = None
    while session is None:  # a grammar is compiled before
        await asyncio.sleep(REPORT_S)
        session = next((each for each in engine.sessions if each.request is request), None)
    computed = session.num_prompt_computed
    with show_tokens("prompt", session.num_prompt, computed) as report:
        while True:
            before, computed = computed, session.num_prompt_computed
            report(computed - before, computed - before)
            await asyncio.sleep(REPORT_S)


class Printer:
    """Prints one answer's text as it comes. A context manager, which ends the last line.

    After an interrupt it prints one line of statistics on standard error, if it has the `answer` so far.
    """

    def __init__(self, answer: Answer | None = None, *, is_silent: bool = False) -> None:
        self._show = None if is_silent else PlainShow()
        self._answer = answer
        self._began = time.monotonic_ns()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._show is not None and (kind is None or not issubclass(kind, OSError)):  # an OSError: stdout was closed
            self._show.end(is_whole=kind is None)
        if kind is asyncio.CancelledError and self._answer and (times := self._answer.token_times):
            took_s, first_s = (times[-1] - times[0]) / 1e9, (times[0] - self._began) / 1e9
            speed = f", {(len(times) - 1) / took_s:.1f} tok/s" if took_s else ""
            say(f"interrupted after {counted(len(times), 'token')}{speed}; first after {first_s:.3f} s")

    def write(self, text: str) -> None:
        if self._show is not None:
            self._show.say(text)


@contextmanager
def showing(console: Console | None) -> Iterator["PlainShow | MarkdownShow"]:
    """Yield an object that shows one answer on this terminal, or on standard output; end its last line in any case."""
    with ExitStack() as stack:
        show: PlainShow | MarkdownShow = PlainShow()
        if console is not None:
            live = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis", redirect_stdout=False)
            show = MarkdownShow(console, stack.enter_context(live))
        stack.callback(show.end)
        yield show
