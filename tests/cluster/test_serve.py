"""`brigade serve` as a process and the official clients: all APIs, clients that leave, a killed worker, and its end."""

import contextlib
import json
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from anthropic import Anthropic

from tests.cluster.commands import answer_here
from tests.cluster.processes import START_S, Starter
from tests.cluster.servers import Server, start_server
from tests.schemas import breaches

HELLO: Any = [{"role": "user", "content": "hello"}]
SAMPLED: Any = {"temperature": 0.8, "seed": 5, "max_tokens": 24}
LONG: Any = {"temperature": 0.8, "seed": 5, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
OWN = ("--local", "0", "--logprobs", "2")


@pytest.fixture(scope="module")
def server(module_start: Starter, talker: Path) -> Server:
    return start_server(module_start, talker, "--local", "1", "--rejoin-timeout", "50")


@pytest.fixture(scope="module")
def workers(module_start: Starter, server: Server) -> list[psutil.Process]:
    """Those of its child processes that do not render chat templates."""
    return [child for child in module_start.children(server.running, 2) if "worker-1" in child.cmdline()]


@pytest.fixture(scope="module")
def chat(server: Server) -> Any:
    return partial(server.client.chat.completions.create, model="talker", messages=HELLO)


def test_a_chat_is_answered_with_the_tokens_of_generate(chat: Any, talker: Path) -> None:
    flags = ("--temp", "0.8", "--seed", "5", "--max-tokens", "24")
    answer = answer_here("--model", talker, "--prompt", "hello", *flags, *OWN)
    found = chat(**SAMPLED, logprobs=True, top_logprobs=2)
    [choice] = found.choices
    assert (choice.message.content, choice.finish_reason) == (answer["text"], answer["finish_reason"])
    assert found.usage.prompt_tokens == answer["prompt_tokens"]
    assert found.usage.completion_tokens == len(answer["tokens"])
    told = [[other.logprob for other in token.top_logprobs] for token in choice.logprobs.content]
    assert told == [[logprob for _, logprob in token["top"]] for token in answer["logprobs"]]
    first, *chunks, end, last = chat(**SAMPLED, stream=True, stream_options={"include_usage": True})
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in (first, *chunks, end)) == answer["text"]
    assert end.choices[0].finish_reason == answer["finish_reason"]
    assert not last.choices and last.usage.completion_tokens == len(answer["tokens"])
    texts = [choice.message.content for choice in chat(**SAMPLED, n=3).choices]  # with seeds that count up
    assert texts[0] == answer["text"] and len(set(texts)) == 3
    assert texts[2] == chat(**SAMPLED | {"seed": 7}).choices[0].message.content
    stop = answer["text"][5:8]
    [stopped] = chat(**SAMPLED, stop=[stop]).choices
    assert (stopped.message.content, stopped.finish_reason) == (answer["text"].partition(stop)[0], "stop")


def test_raw_completions_of_texts_and_ids_run_at_once(server: Server, talker: Path) -> None:
    own = answer_here("--model", talker, "--prompt", "the quick", "--raw", "--max-tokens", "6", *OWN)
    create: Any = partial(server.client.completions.create, model="talker", max_tokens=6)
    found = create(prompt=["the quick", "dog"], n=2, logprobs=1)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in found.choices[:2]] == [own["text"]] * 2
    assert found.usage.completion_tokens == 24
    ids = server.post("/tokenize", prompt="the quick").json()["tokens"]
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": "the quick"}
    [by_ids] = create(prompt=[ids], logprobs=1).choices
    assert by_ids.text == own["text"]
    assert by_ids.logprobs.token_logprobs == [token["logprob"] for token in own["logprobs"]]
    offsets = by_ids.logprobs.text_offset
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(by_ids.text)
    streamed = create(prompt="the quick", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "the quick" + own["text"]


def test_messages_and_responses_are_those_of_chat_completions_streamed_or_not(server: Server, chat: Any) -> None:
    greedy: Any = {"model": "talker", "extra_body": {"temperature": 0.0}}
    text = chat(temperature=0.0, max_tokens=20).choices[0].message.content
    with Anthropic(api_key="none", base_url=server.url, max_retries=0) as client:
        message = client.messages.create(**greedy, max_tokens=20, messages=HELLO)
        assert [block.to_dict() for block in message.content] == [{"type": "text", "text": text}]
        counted = client.messages.count_tokens(model="talker", messages=HELLO).input_tokens
        with client.messages.stream(**greedy, max_tokens=20, messages=HELLO) as stream:
            assert "".join(stream.text_stream) == text
            for usage in (message.usage, stream.get_final_message().usage):
                assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted > 4
                assert usage.output_tokens > 1

        # Claude Code asks for `?beta=true`, with fields and headers that change nothing here, and for the models.
        cached: Any = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
        asked: Any = {"model": "talker", "system": [cached], "messages": HELLO, "thinking": {"type": "adaptive"}}
        asked |= {"betas": ["context-management-2025-06-27"], "context_management": {"edits": []}}
        beta = client.beta.messages.create(max_tokens=8, metadata={"user_id": "x"}, **asked)
        counted = client.beta.messages.count_tokens(**asked).input_tokens
        assert beta.usage.input_tokens + (beta.usage.cache_read_input_tokens or 0) == counted
        [card] = client.models.list(limit=1000)
        assert (card.id, client.models.retrieve("talker").created_at) == ("talker", card.created_at)

    asked = {"model": "talker", "input": HELLO, "temperature": 0, "max_output_tokens": 20}
    response = server.client.responses.create(store=True, **asked)
    assert response.output_text == text and response.to_dict()["store"] is False
    with server.client.responses.stream(**asked) as stream:
        events: list[Any] = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert (events[-1].type, events[-1].response.output_text) == (f"response.{response.status}", text)


def test_real_answers_are_as_the_openapi_document_says(server: Server) -> None:
    document = server.get("/openapi.json").json()
    chat = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 1, "n": 2}
    text = {"prompt": ["the", "dog"], "max_tokens": 2, "logprobs": 1, "brigade": {"waterfall": True}}
    message, response = {"messages": HELLO, "max_tokens": 4}, {"input": HELLO, "max_output_tokens": 4}
    usage = {"stream_options": {"include_usage": True}}
    answers: list[tuple[str, Any]] = [
        ("ModelList", server.get("/v1/models").json()),
        ("ModelCard", server.get("/v1/models/talker").json()),
        ("Health", server.get("/health?deep=1").json()),
        ("Versions", server.get("/version").json()),
        ("Tokenized", server.post("/tokenize", prompt="the").json()),
        ("Detokenized", server.post("/detokenize", tokens=[5]).json()),
    ]
    for path, body, whole, event, error in (
        ("chat/completions", chat, "ChatCompletion", "ChatCompletionChunk", "Error"),
        ("completions", text, "Completion", "Completion", "Error"),
        ("messages", message, "AnthropicMessage", "MessageEvent", "AnthropicError"),
        ("responses", response, "ResponseObject", "ResponseEvent", "Error"),
    ):
        answers += [(whole, server.post(f"/v1/{path}", **body).json()), (error, server.post(f"/v1/{path}").json())]
        lines = server.post(f"/v1/{path}", **body, stream=True, **(usage if "comp" in path else {})).text.splitlines()
        events = [(event, json.loads(line[6:])) for line in lines if line.startswith("data: {")]
        assert len(events) > 4
        answers += events
    for name, answer in answers:
        assert not breaches(answer, document["components"]["schemas"][name], document), (name, answer)


def test_a_client_that_leaves_ends_its_requests(server: Server, chat: Any) -> None:
    def running() -> int:
        return len(server.get("/cluster").json()["requests"])

    wait_until(lambda: not running())  # of a test before this one
    for num_answers in (1, 3):
        stream = chat(stream=True, n=num_answers, **LONG | {"max_tokens": 20_000})
        next(chunk for chunk in stream if chunk.choices[0].delta.content)  # the first one only tells the role
        assert running() == num_answers
        stream.close()
        wait_until(lambda: not running())
    body = json.dumps({"prompt": "a", "max_tokens": 20_000, "ignore_eos": True})  # an answer that is not streamed
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.closing(socket.create_connection((host, int(port)))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json"
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(running)
    wait_until(lambda: not running())


def test_a_stream_outlives_a_worker_that_is_killed(server: Server, chat: Any, workers: list[psutil.Process]) -> None:
    expected = chat(**LONG).choices[0].message.content
    text, figures = "", {}
    for number, chunk in enumerate(chat(stream=True, stream_options={"include_usage": True}, **LONG)):
        if number == 0:
            workers[0].kill()
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        figures = (chunk.model_extra or {}).get("brigade") or figures
    assert text == expected and figures["recoveries"] == 1
    assert server.get("/health").json() == {"status": "ready", "why": ""}


def test_a_server_told_to_end_waits_for_streams_and_keeps_its_port_open(server: Server, chat: Any) -> None:
    endless, finite = (chat(stream=True, **LONG | {"max_tokens": most}) for most in (30_000, 150))
    next(iter(endless))
    server.running.process.terminate()
    server.running.err.wait_match("stopping: answers in progress may end", START_S)
    health = server.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining") and "retry-after" in health.headers
    with pytest.raises(openai.InternalServerError, match="draining"):
        chat()
    assert [chunk.choices[0].finish_reason for chunk in finite][-1] == "length"
    endless.close()
    outcome = server.running.wait()
    assert outcome.code == 0 and "Traceback" not in outcome.err and outcome.out == ""


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
