"""`brigade serve` as the official clients of Anthropic and OpenAI see it, by the shapes beside chat completions."""

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from anthropic import Anthropic, AuthenticationError, BadRequestError, NotFoundError
from anthropic.types import MessageParam
from openai import BadRequestError as OpenAIBadRequest
from openai import NotFoundError as OpenAINotFound
from openai import OpenAI

from tests.cluster.processes import START_S, Starter

KEY = "a-key-of-these-tests"
SYSTEM = "Be brief."
TURNS = [("user", "Hello"), ("assistant", "Hello!"), ("user", "Tell me a story about a fox.")]
MESSAGES: list[MessageParam] = [
    {"role": "user" if who == "user" else "assistant", "content": text} for who, text in TURNS
]
GREEDY = {"temperature": 0.0}


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


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_body_that_is_too_large_is_refused_by_anthropics_type_before_it_comes(url: str, path: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=START_S)
    connection.putrequest("POST", path)
    for name, value in {"x-api-key": KEY, "content-type": "application/json", "content-length": str(2**30)}.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    error = json.loads(response.read())
    connection.close()
    assert (response.status, error["type"], error["error"]["type"]) == (413, "error", "request_too_large")


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
