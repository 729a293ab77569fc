"""What a client makes of servers that answer otherwise than ours."""

import asyncio
import io
import json
import re
import ssl
import time
from functools import partialmethod
from pathlib import Path
from typing import Any

import httpx2
import pytest
from rich.console import Console

from coordinator.api.errors import http_error
from coordinator.cli import status
from coordinator.cli.eval import read_answer
from coordinator.cli.flags import ServerFlags
from coordinator.cli.remote import (
    NothingAnswers,
    RemoteServer,
    ServerBusy,
    answer_as_json,
    no_answer,
    open_server,
    unauthorised,
)
from coordinator.sessions.output import Answer, Output, Usage
from tests.unit.cli.conftest import Command
from worker.errors import BrigadeError, ContextExceeded, InputError, ServerFailed

TEXT = {"choices": [{"text": "Hi"}]}
END = {"choices": [{"text": "", "finish_reason": "stop"}]}
DONE = "data: [DONE]\n\n"
STREAM = {"Content-Type": "text/event-stream"}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


def outputs_of(
    *events: Any, status: int = 200, data: str = "data: ", end: str = "\n", headers: dict[str, str] | None = None
) -> list[Output]:
    """The outputs of a server that streams these events, or of one that answers with a status and the only event."""
    given = [json.dumps(event, ensure_ascii=False) for event in events]
    lines = [f"{data}{each}{2 * end}" for each in (*given, "[DONE]")]
    body = "".join(lines) if status == 200 else json.dumps(events[0])
    told = STREAM | (headers or {})
    transport = httpx2.MockTransport(lambda request: httpx2.Response(status, content=body.encode(), headers=told))

    async def ask() -> list[Output]:
        async with httpx2.AsyncClient(transport=transport, base_url="http://other/v1") as client:
            return [output async for output in RemoteServer(client, "http://other", "m").generate("a", {})]

    return asyncio.run(ask())


def test_an_answer_is_its_text_and_usage() -> None:
    *texts, last = outputs_of(TEXT, END, {"choices": None, "error": None}, USAGE)
    assert [output.content for output in texts] == ["Hi"] and last.finish_reason == "stop"
    assert last.usage and (last.usage.num_prompt, last.usage.num_generated) == (3, 1)


def test_a_server_that_tells_no_usage_is_timed_all_the_same() -> None:
    before = time.monotonic_ns()
    *_, last = outputs_of(TEXT, END)
    assert last.usage and before <= last.usage.started <= last.at and last.usage.num_prompt == 0


@pytest.mark.parametrize(("data", "end"), [("data: ", "\n"), ("data:", "\r\n")])
def test_the_lines_of_a_stream_end_where_its_format_says(data: str, end: str) -> None:
    said = "a\u2028b\x85c\x0b"
    first, last = outputs_of({"choices": [{"text": said}]}, END, USAGE, data=data, end=end)
    assert first.content == said and last.finish_reason == "stop"


def test_the_speed_leaves_out_the_tokens_of_the_first_text() -> None:
    for lengths, speed in (([30, 10, 10], 8 / 2), ([50], None), ([], None)):
        answer = Answer()
        for number, length in enumerate(lengths, 1):
            answer.add(Output("", (), number * 10**9, content="a" * length))
        answer.add(Output("", (), 3 * 10**9, "stop", Usage(3, 0, 0, 5, 5, num_generated=20)))
        assert answer_as_json(answer)["stats"]["tokens_per_s"] == speed


def test_errors_in_the_stream_are_raised_as_the_servers_failure() -> None:
    for error in ("out of memory", {"message": "out of memory"}, {"detail": "out of memory"}):
        with pytest.raises(ServerFailed, match="out of memory"):
            outputs_of(TEXT, {"error": error})
    for usage in (
        {"completion_tokens": 1}, {"prompt_tokens": 3}, {"prompt_tokens": None, "completion_tokens": 1}, [3, 1], "4",
        {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": 1},
    ):  # fmt: skip
        with pytest.raises(ServerFailed, match="expected prompt_tokens and completion_tokens"):
            outputs_of(TEXT, END, {"choices": [], "usage": usage})


def test_a_refusal_is_raised_as_its_text() -> None:
    for code, kind in ((400, InputError), (404, InputError), (500, ServerFailed)):
        for error in ("no such model", {"message": "no such model", "param": None}):
            with pytest.raises(kind, match="no such model"):
                outputs_of({"error": error}, status=code)
    with pytest.raises(ServerFailed, match="status 502"):
        outputs_of("gateway", status=502)
    with pytest.raises(ContextExceeded, match=r"^messages: too long"):
        outputs_of({"error": http_error(ContextExceeded("messages", "too long")).to_openai()["error"]}, status=400)


def test_a_server_that_has_ended_since_it_told_its_model_is_to_be_started() -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("All connection attempts failed")

    async def ask() -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(refuse), base_url="http://other/v1") as client:
            server = RemoteServer(client, "http://other", "m")
            for asked in (anext(server.generate("a", {})), server.score("a", ["b"])):
                with pytest.raises(NothingAnswers, match=r"^nothing answers at http://other .*`brigade serve`$"):
                    await asked

    asyncio.run(ask())


def test_a_question_is_asked_again_while_the_server_has_no_room() -> None:
    waits = iter(("0", "soon", None))
    began = time.monotonic()

    def answer(request: httpx2.Request) -> httpx2.Response:
        if (wait := next(waits)) is not None:
            return httpx2.Response(429, text='{"error": "too many"}', headers={"Retry-After": wait})
        events = "".join(f"data: {json.dumps(event)}\n\n" for event in (TEXT, END, USAGE)) + DONE
        return httpx2.Response(200, content=events.encode(), headers=STREAM)

    async def ask() -> str:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://other/v1") as client:
            return (await read_answer(lambda: RemoteServer(client, "http://other", "m").generate("a", {}))).text

    assert asyncio.run(ask()) == "Hi"
    assert 0.9 < time.monotonic() - began < 10  # a wait that is no number counts as a second


def test_a_busy_server_is_not_waited_for_at_length() -> None:
    for said, waits_s in (("7", 7.0), ("99999", 60.0)):
        with pytest.raises(ServerBusy) as raised:
            outputs_of({"error": "too many"}, status=429, headers={"Retry-After": said})
        assert raised.value.retry_s == waits_s


def test_a_refusal_of_the_server_is_told_and_no_status_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"error": {"message": "expected a Host that this server is known by"}}
    answers: dict[str, Any] = {"json": said}
    transport = httpx2.MockTransport(lambda request: httpx2.Response(403, **answers))
    for client in (httpx2.AsyncClient, httpx2.Client):
        monkeypatch.setattr(client, "__init__", partialmethod(client.__init__, transport=transport))

    async def opened() -> None:
        async with open_server(ServerFlags("http://other:9338")):
            pytest.fail("it is refused")

    for ask in (lambda: asyncio.run(opened()), lambda: status.ask_server("http://other:9338", None)):
        answers["json"] = said
        with pytest.raises(
            BrigadeError, match=r"with (HTTP )?status 403: expected a Host that this server is known by$"
        ):
            ask()
        answers["json"] = {"detail": "no"}
        with pytest.raises(BrigadeError, match=r"but not as|expected `brigade serve` there"):
            ask()


def test_a_refused_key_is_told_from_none() -> None:
    assert "wants a key" in unauthorised("http://other", None).message
    assert "refuses the key" in unauthorised("http://other", "wrongwrong").message


def test_text_that_is_no_utf8_is_for_the_server_to_refuse() -> None:
    sent: list[bytes] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.content)
        return httpx2.Response(400, json={"error": {"message": "stop: expected UTF-8 text", "param": "stop"}})

    async def ask() -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://other/v1") as client:
            async for _ in RemoteServer(client, "http://other", "m").generate("a", {"stop": ["\udcff"]}):
                pass

    with pytest.raises(InputError, match=r"^stop: expected UTF-8 text$"):
        asyncio.run(ask())
    assert b'"\\udcff"' in sent[0]


def test_a_host_name_that_cannot_be_is_not_taken_for_another_program() -> None:
    with pytest.raises(ServerFailed, match=r"^nothing answers at http://a\.\.b:1 "):
        status.ask_server("http://a..b:1", None)


def test_a_server_of_plain_http_is_told_from_none() -> None:
    incoming = ssl.MemoryBIO()
    incoming.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ssl.SSLError) as refused:
        ssl.create_default_context().wrap_bio(incoming, ssl.MemoryBIO(), server_hostname="other").do_handshake()
    error = httpx2.ConnectError("no")
    error.__cause__ = refused.value
    for path in ("", "/v1"):
        told = no_answer(f"https://other:1{path}", error)
        assert told.message == f"https://other:1{path} answers, but does not speak TLS: try http://other:1{path}"
        assert not isinstance(told, NothingAnswers)


READY = {"standing": {"state": "ready", "why": ""}, "nodes": []}
LOST = NothingAnswers("nothing answers")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What a server says, one after the other, to `status` in an empty folder."""
    answers: list[Any] = []

    def ask(server: str, key: str | None) -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    async def ask_workers(config: Path) -> Any:
        return {"standing": {"state": "no server", "why": f"those of {config.name}"}, "nodes": []}

    monkeypatch.setattr(status, "ask_server", ask)
    monkeypatch.setattr(status, "ask_workers", ask_workers)
    monkeypatch.setattr(status, "EVERY_S", 0.0)
    monkeypatch.chdir(tmp_path)
    return answers


@pytest.mark.parametrize(("config", "meanwhile"), [("", "lost"), ("insecure: true", "asked directly")])
def test_a_server_that_is_watched_may_restart(
    answers: list[Any], config: str, meanwhile: str, brigade: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """The workers of this folder's cluster.yaml are shown meanwhile."""
    if config:
        Path("cluster.yaml").write_text(config)
    answers += [READY, LOST, READY, InputError("server", "enough")]
    with pytest.raises(InputError, match="enough"):
        brigade("status", "--watch")
    assert re.findall("ready|lost|asked directly", capsys.readouterr().out) == ["ready", meanwhile, "ready"]


def test_a_watched_status_keeps_its_heading_on_a_low_terminal(
    answers: list[Any], brigade: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, height=6, color_system=None)
    monkeypatch.setattr(status, "plain_console", lambda: console)
    nodes = [{"name": name, "state": "idle"} for name in ("max", "mini", "air")]
    answers += [READY | {"nodes": nodes}, InputError("server", "enough")]
    with pytest.raises(InputError, match="enough"):
        brigade("status", "--watch")
    shown = screen.getvalue()
    assert "ready" in shown and "mini" in shown and "air" not in shown
    assert shown.count("\n") == 5, "the cursor stands in the last line, and nothing has scrolled"


def test_workers_are_asked_where_their_file_is_named(
    answers: list[Any], brigade: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("cluster.yaml").write_text("insecure: true")
    brigade("status", "--config", "cluster.yaml")
    told = capsys.readouterr().out
    assert "workers, asked directly (those of cluster.yaml)" in told and "no server" not in told
    answers.append(LOST)
    with pytest.raises(NothingAnswers):
        brigade("status", "--server", "http://here", "--watch")


def test_the_key_is_of_a_file_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brigade: Command) -> None:
    brought: list[Any] = []
    monkeypatch.setattr(status, "ask_server", lambda server, key: brought.append(key) or {})
    monkeypatch.setenv("BRIGADE_API_KEY", "key-of-alice")
    path = tmp_path / "keys"
    path.write_text("bob key-of-bob\n")
    brigade("status", "--api-key-file", str(path), "--json")
    brigade("status", "--json")
    assert brought == ["key-of-bob", "key-of-alice"]
