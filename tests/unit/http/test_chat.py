import asyncio
import json

import pytest

from coordinator.http.chat import _events
from coordinator.resident.channels import Delta
from coordinator.sessions.answer import Piece, Token
from coordinator.shapes.body import read
from coordinator.shapes.openai_chat import ChatAnswer, ChatBody
from tests.unit.http.answers import Finishing, Scripted, last, model, task


def test_a_stream_tells_the_figures_of_its_choices_by_number_in_whatever_order_they_end() -> None:
    said = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "stream_options": {"include_usage": True}}
    answer, body = ChatAnswer("id", "talker", 0, str), read(ChatBody, said)
    tasks = [task(number) for number in range(3)]

    async def told() -> list[bytes]:
        return [event async for event in _events(model(Finishing([2, 0, 1])), tasks, answer, body)]

    events = asyncio.run(told())
    closing = json.loads(events[-1].removeprefix(b"data: "))
    assert [figures["reused_tokens"] for figures in closing["brigade"]] == [0, 1, 2]
    assert closing["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("wants", [True, False])
def test_what_is_decided_ahead_comes_with_the_chunk_of_its_step_where_it_is_asked_for(*, wants: bool) -> None:
    """Also with a step whose tokens say nothing yet."""
    said = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "brigade": {"fills": wants}}
    steps = [Delta(Piece(text, [Token(5)], 0, fills=[(9, Token(7))]), text) for text in ("a", "")]
    answer, body = ChatAnswer("id", "talker", 0, str), read(ChatBody, said)

    async def told() -> list[bytes]:
        return [event async for event in _events(model(Scripted([*steps, last(0)])), [task(0)], answer, body)]

    chunks = [json.loads(event.removeprefix(b"data: ")) for event in asyncio.run(told())]
    ahead = {"fills": [[9, "7"]]}
    assert [chunk.get("brigade") for chunk in chunks] == ([None, ahead, ahead, None] if wants else [None, None, None])
