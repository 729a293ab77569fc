import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.api import listen
from coordinator.api.errors import HttpError
from coordinator.api.listen import answering, listening_socket
from coordinator.api.server import Server
from coordinator.api.sse import Event, EventStream, event_stream
from tests.unit.api.servers import served
from tests.unit.virtual_time import VirtualTime
from worker.errors import QueueFull, StageLost

LIVES = b": still at it\n\n"
A, B = b"data: a\n\n", b"data: b\n\n"


def tell(error: HttpError) -> list[Event]:
    return [error.to_openai()]


@dataclass
class Events:
    """Says one thing after another, and knows whether it was closed."""

    source: Callable[[], AsyncGenerator[Event, None]]
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self) -> AsyncGenerator[Event, None]:
        try:
            async for event in self.source():
                yield event
        finally:
            self.closed.set()


async def reply_of(events: Events, request: Request) -> Response:
    return await event_stream(request, events(), tell)


def request_of(shared: Server, left: asyncio.Event) -> Request:
    app = Starlette()
    app.state.server = shared

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "app": app, "headers": []}, receive)


async def sent(response: Response, request: Request) -> list[bytes]:
    """The bodies that it sends."""
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    await response(request.scope, request.receive, send)
    return [body for body in bodies if body]


def run(source: Callable[[], AsyncGenerator[Event, None]], **more: Any) -> tuple[list[bytes], bool]:
    async def check() -> tuple[list[bytes], bool]:
        events, request = Events(source), request_of(served(**more), asyncio.Event())
        bodies = await sent(await reply_of(events, request), request)
        return bodies, events.closed.is_set()

    clock = VirtualTime()
    try:
        return clock.run(check())
    finally:
        clock.close()


def test_a_stream_says_that_it_lives_while_it_has_nothing_to_say() -> None:
    async def slow() -> AsyncGenerator[Event, None]:
        await asyncio.sleep(25)
        yield "a"
        await asyncio.sleep(35)
        yield "b"

    assert run(slow, heartbeat_s=10) == ([LIVES, A, LIVES, LIVES, LIVES, B], True)


def test_a_failure_in_the_middle_is_the_last_event() -> None:
    async def failing() -> AsyncGenerator[Event, None]:
        yield "a"
        raise StageLost("gone", node="mini")

    bodies, is_closed = run(failing)
    assert bodies[0] == A and len(bodies) == 2 and is_closed
    assert json.loads(bodies[1].removeprefix(b"data: "))["error"]["code"] == "cluster_failed"


def test_a_bug_in_the_middle_is_told_to_its_client_and_to_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    async def failing() -> AsyncGenerator[Event, None]:
        yield "a"
        raise ZeroDivisionError("secret")

    bodies, _ = run(failing)
    assert json.loads(bodies[1].removeprefix(b"data: "))["error"]["code"] == "internal_error"
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("request: internal error: ZeroDivisionError at test_streams.py:") and "secret" not in line


def test_what_may_happen_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    async def failing() -> AsyncGenerator[Event, None]:
        yield "a"
        raise StageLost("gone", node="mini")

    run(failing)
    assert not capsys.readouterr().err


def test_a_failure_before_anything_was_said_is_a_status_of_its_own() -> None:
    async def refused() -> AsyncGenerator[Event, None]:
        raise QueueFull("full")
        yield ""

    with pytest.raises(QueueFull):
        run(refused)


def test_a_client_that_leaves_ends_what_makes_the_events() -> None:
    async def check() -> None:
        left, begun = asyncio.Event(), asyncio.Event()

        async def endless() -> AsyncGenerator[Event, None]:
            yield "a"
            begun.set()
            await asyncio.Event().wait()

        events, request = Events(endless), request_of(served(), left)
        response = await reply_of(events, request)
        sending = asyncio.create_task(sent(response, request))
        await begun.wait()
        left.set()
        await sending
        assert events.closed.is_set()

    asyncio.run(check())


def test_a_reader_who_reads_nothing_is_cut_off_and_has_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_UNREAD_S", 0.2)

    async def check() -> None:
        said = 0

        async def endless() -> AsyncGenerator[Event, None]:
            nonlocal said
            while True:
                said += 1
                yield "x" * 1000

        events = Events(endless)

        async def reply(request: Request) -> Response:
            first = asyncio.ensure_future(anext(source := events()))
            return EventStream(request, source, first, tell)

        app = Starlette(routes=[Route("/", reply)])
        app.state.server = served()
        with listening_socket("127.0.0.1", 0) as listener:
            place = listener.getsockname()
            async with answering(app, listener, None):
                with socket.create_connection(place) as client:
                    client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                    async with asyncio.timeout(60):
                        await events.closed.wait()
                    num_said = said
                    url = f"http://127.0.0.1:{place[1]}/"
                    async with httpx2.AsyncClient() as other, other.stream("GET", url) as answer:
                        assert (await anext(answer.aiter_bytes())).startswith(b"data: " + b"x" * 1000)
        assert num_said < 20_000  # what the kernel's buffers take

    asyncio.run(check())
