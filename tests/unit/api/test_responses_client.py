"""What OpenAI's own client sees of calls, thoughts and failures by `responses`, which the demo model has none of."""

import asyncio
from collections.abc import Sequence

import pytest
from openai import APIError, AsyncOpenAI, RateLimitError
from openai.types.responses import Response

from coordinator.sessions.output import Output
from tests.unit.api.scripted import ALL, CALLS, ScriptedModel, connected, delta, leave_in_the_middle
from worker.errors import QueueFull, StageLost


def client(script: Sequence[Output | Exception]) -> AsyncOpenAI:
    return AsyncOpenAI(
        api_key="any", base_url="http://here/v1", max_retries=0, http_client=connected(ScriptedModel(script))
    )


async def asked(script: Sequence[Output | Exception], *, streamed: bool) -> Response:
    async with client(script) as openai:
        if not streamed:
            return await openai.responses.create(model="scripted", input="Hello")
        async with openai.responses.stream(model="scripted", input="Hello") as stream:
            return await stream.get_final_response()


@pytest.mark.parametrize("streamed", [True, False])
def test_thoughts_and_calls_reach_the_client(streamed: bool) -> None:
    response = asyncio.run(asked(ALL, streamed=streamed))
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[2].to_dict()["arguments"] == CALLS[0].arguments
    assert response.output_text == "\n\nLet me add.\n\n" and response.temperature == 0.5


def test_a_failure_in_the_middle_is_an_error_event() -> None:
    with pytest.raises(APIError) as failure:
        asyncio.run(asked([delta("x"), StageLost("the worker has gone")], streamed=True))
    assert (failure.value.code, failure.value.message) == ("cluster_failed", "the worker has gone")


@pytest.mark.parametrize("streamed", [True, False])
def test_a_failure_before_the_first_step_has_a_status(streamed: bool) -> None:
    with pytest.raises(RateLimitError) as failure:
        asyncio.run(asked([QueueFull("too many wait")], streamed=streamed))
    assert failure.value.code == "rate_limit_exceeded" and failure.value.response.headers["retry-after"]


@pytest.mark.parametrize(("script", "end"), [(ALL, "completed"), ([delta("x"), StageLost("gone")], "failed")])
def test_a_stream_ends_with_its_last_state_and_done(script: Sequence[Output | Exception], end: str) -> None:
    async def lines() -> list[str]:
        async with connected(ScriptedModel(script)) as http:
            body = {"input": "Hello", "stream": True}
            response = await http.post("http://here/v1/responses", json=body)
            return response.text.splitlines()

    told = asyncio.run(lines())
    assert told[-2] == "data: [DONE]" and f"event: response.{end}" == told[-5]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_ends_its_answer(streamed: bool) -> None:
    body = {"input": "Hello", "stream": streamed}
    asyncio.run(leave_in_the_middle("/v1/responses", body))
