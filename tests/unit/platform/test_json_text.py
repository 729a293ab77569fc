import json

import pytest

from worker.errors import internal_error_text
from worker.platform.text import counted, json_bytes, json_problem, printable, printable_lines, to_json


def test_whatever_json_can_say_is_written_in_a_line_and_read_again_and_half_a_character_stays_an_escape() -> None:
    assert to_json({"id": "a\ud800\\é日😀"}) == '{"id": "a\\ud800\\\\é日😀"}'
    for text in ("\ud800", "\\\udfff", "\\ud800", '"\udc00\ud800"', "\x00\n日"):
        assert json.loads(to_json([text, {text: 1}]).encode()) == [text, {text: 1}]
    lines = {"a\u2028": "b\u2029c\x85d\n\x1e"}
    assert len(to_json(lines).splitlines()) == 1 and json.loads(json_bytes(lines)) == lines


def test_what_is_no_number_is_refused_where_readers_know_none() -> None:
    assert json_bytes(float("nan")) == b"NaN"
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes(float("nan"), allow_nan=False)


def test_a_bug_with_some_text_does_not_tell_all_of_it() -> None:
    try:
        "secret \ud800".encode()
    except UnicodeEncodeError as error:
        text = internal_error_text(error)
    assert "secret" not in text and r"can't encode character '\\ud800' in position 7" in text


def test_what_steers_a_terminal_or_fills_it_is_marked_and_all_else_stays() -> None:
    assert printable("Mac Studio von Jürgen 日本 → 😀") == "Mac Studio von Jürgen 日本 → 😀"
    shown = {"\x1b]0;owned\x07": "�]0;owned�", "a\nb\tc\r": "a�b�c�", "\u202egnp\x9b": "�gnp�"}
    assert {text: printable(text, most=20) for text in shown} == shown
    assert printable("12345", most=4) == "1234..."
    assert printable_lines("a\n\tb\x1b[2J\r\u202e\x9b" + "x" * 999) == "a\n\tb[2J" + "x" * 999


@pytest.mark.parametrize(
    ("text", "why"), [("[" * 100_000, "nested too deeply"), ("9" * 5000, "4300 digits"), ("{", "line 1")]
)
def test_why_a_text_is_no_json_is_told_without_pythons_functions(text: str, why: str) -> None:
    with pytest.raises((ValueError, RecursionError)) as refused:
        json.loads(text)
    told = json_problem(refused.value)
    assert why in told and "sys." not in told


def test_a_noun_is_in_the_number_of_its_count() -> None:
    told = [counted(count, *noun) for count in (0, 1, 2) for noun in (("token",), ("recovery", "recoveries"))]
    assert told == ["0 tokens", "0 recoveries", "1 token", "1 recovery", "2 tokens", "2 recoveries"]
