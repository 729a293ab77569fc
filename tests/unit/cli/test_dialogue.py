"""What is typed becomes messages, and messages a file."""

import pytest

from coordinator.cli.dialogue import Dialogue, Typed
from worker.errors import InputError


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
    dialogue.ask("one")
    dialogue.answer("two")
    dialogue.ask("three")
    dialogue.answer("")
    assert dialogue.messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    assert Dialogue.of(dialogue.to_json()) == dialogue
    assert Dialogue.of('{"messages": []}') == Dialogue()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"messages": [{"role": "user"}]}', '{"messages": [1]}'])
def test_what_is_no_dialogue_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        Dialogue.of(text)
