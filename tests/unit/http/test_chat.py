import asyncio
import json

from coordinator.http.chat import _events
from coordinator.shapes.body import read
from coordinator.shapes.openai_chat import ChatAnswer, ChatBody
from tests.unit.http.answers import Finishing, model, task


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
