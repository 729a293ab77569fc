"""`brigade chat` without a model: what it tells of an answer."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.cli.chat import Chat, Dialogue, Keyboard, Messages
from coordinator.sessions.output import Output, Token, Usage

Piece = tuple[float, int, str]  # seconds after the question, tokens, text


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

    async def talk() -> str:
        lines = iter(("Hi", None))

        async def read(prompt: str) -> str | None:
            return next(lines)

        keyboard: Any = SimpleNamespace(is_terminal=False, begun="", read=read)
        chat = Chat("m", stream, cast(Keyboard, keyboard), Dialogue())
        assert await chat.run() == 0
        return chat.stats

    told = asyncio.run(talk())
    assert f"answer of {num_generated} tokens" in told
    assert told.endswith(f", {speed} tok/s") if speed else "tok/s" not in told
