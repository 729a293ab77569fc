import pytest

from worker.platform.text import printable, printable_lines


def test_what_is_printable_stays_as_it_is() -> None:
    assert printable("Mac Studio von Jürgen 日本 → 😀") == "Mac Studio von Jürgen 日本 → 😀"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\x1b]0;owned\x07", "�]0;owned�"), ("a\nb\tc\r", "a�b�c�"), ("\u202egnp\x9b", "�gnp�"), ("12345", "1234...")],
)
def test_what_steers_a_terminal_or_fills_it_is_marked(text: str, shown: str) -> None:
    assert printable(text, most=4 if text.isdecimal() else 20) == shown


def test_lines_stay_lines_of_whatever_length() -> None:
    assert printable_lines("a\n\tb\x1b[2J\r\u202e\x9b" + "x" * 999) == "a\n\tb[2J" + "x" * 999
