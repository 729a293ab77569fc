"""Open Responses: an answer's deltas as events and as one response, by the types of the official client."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI, omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from coordinator.api.app import make_app
from coordinator.api.body import read
from coordinator.api.errors import HttpError
from coordinator.api.responses import ResponseEvent, ResponseObject, ResponsesAnswer, ResponsesBody
from coordinator.engine import grammars
from coordinator.engine.grammars import json_grammar
from coordinator.sessions.output import Output
from coordinator.sessions.request import RequestSpec
from protos.brigade_pb2 import Sampling
from tests.unit.api import test_agent_requests as agents
from tests.unit.api.fakes import (
    ALL,
    CALLS,
    TOOL,
    FakeEngine,
    ScriptedModel,
    app_of,
    ask,
    connected,
    delta,
    last,
    leave_in_the_middle,
    served,
)
from worker.errors import InputError, StageLost

EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
BODY = read(ResponsesBody, {"input": "x", "tools": [{"type": "function", "name": "add", "parameters": TOOL}]})


def answer(body: ResponsesBody = BODY) -> ResponsesAnswer:
    made = ResponsesAnswer(body, "demo")
    made.answer = body.response("resp_1", "demo", 1_000, Sampling())
    return made


def whole(deltas: Sequence[Output], body: ResponsesBody = BODY) -> dict[str, Any]:
    """The response that all events add up to, as our own document says."""
    told = answer(body)
    assert [event for each in deltas for event in told.events(0, each)]
    assert TypeAdapter(ResponseObject).validate_python(told.answer)
    return dict(told.answer)


def checked(told: Sequence[Any], first: int = 0) -> list[Any]:
    """As the client's types; fails if one is none of them, not as our own document says, or out of its turn."""
    found = []
    for number, event in enumerate(told, first):
        assert ResponseEvent.model_validate(event)
        found.append(EVENTS.validate_python(event))
        assert (found[-1].type, found[-1].sequence_number) == (event["type"], number)
    return found


def events(deltas: Sequence[Output]) -> list[Any]:
    told = answer()
    return checked([event for each in deltas for event in told.events(0, each)])


def without_ids(response: Response) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.to_dict().items() if key != "id"} for item in response.output]


def test_the_response_has_an_item_for_every_thought_text_and_call() -> None:
    response = Response.model_validate(whole(ALL))
    text = {"type": "output_text", "text": "\n\nLet me add.\n\n", "annotations": [], "logprobs": []}
    done = {"status": "completed"}
    assert without_ids(response) == [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "\nHm, add."}], **done},
        {"type": "message", "role": "assistant", "content": [text], **done},
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": CALLS[0].arguments, **done},
        {"type": "function_call", "call_id": "call_2", "name": "now", "arguments": "{}", **done},
    ]
    assert len({item.id for item in response.output}) == 4
    assert (response.status, response.created_at, response.completed_at) == ("completed", 1_000, 1_003)
    assert response.to_dict()["store"] is False
    assert response.usage is not None
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 10, 17)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (2, 6)


def test_the_client_makes_the_same_response_of_the_events() -> None:
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    found = events(ALL)
    for event in found:
        state.handle_event(event)
    assert state._completed_response is not None  # noqa: SLF001 - of openai
    _, message, *calls = state._output_items.values()  # noqa: SLF001 - by the deltas; it does not gather thoughts
    assert message.to_dict()["content"] == found[-1].response.to_dict()["output"][1]["content"]
    assert [call.to_dict()["arguments"] for call in calls] == [call.arguments for call in CALLS]
    assert without_ids(found[-1].response) == without_ids(Response.model_validate(whole(ALL)))


def test_events_come_in_their_order() -> None:
    said = [delta(reasoning="Hm."), delta("Hel"), delta("lo"), delta(calls=CALLS[:1]), last("tool_calls")]
    found = events(said)
    thought = ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]
    text = ["content_part.added", *["output_text.delta"] * 2, "output_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert [(event.type.removeprefix("response."), getattr(event, "output_index", None)) for event in found] == [
        ("created", None),
        ("in_progress", None),
        *(
            (kind, index)
            for index, kinds in enumerate((thought, text, call))
            for kind in ("output_item.added", *kinds, "output_item.done")
        ),
        ("completed", None),
    ]
    assert found[0].response.output == [] and found[2].item.content == [] and found[2].item.status == "in_progress"


@pytest.mark.parametrize("step", [delta("x"), delta(reasoning="x")])
def test_an_answer_that_was_cut_off_is_incomplete_and_so_is_its_last_item(step: Output) -> None:
    final = events([step, last("length")])[-1]
    assert final.type == "response.incomplete"
    assert (final.response.status, final.response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert final.response.completed_at is None and final.response.output[-1].status == "incomplete"


def test_a_failure_is_an_error_and_a_failed_response() -> None:
    error, told = HttpError(503, "why", "cluster_failed"), answer()
    # the official client refuses the failure of what was never created
    found = checked(list(answer().failed(error))[:-1])
    assert [event.type.removeprefix("response.") for event in found] == ["created", "in_progress", "error", "failed"]
    begun = checked(list(told.events(0, delta("x"))))
    found = checked(list(told.failed(error))[:-1], first=len(begun))
    kinds = ["output_text.done", "content_part.done", "output_item.done", "error", "failed"]
    assert [event.type.removeprefix("response.") for event in found] == kinds
    assert (found[-2].code, found[-2].message) == ("cluster_failed", "why")
    assert found[-2].to_dict()["error"] == error.to_openai()["error"]
    response = found[-1].response
    assert (response.status, response.error.code, response.error.message) == ("failed", "server_error", "why")
    assert response.output[0].status == "incomplete" and response.usage is None


def test_a_response_tells_the_format_that_it_was_asked_for() -> None:
    schema = {"type": "json_schema", "name": "sum", "schema": TOOL}
    for format, echo in (
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (schema | {"strict": True}, schema),
    ):
        told = whole([delta("x"), last()], read(ResponsesBody, {"input": "x", "text": {"format": format}}))
        assert told["text"] == {"format": echo}
        response = Response.model_validate(told)
        assert response.text and response.text.format and response.text.format.type == format["type"]
    assert spec(text={"format": schema | {"strict": True}}).grammar == json_grammar(TOOL)
    assert echoed()["text"] == {"format": {"type": "text"}}


async def asked(script: Sequence[Output | Exception], *, streamed: bool) -> Response:
    http_client = connected(ScriptedModel(script))
    async with AsyncOpenAI(api_key="any", base_url="http://here/v1", max_retries=0, http_client=http_client) as openai:
        if not streamed:
            return await openai.responses.create(model="scripted", input="Hello")
        async with openai.responses.stream(model="scripted", input="Hello") as stream:
            return await stream.get_final_response()


@pytest.mark.parametrize("streamed", [True, False])
async def test_thoughts_and_calls_reach_the_client_and_one_that_leaves_ends_its_answer(streamed: bool) -> None:
    response = await asked(ALL, streamed=streamed)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[2].to_dict()["arguments"] == CALLS[0].arguments
    assert response.output_text == "\n\nLet me add.\n\n" and response.temperature == 0.5
    await leave_in_the_middle("/v1/responses", {"input": "Hello", "stream": streamed})


@pytest.mark.parametrize(("script", "end"), [(ALL, "completed"), ([delta("x"), StageLost("gone")], "failed")])
def test_a_stream_ends_with_its_last_state_and_done(script: Sequence[Output | Exception], end: str) -> None:
    found = ask(app_of(ScriptedModel(script)), "POST", "/v1/responses", json={"input": "Hello", "stream": True})
    told = found.text.splitlines()
    assert told[-2] == "data: [DONE]" and f"event: response.{end}" == told[-5]


spec, conversation = partial(agents.spec, "responses"), partial(agents.conversation, "responses")


def echoed(**fields: Any) -> Any:
    return read(ResponsesBody, {"input": "x"} | fields).response("r", "demo", 0, Sampling(temperature=0.25))


def test_items_become_a_templates_messages() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "No jokes."},
        {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}, {"type": "input_text", "text": "Now?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Done."}], "encrypted_content": "xyz"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation(input=items, instructions="Be brief.").messages == (
        {"role": "system", "content": "Be brief.\nNo jokes."},
        {"role": "user", "content": "1+1?\nNow?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "Done."},
        {"role": "user", "content": "Thanks."},
    )


def test_fields_become_those_of_a_request_and_the_rest_is_ignored() -> None:
    tools = [{"type": "function", "name": "add", "description": None, "parameters": TOOL, "strict": True}]
    function = {"type": "function", "function": {"name": "add", "parameters": TOOL}}
    assert conversation(tools=tools).tools == (function,)
    assert conversation(tools=tools, tool_choice="none").tools == ()
    ignored = {"store": True, "truncation": "auto", "service_tier": "flex", "user": "x", "prompt_cache_key": "y"}
    asked = spec(max_output_tokens=9, temperature=0.5, presence_penalty=1.5, kv="int8", **ignored)
    assert asked.max_tokens == 9 and asked.sampling == {"temperature": 0.5, "presence_penalty": 1.5}
    assert spec(include=["reasoning.encrypted_content"], background=False, top_logprobs=0).max_tokens is None
    empty: dict[str, Any] = {"previous_response_id": "", "conversation": {}, "prompt": None}
    assert spec(**empty).max_tokens is None


def test_a_response_tells_what_held_for_it_not_what_was_asked() -> None:
    tool = {"type": "function", "name": "add", "parameters": TOOL}
    found = echoed(tools=[tool | {"strict": True}], parallel_tool_calls=False, metadata={"a": "b"})
    assert (found["temperature"], found["top_p"]) == (0.25, 1.0)  # the model's own
    assert found["tools"] == [tool | {"description": None, "strict": False}]
    assert (found["parallel_tool_calls"], found["tool_choice"], found["metadata"]) == (False, "auto", {"a": "b"})
    for choice in ("required", {"type": "function", "name": "add"}):
        assert echoed(tool_choice=choice)["tool_choice"] == choice


@pytest.mark.parametrize(
    ("field", "body", "param"),
    [
        ("prompt", {}, "input"),
        ("max_tokens", {}, "max_output_tokens"),
        ("response_format", {}, "text.format"),
        ("", {"prompt": {"id": "pmpt_1"}}, "prompt"),
        ("", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}}, "text.format"),
    ],
    ids=["prompt", "length", "format", "stored", "too large"],
)
def test_refusals_name_fields(monkeypatch: pytest.MonkeyPatch, field: str, body: dict[str, Any], param: str) -> None:
    class Refusing(FakeEngine):
        async def make_request(self, spec: RequestSpec) -> Any:
            raise InputError(field, "wrong")

    monkeypatch.setattr(grammars, "MOST_GRAMMAR", 10)
    found = ask(make_app(served(model=Refusing())), "POST", "/v1/responses", json={"input": "hi"} | body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, param)
