"""What of a growing Markdown text is final, and what reaches a terminal."""

import io
import sys

import pytest
from rich.console import Console

from coordinator.cli.show import num_final, showing


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("a\nb", ""),
        ("a\n\nb", "a\n\n"),
        ("a\n\n", "a\n\n"),
        ("```\na\n\nb\n", ""),
        ("x\n\n```\na\n\nb\n```\n\nc", "x\n\n```\na\n\nb\n```\n\n"),
    ],
)
def test_blocks_are_final_after_a_blank_line_outside_of_code(text: str, final: str) -> None:
    assert text[: num_final(text)] == final


HOSTILE = "a\x1b]52;c;aGk=\x07b\x9b31mc\td\ne\rf\u200dg"
CLEAN = "a]52;c;aGk=b31mc\td\nef\u200dg"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_models_text_cannot_steer_a_terminal_and_comes_as_it_is_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    with showing(None) as show:
        for character in HOSTILE:
            show.say(character)
    assert capsys.readouterr().out == (CLEAN if is_terminal else HOSTILE) + "\n"


def test_neither_can_what_is_drawn_as_markdown() -> None:
    screen = io.StringIO()
    with showing(Console(file=screen, force_terminal=True, width=60, color_system=None)) as show:
        show.think("\x1b]52;c;aGk=\x07")
        show.say("\x1b]0;title\x07text\n\nmore\x9b2J")
    assert "\x1b]" not in screen.getvalue() and "\x9b" not in screen.getvalue() and "]0;titletext" in screen.getvalue()
