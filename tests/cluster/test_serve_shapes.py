"""`brigade serve` as the official clients of Anthropic and OpenAI see it, by the shapes beside chat completions."""

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

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
MESSAGES: list[MessageParam] = [
    {"role": "user" if who == "user" else "assistant", "content": text} for who, text in TURNS
]
GREEDY = {"temperature": 0.0}
OWN = {"x-api-key": KEY}
SHAPES = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    },
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/v1/responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
}
IMAGES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    "/v1/messages": {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
    "/v1/responses": {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "auto"},
}
OF_ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    415: "invalid_request_error",
}  # fmt: skip


@pytest.fixture(scope="module")
def url(module_start: Starter, tmp_path_factory: pytest.TempPathFactory) -> str:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"tests {KEY}\n")
    server = module_start.brigade("serve", "--model", "demo", "--local", "1", "--port", "0", "--api-key-file", keys)
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
def client(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="module")
def text(openai: OpenAI) -> str:
    """What chat completions answer to the conversation."""
    said: Any = [{"role": "system", "content": SYSTEM}, *({"role": who, "content": said} for who, said in TURNS)]
    answer = openai.chat.completions.create(model="demo", messages=said, max_tokens=40, temperature=0.0)
    return str(answer.choices[0].message.content)


def test_a_message_says_what_chat_completions_say_and_its_prompt_is_as_long_as_counted(
    anthropic: Anthropic, text: str
) -> None:
    message = anthropic.messages.create(
        model="demo", max_tokens=40, system=SYSTEM, messages=MESSAGES, extra_body=GREEDY
    )
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": text}]
    counted = anthropic.messages.count_tokens(model="demo", system=SYSTEM, messages=MESSAGES).input_tokens
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted > 9


def test_a_streamed_message_is_the_same(anthropic: Anthropic, text: str) -> None:
    with anthropic.messages.stream(
        model="demo", max_tokens=40, system=[{"type": "text", "text": SYSTEM}], messages=MESSAGES, extra_body=GREEDY
    ) as stream:
        assert "".join(stream.text_stream) == text
        usage = stream.get_final_message().usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > 9 and usage.output_tokens > 1


def test_it_is_told_why_a_message_ended(anthropic: Anthropic, text: str) -> None:
    word = text.split()[2]

    def ended(**limits: Any) -> tuple[str | None, str | None, str]:
        body = {"model": "demo", "max_tokens": 40, "system": SYSTEM, "messages": MESSAGES, "extra_body": GREEDY}
        message = anthropic.messages.create(**(body | limits))
        return message.stop_reason, message.stop_sequence, "".join(block.to_dict()["text"] for block in message.content)

    assert ended(stop_sequences=["never said", word]) == ("stop_sequence", word, text[: text.index(word)])
    reason, stop, said = ended(max_tokens=2)
    assert (reason, stop) == ("max_tokens", None) and text.startswith(said)


def test_anthropics_errors_are_its_clients_own(anthropic: Anthropic, url: str) -> None:
    hello: list[MessageParam] = [{"role": "user", "content": "Hello"}]
    with pytest.raises(NotFoundError, match="'demo'") as unknown:
        anthropic.messages.create(model="claude", max_tokens=9, messages=hello)
    assert unknown.value.type == "not_found_error" and unknown.value.request_id
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(BadRequestError, match=r"messages\.0\.content\.0"):
        anthropic.messages.create(model="demo", max_tokens=9, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(BadRequestError, match="messages: expected less than") as too_long:
        anthropic.messages.create(model="demo", max_tokens=9, messages=[{"role": "user", "content": "fox " * 9_000}])
    assert too_long.value.type == "invalid_request_error"
    with pytest.raises(NotFoundError) as unrouted:
        anthropic.messages.batches.list()
    assert unrouted.value.type == "not_found_error"
    with (
        Anthropic(api_key="another-key", base_url=url, max_retries=0) as stranger,
        pytest.raises(AuthenticationError) as who,
    ):
        stranger.messages.create(model="demo", max_tokens=9, messages=hello)
    assert who.value.type == "authentication_error"


@pytest.mark.parametrize("path", [*SHAPES, "/v1/messages/count_tokens"])
def test_a_body_that_is_too_large_is_refused_before_it_comes(url: str, path: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=START_S)
    connection.putrequest("POST", path)
    for name, value in {"x-api-key": KEY, "content-type": "application/json", "content-length": str(2**30)}.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    error = json.loads(response.read())
    connection.close()
    require_error(path, response.status, error, 413, "request_too_large", None)


@pytest.mark.parametrize("path", SHAPES)
def test_no_key_another_model_and_another_type_are_refused(client: httpx2.Client, path: str) -> None:
    body = hello(path)
    for more, status, code in (
        ({"json": body, "headers": {}}, 401, "invalid_api_key"),
        ({"json": body, "headers": {"x-api-key": "another-key"}}, 401, "invalid_api_key"),
        ({"json": body | {"model": "gpt"}}, 404, "model_not_found"),
        (
            {"content": json.dumps(body), "headers": {"content-type": "text/plain", **OWN}},
            415,
            "unsupported_media_type",
        ),
    ):
        found = client.post(path, **({"headers": OWN} | more))  # type: ignore[arg-type]
        require_error(path, found.status_code, found.json(), status, code, None)
        assert found.headers["x-should-retry"] == "false" and found.headers["request-id"].startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", SHAPES)
def test_what_would_change_the_answer_and_is_not_done_is_refused_by_its_field(
    client: httpx2.Client, path: str, stream: bool
) -> None:
    place = "input" if path == "/v1/responses" else "messages"
    for more, param in (
        (hello(path, [IMAGES[path]]), place),
        (FORMATS[path] | {"decode": "diffusion-fast"}, "decode"),
        ({"guided_regex": "a*"}, "guided_regex"),
        ({"logit_bias": 5}, "logit_bias"),
        *([({"previous_response_id": "resp_1"}, "previous_response_id")] if path == "/v1/responses" else []),
    ):
        found = client.post(path, json=hello(path) | {"stream": stream} | more, headers=OWN)
        require_error(path, found.status_code, found.json(), 400, "invalid_value", param)


def test_a_prompt_is_counted_though_it_is_too_long(anthropic: Anthropic) -> None:
    long: list[MessageParam] = [{"role": "user", "content": "fox " * 9_000}]
    assert anthropic.messages.count_tokens(model="demo", messages=long).input_tokens > 9_000


def test_a_response_says_what_chat_completions_say(openai: OpenAI, text: str) -> None:
    items: Any = [{"role": who, "content": said} for who, said in TURNS]
    asked: Any = {"model": "demo", "instructions": SYSTEM, "input": items, "temperature": 0, "max_output_tokens": 40}
    response = openai.responses.create(store=True, **asked)
    assert response.output_text == text and response.to_dict()["store"] is False
    with openai.responses.stream(**asked) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    last = events[-1]
    assert last.type == f"response.{response.status}" and last.response.output_text == text
    assert response.usage and response.usage.output_tokens > 1


def test_responses_refuse_what_they_cannot_do_by_name(openai: OpenAI) -> None:
    with pytest.raises(OpenAIBadRequest) as stored:
        openai.responses.create(model="demo", input="Hello", previous_response_id="resp_1")
    assert stored.value.param == "previous_response_id"
    with pytest.raises(OpenAIBadRequest) as image:
        part: Any = {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "auto"}
        openai.responses.create(model="demo", input=[{"role": "user", "content": [part]}])
    assert image.value.param == "input.0.content.0.type"
    with pytest.raises(OpenAIBadRequest) as long:
        openai.responses.create(model="demo", input="fox " * 9_000)
    assert (long.value.param, long.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(OpenAINotFound) as unknown:
        openai.responses.create(model="gpt", input="Hello")
    assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("path", "whole", "event"),
    [("/v1/messages", "AnthropicMessage", "MessageEvent"), ("/v1/responses", "ResponseObject", "ResponseEvent")],
)
def test_real_answers_are_as_the_openapi_document_says(
    client: httpx2.Client, path: str, whole: str, event: str
) -> None:
    document = client.get("/openapi.json", headers=OWN).json()
    shapes = document["components"]["schemas"]
    said = client.post(path, json=hello(path), headers=OWN).json()
    assert not breaches(said, shapes[whole], document), said
    lines = client.post(path, json=hello(path, stream=True), headers=OWN).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(events) > 5
    for told in events:
        assert not breaches(told, shapes[event], document), told
    refused = client.post(path, json={}, headers=OWN).json()
    assert not breaches(refused, shapes["AnthropicError" if path == "/v1/messages" else "Error"], document)


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


def require_error(path: str, found: int, told: dict[str, Any], status: int, code: str, param: str | None) -> None:
    """As this shape tells errors."""
    assert found == status, told
    if path.startswith("/v1/messages"):
        assert (told["type"], told["error"]["type"]) == ("error", OF_ANTHROPIC[status]) and told["request_id"]
        assert param is None or told["error"]["message"].startswith(param)
    else:
        assert told["error"]["code"] == code
        assert (told["error"]["param"] or "").startswith(param or "") and (param or not told["error"]["param"])


def hello(path: str, content: Any = "Hello", **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": content}]
    return {"input": turns} | more if path == "/v1/responses" else {"messages": turns, "max_tokens": 4} | more
