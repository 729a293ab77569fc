"""Texts of flags to numbers, and what is refused with the name of its flag."""

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.cli.chat import Dialogue, Typed
from coordinator.cli.flags import parse_bias, parse_counts, parse_layers, parse_times, parse_tokens
from worker.errors import InputError


def counts(text: str) -> tuple[int, ...]:
    return parse_counts("concurrency", text, most=8)


def times(text: str) -> tuple[float, ...]:
    return parse_times("stage_ms", text, least=0.5)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_layers, "3,2, 1", (3, 2, 1)),
        (parse_tokens, "1,,2,", (1, 2)),
        (parse_tokens, "", ()),
        (parse_bias, "5:-1.5,7:2,", {5: -1.5, 7: 2.0}),
        (parse_bias, "", {}),
        (counts, "8,1,4,1", (1, 4, 8)),
        (times, "26.5,0.5,1e6", (26.5, 0.5, 1e6)),
    ],
)
def test_what_stands_between_commas_is_read(parse: Callable[[str], Any], text: str, expected: Any) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "texts", "field"),
    [
        (parse_layers, ["3,,1"], "layers"),
        (parse_tokens, ["1;2"], "prompt_tokens"),
        (parse_bias, ["5", "5:1:2"], "logit_bias"),
        (counts, ["", "0", "1,9", "1.5"], "concurrency"),
        (times, ["", "0", "1,nan", "inf", "-1"], "stage_ms"),
    ],
)
def test_what_is_no_such_number_is_refused(parse: Callable[[str], Any], texts: list[str], field: str) -> None:
    for text in texts:
        with pytest.raises(InputError) as refusal:
            parse(text)
        assert refusal.value.field == field


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["a", "b"], ["a", "b"]),
        (["a\\", "b\\", "c", "d"], ["a\nb\nc", "d"]),
        (['"""a', "", 'b"""', "c"], ["a\n\nb", "c"]),
        (['"""', "a\\", '"""'], ["a\\"]),
        (['"""a"""'], ["a"]),
        (["a\\"], ["a"]),
        (['"""a', "b"], ["a\nb"]),
    ],
)
def test_lines_make_messages(lines: list[str], messages: list[str]) -> None:
    typed = Typed()
    found = [message for line in lines if (message := typed.push(line)) is not None]
    assert [*found, *filter(None, [typed.flush()])] == messages
    assert not typed.is_open


def test_a_dialogue_is_saved_and_loaded() -> None:
    dialogue = Dialogue("be brief")
    for said, answered in (("one", "two"), ("three", "")):
        dialogue.ask(said)
        dialogue.answer(answered)
    assert dialogue.messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    assert Dialogue.of(dialogue.to_json()) == dialogue
    assert Dialogue.of('{"messages": []}') == Dialogue()
    for text in ("", "[]", "{}", '{"messages": [{"role": "user"}]}', '{"messages": [1]}'):
        with pytest.raises(InputError):
            Dialogue.of(text)
