"""Open Responses: an answer's deltas as events and as one response, by the types of the official client."""

from collections.abc import Sequence
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseFormatTextJSONSchemaConfig, ResponseStreamEvent
from pydantic import TypeAdapter

from coordinator.api.body import read
from coordinator.api.errors import HttpError
from coordinator.api.responses import ResponseEvent, ResponseObject, ResponsesAnswer, ResponsesBody
from coordinator.sessions.output import Output
from protos.brigade_pb2 import Sampling
from tests.unit.api.scripted import ALL, CALLS, TOOL, delta, last

EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
BODY = read(ResponsesBody, {"input": "x", "tools": [{"type": "function", "name": "add", "parameters": TOOL}]})


PROMISED = TypeAdapter(ResponseObject)


def answer(body: ResponsesBody = BODY) -> ResponsesAnswer:
    made = ResponsesAnswer(body, "demo")
    made.answer = body.response("resp_1", "demo", 1_000, Sampling())
    return made


def whole(deltas: Sequence[Output], body: ResponsesBody = BODY) -> dict[str, Any]:
    """The response that all events add up to, as our own document says."""
    told = answer(body)
    assert [event for each in deltas for event in told.events(0, each)]
    assert PROMISED.validate_python(told.answer)
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
    assert state._completed_response is not None
    _, message, *calls = state._output_items.values()  # by the deltas; it does not gather thoughts
    assert message.to_dict()["content"] == found[-1].response.to_dict()["output"][1]["content"]
    assert [call.to_dict()["arguments"] for call in calls] == [call.arguments for call in CALLS]
    assert without_ids(found[-1].response) == without_ids(Response.model_validate(whole(ALL)))


def test_events_come_in_their_order() -> None:
    said = [delta(reasoning="Hm."), delta("Hel"), delta("lo"), delta(calls=CALLS[:1]), last("tool_calls")]
    found = events(said)
    text = ["content_part.added", "output_text.delta", "output_text.delta", "output_text.done", "content_part.done"]
    assert [(event.type.removeprefix("response."), getattr(event, "output_index", None)) for event in found] == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        *((kind, 1) for kind in text),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
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
    told = answer()
    begun = checked(list(told.events(0, delta("x"))))
    error = HttpError(503, "why", "cluster_failed")
    found = checked(list(told.failed(error))[:-1], first=len(begun))
    assert [event.type.removeprefix("response.") for event in found] == [
        "output_text.done", "content_part.done", "output_item.done", "error", "failed",
    ]  # fmt: skip
    assert (found[-2].code, found[-2].message, found[-2].to_dict()["error"]) == (
        "cluster_failed",
        "why",
        error.to_openai()["error"],
    )
    response = found[-1].response
    assert (response.status, response.error.code, response.error.message) == ("failed", "server_error", "why")
    assert response.output[0].status == "incomplete" and response.usage is None


def test_a_failure_before_anything_was_said_is_one_of_a_response_that_has_begun() -> None:
    """The official client refuses the failure of what was never created."""
    error = HttpError(503, "why", "cluster_failed")
    found = checked(list(answer().failed(error))[:-1])
    assert [event.type.removeprefix("response.") for event in found] == ["created", "in_progress", "error", "failed"]


@pytest.mark.parametrize(
    ("format", "echoed"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "sum", "schema": TOOL, "strict": True},
            {"type": "json_schema", "name": "sum", "schema": TOOL},
        ),
    ],
)
def test_a_response_tells_the_format_that_it_was_asked_for(format: dict[str, Any], echoed: dict[str, Any]) -> None:
    body = read(ResponsesBody, {"input": "x", "text": {"format": format}})
    told = whole([delta("x"), last()], body)
    response = Response.model_validate(told)
    assert response.text and response.text.format
    assert told["text"] == {"format": echoed}
    if format["type"] == "json_schema":
        assert isinstance(response.text.format, ResponseFormatTextJSONSchemaConfig)
        assert response.text.format.schema_ == TOOL
