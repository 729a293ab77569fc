"""`brigade serve` as a process, asked by OpenAI's own client: a worker is killed, clients leave, and it ends."""

import contextlib
import json
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.cluster.commands import answer_here
from tests.cluster.processes import START_S, Starter
from tests.cluster.servers import Server, start_server
from tests.schemas import breaches

HELLO: Any = [{"role": "user", "content": "hello"}]
SAMPLED: Any = {"temperature": 0.8, "seed": 5, "max_tokens": 24}
LONG: Any = {"temperature": 0.8, "seed": 5, "max_tokens": 150, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(module_start: Starter, talker: Path) -> Server:
    return start_server(module_start, talker, "--local", "1", "--rejoin-timeout", "50")


@pytest.fixture(scope="module")
def workers(module_start: Starter, server: Server) -> list[psutil.Process]:
    """Those of its child processes that do not render chat templates."""
    return [child for child in module_start.children(server.running, 2) if "worker-1" in child.cmdline()]


@pytest.fixture(scope="module")
def answer(talker: Path) -> dict[str, Any]:
    """What `generate` makes of the same conversation in one process."""
    flags = ("--temp", "0.8", "--seed", "5", "--max-tokens", "24", "--logprobs", "2")
    return answer_here("--model", talker, "--local", "0", "--prompt", "hello", *flags)


def test_a_chat_is_answered_with_the_tokens_of_generate(server: Server, answer: dict[str, Any]) -> None:
    create: Any = partial(server.client.chat.completions.create, model="talker", messages=HELLO, **SAMPLED)
    found = create(logprobs=True, top_logprobs=2)
    [choice] = found.choices
    assert (choice.message.content, choice.finish_reason) == (answer["text"], answer["finish_reason"])
    assert found.usage.prompt_tokens == answer["prompt_tokens"]
    assert found.usage.completion_tokens == len(answer["tokens"])
    told = [[other.logprob for other in token.top_logprobs] for token in choice.logprobs.content]
    assert told == [[logprob for _, logprob in token["top"]] for token in answer["logprobs"]]
    first, *chunks, end, last = create(stream=True, stream_options={"include_usage": True})
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in (first, *chunks, end)) == answer["text"]
    assert end.choices[0].finish_reason == answer["finish_reason"]
    assert not last.choices and last.usage.completion_tokens == len(answer["tokens"])
    texts = [choice.message.content for choice in create(n=3).choices]  # with seeds that count up
    assert texts[0] == answer["text"] and len(set(texts)) == 3
    [alone] = server.client.chat.completions.create(model="talker", messages=HELLO, **SAMPLED | {"seed": 7}).choices
    assert texts[2] == alone.message.content
    stop = answer["text"][5:8]
    [stopped] = create(stop=[stop]).choices
    assert (stopped.message.content, stopped.finish_reason) == (answer["text"].partition(stop)[0], "stop")


def test_the_second_turn_reuses_the_first(server: Server) -> None:
    talk = [{"role": "user", "content": "a conversation that goes on for a while, so that it is worth reusing"}]
    first = server.client.chat.completions.create(model="talker", messages=talk, max_tokens=8)  # type: ignore[arg-type]
    talk += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "and then?"},
    ]
    second = server.client.chat.completions.create(model="talker", messages=talk, max_tokens=8)  # type: ignore[arg-type]
    assert first.usage and second.usage and second.usage.prompt_tokens_details
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached >= 0.9 * first.usage.prompt_tokens


def test_raw_completions_of_texts_and_ids_run_at_once(server: Server, talker: Path) -> None:
    own = answer_here(
        "--model", talker, "--prompt", "the quick", "--raw", "--local", "0", "--max-tokens", "6", "--logprobs", "1"
    )  # fmt: skip
    create: Any = partial(server.client.completions.create, model="talker", max_tokens=6)
    ids = server.post("/tokenize", prompt="the quick").json()["tokens"]
    found = create(prompt=["the quick", "dog"], n=2, logprobs=1)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in found.choices[:2]] == [own["text"]] * 2
    assert found.usage.completion_tokens == 24
    [by_ids] = create(prompt=[ids], logprobs=1).choices
    assert by_ids.text == own["text"]
    assert by_ids.logprobs.token_logprobs == [token["logprob"] for token in own["logprobs"]]
    offsets = by_ids.logprobs.text_offset
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(by_ids.text)
    streamed = create(prompt="the quick", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "the quick" + own["text"]
    assert create(prompt="the quick", echo=True).choices[0].text == "the quick" + own["text"]


def test_tokens_come_back_as_the_text_that_they_were_made_of(server: Server) -> None:
    found = server.post("/tokenize", prompt="Zürich, 😀 and the dog", return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 40_000
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "Zürich, 😀 and the dog"}
    chat = server.post("/tokenize", messages=HELLO).json()
    asked = server.client.chat.completions.create(model="talker", messages=HELLO, max_tokens=1)
    assert asked.usage and asked.usage.prompt_tokens == chat["count"]


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_are_refused_with_their_field_and_code(server: Server, stream: bool) -> None:
    refused: list[tuple[str, dict[str, Any], int, str | None, str]] = [
        ("chat/completions", {"messages": HELLO, "temperature": -1}, 400, "temperature", "invalid_value"),
        ("chat/completions", {"messages": HELLO, "model": "gpt"}, 404, None, "model_not_found"),
        ("completions", {"prompt": [5] * 40_000}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": [10**6]}, 400, "prompt", "invalid_value"),
        ("nothing", {}, 404, None, "not_found"),
        ("models", {}, 405, None, "method_not_allowed"),
    ]
    for path, body, status, param, code in refused:
        found = server.post(f"/v1/{path}", **body, stream=stream)
        error = found.json()["error"]
        assert (found.status_code, error["param"], error["code"]) == (status, param, code)
        assert found.headers["x-should-retry"] == "false" and found.headers["x-request-id"].startswith("req_")


def test_real_answers_are_as_the_openapi_document_says(server: Server) -> None:
    document = server.get("/openapi.json").json()
    chat = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 1, "n": 2}
    text = {"prompt": ["the", "dog"], "max_tokens": 2, "logprobs": 1, "brigade": {"waterfall": True}}
    answers = {
        "ChatCompletion": server.post("/v1/chat/completions", **chat).json(),
        "Completion": server.post("/v1/completions", **text).json(),
        "ModelList": server.get("/v1/models").json(),
        "ModelCard": server.get("/v1/models/talker").json(),
        "Health": server.get("/health?deep=1").json(),
        "Versions": server.get("/version").json(),
        "Tokenized": server.post("/tokenize", prompt="the").json(),
        "Detokenized": server.post("/detokenize", tokens=[5]).json(),
        "Error": server.post("/v1/completions", prompt="", n=0).json(),
    }
    for name, answer in answers.items():
        assert not breaches(answer, document["components"]["schemas"][name], document), (name, answer)
    for path, body, name in (
        ("/v1/chat/completions", chat, "ChatCompletionChunk"),
        ("/v1/completions", text, "Completion"),
    ):
        events = server.post(path, **body, stream=True, stream_options={"include_usage": True}).text
        told = [line.removeprefix("data: ") for line in events.splitlines() if line]
        assert told.pop() == "[DONE]" and len(told) > 4
        for event in map(json.loads, told):
            assert not breaches(event, document["components"]["schemas"][name], document), event


def test_a_client_that_leaves_frees_its_slot_on_every_stage(server: Server, workers: list[psutil.Process]) -> None:
    def held() -> list[int]:
        return [server.status(worker).slots for worker in workers]

    # what a test before this one left may still be on its way off the stages
    wait_until(lambda: not server.get("/cluster").json()["requests"] and len(set(held())) == 1)
    before = held()
    for body in (LONG, LONG | {"n": 3}):
        stream = server.client.chat.completions.create(
            model="talker", messages=HELLO, stream=True, **body | {"max_tokens": 20_000}
        )
        next(chunk for chunk in stream if chunk.choices[0].delta.content)  # the first one only tells the role
        assert held() > before
        stream.close()
        wait_until(lambda: held() == before)
    with contextlib.closing(connect(server, "/v1/completions", prompt="a", max_tokens=20_000, ignore_eos=True)):
        wait_until(lambda: held() != before)
    wait_until(lambda: held() == before)


def test_a_reader_who_does_not_read_does_not_hold_up_another(server: Server, answer: dict[str, Any]) -> None:
    def all_run() -> bool:
        asked = server.get("/cluster").json()["requests"]
        return len(asked) == 4 and all(each["generated"] for each in asked)

    endless = {"prompt": "a", "max_tokens": 20_000, "ignore_eos": True, "stream": True, "n": 4, "logprobs": 20}
    with contextlib.closing(connect(server, "/v1/completions", **endless)):
        wait_until(all_run)
        found = server.client.chat.completions.create(model="talker", messages=HELLO, **SAMPLED)
        assert found.choices[0].message.content == answer["text"]
        assert all_run()


def test_a_stream_outlives_a_worker_that_is_killed(server: Server, workers: list[psutil.Process]) -> None:
    expected = server.client.chat.completions.create(model="talker", messages=HELLO, **LONG).choices[0].message.content
    stream = server.client.chat.completions.create(
        model="talker", messages=HELLO, stream=True, stream_options={"include_usage": True}, **LONG
    )
    text, figures = "", {}
    for chunk in stream:
        if text == "" and workers[0].is_running():
            workers[0].kill()
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        figures = (chunk.model_extra or {}).get("brigade") or figures
    assert text == expected
    assert figures["recoveries"] == 1
    assert server.get("/health").json() == {"status": "ready", "why": ""}


def test_a_server_told_to_end_waits_for_streams_and_keeps_its_port_open(server: Server) -> None:
    endless, finite = (
        server.client.chat.completions.create(
            model="talker", messages=HELLO, stream=True, **LONG | {"max_tokens": most}
        )
        for most in (30_000, 150)
    )
    next(iter(endless))
    server.running.process.terminate()
    server.running.err.wait_match("stopping: answers in progress may end", START_S)
    health = server.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining") and "retry-after" in health.headers
    with pytest.raises(openai.InternalServerError, match="draining"):
        server.client.chat.completions.create(model="talker", messages=HELLO)
    assert [chunk.choices[0].finish_reason for chunk in finite][-1] == "length"
    endless.close()
    outcome = server.running.wait()
    assert outcome.code == 0 and "Traceback" not in outcome.err and outcome.out == ""


def connect(server: Server, path: str, **body: Any) -> socket.socket:
    """Send a request whose answer is not read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection.sendall(f"{head}\r\n\r\n{content}".encode())
    return connection


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
