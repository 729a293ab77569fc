"""What stands on the two streams once an answer is there, broke off, or was interrupted."""

import asyncio
import contextlib
import io
import re
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from coordinator.cli import show
from coordinator.cli.generate import how_it_ended
from coordinator.cli.show import Printer, num_final, showing, with_prompt_shown
from coordinator.cluster import progress
from coordinator.sessions.output import Answer, Output, Token, Usage
from coordinator.sessions.request import Request
from worker.errors import StageLost


def print_pieces(pieces: Sequence[str], end: BaseException | None = None, *, is_silent: bool = False) -> None:
    answer = Answer()
    with Printer(answer, is_silent=is_silent) as printer:
        for piece in pieces:
            answer.add(Output(piece, [Token(7)], time.monotonic_ns()))
            printer.write(piece)
        if end is not None:
            raise end


@pytest.mark.parametrize(
    ("pieces", "end", "out"),
    [
        (["Hel", "lo\n"], None, "Hello\n\n"),
        (["Hel", "lo"], StageLost("gone"), "Hello\n"),  # or the error would be glued to the answer's last word
        (["Hi\n", ""], StageLost("gone"), "Hi\n"),
        ([], StageLost("gone"), ""),
        ([], asyncio.CancelledError(), ""),
        (["a"], BrokenPipeError(), "a"),  # its reader has left
    ],
)
def test_what_breaks_off_leaves_no_line_open(
    capsys: pytest.CaptureFixture[str], pieces: list[str], end: BaseException | None, out: str
) -> None:
    with contextlib.nullcontext() if end is None else pytest.raises(type(end)):
        print_pieces(pieces, end)
    assert capsys.readouterr() == (out, "")
    with contextlib.nullcontext() if end is None else pytest.raises(type(end)):
        print_pieces(pieces, end, is_silent=True)  # JSON alone has standard output
    assert capsys.readouterr() == ("", "")


def test_whoever_interrupts_is_told_what_there_was(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(asyncio.CancelledError):
        print_pieces(["a", "b", "c"], asyncio.CancelledError())
    out, err = capsys.readouterr()
    assert out == "abc\n"
    assert err.startswith("interrupted after 3 tokens, ") and err.count("\n") == 1


def make_answer(
    tokens: Sequence[int] = (5, 6, 7), finish_reason: str = "length", num_steps: int = 2, stop: str | None = None
) -> Answer:
    answer = Answer(usage=Usage(4, 0, 0, num_steps, 4), finish_reason=finish_reason, stop=stop)
    answer.samples = [Token(token) for token in tokens]
    answer.token_times = [500_000_000 + 250_000_000 * i for i in range(len(tokens))]
    return answer


def test_it_is_told_why_the_answer_ended() -> None:
    for max_tokens, answer, said in (
        (3, make_answer(), "cut off at --max-tokens 3"),
        (500, make_answer(range(124)), "cut off where the model's context of 128 tokens ends"),
        (9, make_answer(), "cut off where the memory of the nodes ends"),
        (9, make_answer((5, 2), "stop"), "ended by itself"),
        (9, make_answer((5, 5), "stop"), "ended because it repeated itself"),
        (9, make_answer((5, 6), "stop", stop="!"), "ended at a --stop text"),
    ):
        assert how_it_ended(Request((1,) * 4, max_tokens, eos=frozenset([2])), answer, 128) == said


def test_blocks_are_final_after_a_blank_line_outside_of_code() -> None:
    code = "x\n\n```\na\n\nb\n```\n\n"
    for text, final in (
        ("a\nb", ""), ("a\n\nb", "a\n\n"), ("a\n\n", "a\n\n"), ("```\na\n\nb\n", ""), (f"{code}c", code),
    ):  # fmt: skip
        assert text[: num_final(text)] == final


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_models_text_cannot_steer_a_terminal_and_comes_as_it_is_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    hostile, clean = "a\x1b]52;c;aGk=\x07b\x9b31mc\td\ne\rf\u200dg", "a]52;c;aGk=b31mc\td\nef\u200dg"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    with showing(None) as show:
        for character in hostile:
            show.say(character)
    assert capsys.readouterr().out == (clean if is_terminal else hostile) + "\n"


def test_neither_can_what_is_drawn_as_markdown() -> None:
    screen = io.StringIO()
    with showing(Console(file=screen, force_terminal=True, width=60, color_system=None)) as show:
        show.think("\x1b]52;c;aGk=\x07")
        show.say("\x1b]0;title\x07text\n\nmore\x9b2J")
    assert "\x1b]" not in screen.getvalue() and "\x9b" not in screen.getvalue() and "]0;titletext" in screen.getvalue()


def test_markdown_keeps_the_lines_as_they_were_written() -> None:
    screen = io.StringIO()
    with showing(Console(file=screen, force_terminal=True, width=60, color_system=None)) as show:
        show.say("Step 1: 3 + 4\nones 3+4=7\n\n- a\n- b\n\n```\nx = 1\n  y\n```\n")
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "")
    assert re.search(r"Step 1: 3 \+ 4 *\nones 3\+4=7 *\n", drawn)
    assert re.search(r"• a *\n *• b *\n", drawn) and re.search(r" x = 1 *\n +y *\n", drawn)


async def test_of_a_long_prompt_is_told_how_much_is_computed_until_the_answer_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "LONG_PROMPT_S", 0.0)
    monkeypatch.setattr(show, "REPORT_S", 0.001)
    monkeypatch.setattr(progress, "TOKENS_FIRST_S", 0.0)
    asked: Any = object()
    session = SimpleNamespace(request=asked, num_prompt=10_000, num_prompt_computed=8_000)  # some are reused
    aborted = SimpleNamespace(request=object(), num_prompt=7, num_prompt_computed=0)

    async def outputs() -> AsyncGenerator[Output, None]:
        await asyncio.sleep(0.02)
        engine.sessions.append(session)  # its grammar was compiled before
        await asyncio.sleep(0.1)
        session.num_prompt_computed = 8_001
        await asyncio.sleep(0.05)
        yield Output("", (), 0)
        await asyncio.sleep(0.05)
        yield Output("", (), 0)

    engine: Any = SimpleNamespace(sessions=[aborted])
    told = [capsys.readouterr().err async for _ in with_prompt_shown(outputs(), engine, asked)]
    speeds = re.findall(r"prompt 800[01] of 10000(?:, (\d+) tok/s)?", told[0])
    assert speeds and all(int(each or 0) < 1000 for each in speeds), "what was reused took no time"
    assert not told[1]
