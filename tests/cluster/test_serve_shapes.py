"""`brigade serve` as the official clients of Anthropic and OpenAI see it, by the APIs beside chat completions."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic, AuthenticationError, BadRequestError, NotFoundError
from anthropic.types import MessageParam
from openai import BadRequestError as OpenAIBadRequest
from openai import NotFoundError as OpenAINotFound
from openai import OpenAI

from tests.cluster.processes import START_S, Starter
from tests.schemas import breaches

KEY = "a-key-of-these-tests"
SYSTEM = "Be brief."
TURNS = [("user", "Hello"), ("assistant", "Hello!"), ("user", "Tell me a story about a fox.")]
MESSAGES: Any = [{"role": who, "content": text} for who, text in TURNS]
TOO_LONG: list[MessageParam] = [{"role": "user", "content": "fox " * 9_000}]
ASKED: Any = {"model": "demo", "max_tokens": 20, "messages": MESSAGES, "extra_body": {"temperature": 0.0}}
OWN = {"x-api-key": KEY}


@pytest.fixture(scope="module")
def url(module_start: Starter, tmp_path_factory: pytest.TempPathFactory) -> str:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"tests {KEY}\n")
    named = ("--served-model-name", "demo", "--api-key-file", keys)
    server = module_start.brigade("serve", "--model", "demo", "--local", "1", "--port", "0", *named)
    return server.err.wait_match(r"serving demo at (\S+?),", START_S)[1]


@pytest.fixture(scope="module")
def anthropic(url: str) -> Iterator[Anthropic]:
    with Anthropic(api_key=KEY, base_url=url, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def openai(url: str) -> Iterator[OpenAI]:
    with OpenAI(api_key=KEY, base_url=f"{url}/v1", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def text(openai: OpenAI) -> str:
    """What chat completions answer to the conversation."""
    messages: Any = [{"role": "system", "content": SYSTEM}, *MESSAGES]
    answer = openai.chat.completions.create(model="demo", messages=messages, max_tokens=20, temperature=0.0)
    return str(answer.choices[0].message.content)


def test_a_message_is_that_of_chat_completions_streamed_or_not_and_as_long_as_counted(
    anthropic: Anthropic, text: str
) -> None:
    message = anthropic.messages.create(**ASKED, system=SYSTEM)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": text}]
    counted = anthropic.messages.count_tokens(model="demo", system=SYSTEM, messages=MESSAGES).input_tokens
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted > 9
    with anthropic.messages.stream(**ASKED, system=[{"type": "text", "text": SYSTEM}]) as stream:
        assert "".join(stream.text_stream) == text
        usage = stream.get_final_message().usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    assert usage.output_tokens == message.usage.output_tokens > 1
    assert anthropic.messages.count_tokens(model="demo", messages=TOO_LONG).input_tokens > 9_000


def test_a_message_says_why_it_ended(anthropic: Anthropic, text: str) -> None:
    word = text.split()[2]

    def ended(**limits: Any) -> tuple[str | None, str | None, str]:
        message = anthropic.messages.create(**(ASKED | {"system": SYSTEM} | limits))
        return message.stop_reason, message.stop_sequence, "".join(block.to_dict()["text"] for block in message.content)

    assert ended(stop_sequences=["never said", word]) == ("stop_sequence", word, text[: text.index(word)])
    reason, stop, said = ended(max_tokens=2)
    assert (reason, stop) == ("max_tokens", None) and text.startswith(said)


def test_anthropics_errors_are_its_clients_own(anthropic: Anthropic, url: str) -> None:
    with pytest.raises(NotFoundError) as unknown:
        anthropic.messages.create(**ASKED | {"model": "claude"})
    assert unknown.value.type == "not_found_error" and unknown.value.request_id
    with pytest.raises(BadRequestError, match="messages: expected less than") as too_long:
        anthropic.messages.create(**ASKED | {"messages": TOO_LONG})
    assert too_long.value.type == "invalid_request_error"
    with pytest.raises(NotFoundError) as unrouted:
        anthropic.messages.batches.list()
    assert unrouted.value.type == "not_found_error"
    with Anthropic(api_key="another-key", base_url=url, max_retries=0) as stranger:
        with pytest.raises(AuthenticationError) as refused:
            stranger.messages.create(**ASKED)
        assert refused.value.type == "authentication_error"


def test_claude_codes_requests_are_answered(anthropic: Anthropic) -> None:
    """They go to `?beta=true`, with fields and headers that change nothing here; and to the list of models."""
    cached: Any = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
    asked: Any = {
        "model": "demo", "system": [cached], "messages": MESSAGES, "thinking": {"type": "adaptive"},
        "betas": ["context-management-2025-06-27"], "context_management": {"edits": []},
    }  # fmt: skip
    message = anthropic.beta.messages.create(max_tokens=8, metadata={"user_id": "x"}, **asked)
    counted = anthropic.beta.messages.count_tokens(**asked)
    assert message.usage.output_tokens == 8 or message.stop_reason == "end_turn"
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    [card] = anthropic.models.list(limit=1000)
    assert (card.id, card.display_name, card.type) == ("demo", "demo", "model")
    assert anthropic.models.retrieve("demo").created_at == card.created_at


def test_a_response_is_that_of_chat_completions_streamed_or_not(openai: OpenAI, text: str) -> None:
    asked: Any = {
        "model": "demo", "instructions": SYSTEM, "input": MESSAGES, "temperature": 0, "max_output_tokens": 20,
    }  # fmt: skip
    response = openai.responses.create(store=True, **asked)
    assert response.output_text == text and response.to_dict()["store"] is False
    with openai.responses.stream(**asked) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    last = events[-1]
    assert last.type == f"response.{response.status}" and last.response.output_text == text
    assert response.usage and response.usage.output_tokens > 1


def test_responses_refuse_what_they_cannot_do_by_its_field(openai: OpenAI) -> None:
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"input": "Hello", "previous_response_id": "resp_1"}, "previous_response_id", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", "invalid_value"),
        ({"input": "fox " * 9_000}, "input", "context_length_exceeded"),
    ]
    for body, param, code in refused:
        with pytest.raises(OpenAIBadRequest) as caught:
            openai.responses.create(model="demo", **body)
        assert (caught.value.param, caught.value.code) == (param, code)
    with pytest.raises(OpenAINotFound) as unknown:
        openai.responses.create(model="gpt", input="Hello")
    assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("path", "whole", "event", "error"),
    [
        ("/v1/messages", "AnthropicMessage", "MessageEvent", "AnthropicError"),
        ("/v1/responses", "ResponseObject", "ResponseEvent", "Error"),
    ],
)
def test_real_answers_are_as_the_openapi_document_says(url: str, path: str, whole: str, event: str, error: str) -> None:
    turns = [{"role": "user", "content": "Hello"}]
    body: dict[str, Any] = {"messages": turns, "max_tokens": 4}
    if path == "/v1/responses":
        body = {"input": turns, "max_output_tokens": 4}
    with httpx2.Client(base_url=url, headers=OWN, timeout=60.0) as client:
        document = client.get("/openapi.json").json()
        told = client.post(path, json=body).json()
        lines = client.post(path, json=body | {"stream": True}).text.splitlines()
        refused = client.post(path, json={}).json()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(events) > 5
    for kind, answer in ((whole, told), (error, refused), *((event, each) for each in events)):
        assert not breaches(answer, document["components"]["schemas"][kind], document), answer
