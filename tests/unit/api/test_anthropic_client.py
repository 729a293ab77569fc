"""What Anthropic's own client sees of calls, thoughts and failures, which the demo model has none of."""

import asyncio
from collections.abc import Sequence

import pytest
from anthropic import APIStatusError, AsyncAnthropic, RateLimitError, ServiceUnavailableError
from anthropic.types import Message, MessageParam

from coordinator.sessions.output import Output
from tests.unit.api.scripted import ALL, TOOL, ScriptedModel, connected, delta, leave_in_the_middle
from worker.errors import QueueFull, StageLost

HELLO: list[MessageParam] = [{"role": "user", "content": "Hello"}]


async def asked(script: Sequence[Output | Exception], *, streamed: bool) -> Message:
    async with AsyncAnthropic(
        api_key="any", base_url="http://here", max_retries=0, http_client=connected(ScriptedModel(script))
    ) as client:
        if not streamed:
            return await client.messages.create(
                model="scripted", max_tokens=9, messages=HELLO, tools=[{"name": "add", "input_schema": TOOL}]
            )
        async with client.messages.stream(model="scripted", max_tokens=9, messages=HELLO) as stream:
            return await stream.get_final_message()


@pytest.mark.parametrize("streamed", [True, False])
def test_thoughts_and_calls_reach_the_client(streamed: bool) -> None:
    message = asyncio.run(asked(ALL, streamed=streamed))
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[2].to_dict()["input"] == {"a": 1, "b": "zwei"}
    assert message.stop_reason == "tool_use" and message.usage.cache_read_input_tokens == 2


def test_a_failure_in_the_middle_is_an_error_event() -> None:
    with pytest.raises(APIStatusError) as failure:
        asyncio.run(asked([delta("x"), StageLost("the worker has gone", node="b")], streamed=True))
    assert (failure.value.type, failure.value.api_message) == ("overloaded_error", "worker b: the worker has gone")


@pytest.mark.parametrize(
    ("error", "kind", "seen"),
    [
        (QueueFull("too many wait"), "rate_limit_error", RateLimitError),
        (StageLost("no chain"), "overloaded_error", ServiceUnavailableError),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_failure_before_the_first_step_has_a_status(
    error: Exception, kind: str, seen: type[APIStatusError], streamed: bool
) -> None:
    with pytest.raises(seen) as failure:
        asyncio.run(asked([error], streamed=streamed))
    assert failure.value.type == kind and failure.value.response.headers["retry-after"]
    assert failure.value.request_id == failure.value.response.json()["request_id"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_ends_its_answer(streamed: bool) -> None:
    body = {"messages": HELLO, "max_tokens": 9, "stream": streamed}
    asyncio.run(leave_in_the_middle("/v1/messages", body))
