"""`brigade chat` without a model: what it tells of an answer."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.cli.chat import Chat, Dialogue, Keyboard, Messages, Stream
from coordinator.sessions.output import Output, Token, Usage
from worker.errors import BrigadeError, ContextExceeded

Piece = tuple[float, int, str]  # seconds after the question, tokens, text


def talk(stream: Stream, *lines: str) -> Chat:
    """A chat in which these lines were typed."""

    async def run() -> Chat:
        left = iter((*lines, None))

        async def read(prompt: str) -> str | None:
            return next(left)

        keyboard: Any = SimpleNamespace(is_terminal=False, begun="", read=read)
        chat = Chat("m", stream, cast(Keyboard, keyboard), Dialogue())
        await chat.run()
        return chat

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("pieces", "speed"),
    [
        ([(0, 1, "a"), (1, 1, "b"), (2, 1, "c")], "1.0"),
        ([(0, 16, ""), (1, 1, "a"), (2, 1, "b")], "1.0"),  # the text of the first window is held back
        ([(0, 256, "many"), (2, 20, "more")], "10.0"),  # a canvas
        ([(0, 0, "four" * 64), (2, 0, "four" * 5), (2, 0, "")], "10.0"),  # a server sends no tokens
        ([(0, 2, "a")], None),
    ],
)
def test_the_speed_of_an_answer_leaves_out_its_first_text(pieces: Sequence[Piece], speed: str | None) -> None:
    num_generated = sum(num for _, num, _ in pieces) or 276

    async def stream(messages: Messages) -> AsyncGenerator[Output, None]:
        began = time.monotonic_ns()
        for number, (at, num, text) in enumerate(pieces, 1):
            output = Output(text, [Token(5)] * num, began + int(at * 1e9), content=text)
            if number == len(pieces):
                output.finish_reason = "stop"
                output.usage = Usage(3, began, 0, 1, 1, num_generated=num_generated)
            yield output

    told = talk(stream, "Hi").stats
    assert f"answer of {num_generated} tokens" in told
    assert told.endswith(f", {speed} tok/s") if speed else "tok/s" not in told


@pytest.mark.parametrize(
    ("tokens", "text", "told"),
    [([5, 6], "b", r"answer broken off after 2 tokens, its first text after \d.\d{3} s"),
     ([], "b", r"answer broken off, its first text after \d.\d{3} s"), ([], "", "no answer to the last message")],
    ids=["of a model", "of a server", "none"],
)  # fmt: skip
def test_the_statistics_are_of_the_last_message_also_if_its_answer_ends_early(
    tokens: list[int], text: str, told: str
) -> None:
    async def stream(messages: Messages) -> AsyncGenerator[Output, None]:
        now = time.monotonic_ns()
        if messages[-1]["content"] == "whole":
            yield Output("a", [Token(5)], now, "stop", Usage(3, now, 0, 1, 1, num_generated=1), content="a")
            return
        if tokens or text:
            yield Output(text, [Token(token) for token in tokens], now, content=text)
        raise BrigadeError("lost")

    assert talk(stream).stats == "no answer yet"
    assert "answer of 1 token," in talk(stream, "whole").stats
    assert re.fullmatch(told, talk(stream, "whole", "broken").stats)


@pytest.mark.parametrize("numbers", [{"num_tokens": 250, "most": 200}, {}], ids=["of a model", "of a server"])
def test_a_conversation_that_is_too_long_is_to_begin_anew_if_the_last_message_alone_is_not(
    numbers: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    async def stream(messages: Messages) -> AsyncGenerator[Output, None]:
        if sum(len(message["content"]) for message in messages) > 200:
            raise ContextExceeded("prompt", "found too much; shorten it. There is more to say.", **numbers)
        yield Output("a", (), time.monotonic_ns(), "stop", Usage(3, 0, 0, 1, 1), content="a")

    for lines, told in (
        (["a" * 150, "b" * 100], "error: conversation: found too much; /reset begins a new one\n"),
        (["b" * 250], "error: prompt: found too much; shorten it. There is more to say.\n"),
        (["a", "b" * 250], "error: prompt: found too much; shorten it. There is more to say.\n"),
    ):
        talk(stream, *lines)
        assert capsys.readouterr().err == told
