import asyncio
import contextlib
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
from tests.unit.api.fakes import served
from tests.unit.virtual_time import VirtualTime
from worker.errors import StageLost

LIVES = b": still at it\n\n"
A, B = b"data: a\n\n", b"data: b\n\n"


def tell(error: HttpError) -> list[Event]:
    return [error.to_openai()]


@dataclass
class Events:
    """Events of a stream, that knows whether it was closed."""

    source: Callable[[], AsyncGenerator[Event, None]]
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self) -> AsyncGenerator[Event, None]:
        try:
            async for event in self.source():
                yield event
        finally:
            self.closed.set()


async def sent(events: Events, shared: Server, left: asyncio.Event) -> list[bytes]:
    """The bodies that are sent until the client has left."""
    app, bodies = Starlette(), list[bytes]()
    app.state.server = shared

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    request = Request({"type": "http", "app": app, "headers": []}, receive)
    response = await event_stream(request, events(), tell)
    await response(request.scope, receive, send)
    return [body for body in bodies if body]


def run(source: Callable[[], AsyncGenerator[Event, None]], **more: Any) -> tuple[list[bytes], bool]:
    events, clock = Events(source), VirtualTime()
    try:
        return clock.run(sent(events, served(**more), asyncio.Event())), events.closed.is_set()
    finally:
        clock.close()


def failing(error: Exception) -> Callable[[], AsyncGenerator[Event, None]]:
    async def events() -> AsyncGenerator[Event, None]:
        yield "a"
        raise error

    return events


def test_a_stream_says_that_it_lives_while_it_has_nothing_to_say() -> None:
    async def slow() -> AsyncGenerator[Event, None]:
        await asyncio.sleep(25)
        yield "a"
        await asyncio.sleep(35)
        yield "b"

    assert run(slow, heartbeat_s=10) == ([LIVES, A, LIVES, LIVES, LIVES, B], True)


@pytest.mark.parametrize(("begun_at_s", "headers_at_s"), [(0, 10), (25, 25), (999, 70)])
def test_headers_go_once_the_request_has_begun(begun_at_s: float, headers_at_s: float) -> None:
    clock = VirtualTime()

    async def late() -> AsyncGenerator[Event, None]:
        await asyncio.sleep(200)
        yield "a"

    async def headers() -> float:
        app, begin = Starlette(), clock.now
        app.state.server = served(heartbeat_s=10)
        request = Request({"type": "http", "app": app, "headers": []}, asyncio.Event().wait)  # type: ignore[arg-type]
        source = late()
        response = await event_stream(request, source, tell, lambda: clock.now - begin < begun_at_s)
        took_s = clock.now - begin
        response.upcoming.cancel()
        await asyncio.gather(response.upcoming, return_exceptions=True)
        return took_s

    with contextlib.closing(clock):
        assert clock.run(headers()) == pytest.approx(headers_at_s, abs=1)


def test_a_failure_in_the_middle_is_the_last_event_and_a_bug_is_logged_too(capsys: pytest.CaptureFixture[str]) -> None:
    for error, code in (
        (StageLost("gone", node="mini"), "cluster_failed"), (ZeroDivisionError("secret"), "internal_error"),
    ):  # fmt: skip
        assert not capsys.readouterr().err
        bodies, is_closed = run(failing(error))
        assert bodies[0] == A and len(bodies) == 2 and is_closed
        assert json.loads(bodies[1].removeprefix(b"data: "))["error"]["code"] == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("request: internal error: ZeroDivisionError at test_streams.py:") and "secret" not in line


async def test_a_client_that_leaves_ends_the_stream_that_makes_the_events() -> None:
    left, begun = asyncio.Event(), asyncio.Event()

    async def endless() -> AsyncGenerator[Event, None]:
        yield "a"
        begun.set()
        await asyncio.Event().wait()

    events = Events(endless)
    sending = asyncio.create_task(sent(events, served(), left))
    await begun.wait()
    left.set()
    await asyncio.wait([sending], timeout=10)
    assert sending.done() and events.closed.is_set(), "the answer goes on though its client has left"


async def test_a_reader_who_reads_nothing_is_cut_off_and_has_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "UNREAD_S", 0.2)
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
                await events.closed.wait()
                num_said = said
                url = f"http://127.0.0.1:{place[1]}/"
                async with httpx2.AsyncClient() as other, other.stream("GET", url) as answer:
                    assert (await anext(answer.aiter_bytes())).startswith(b"data: " + b"x" * 1000)
    assert num_said < 20_000  # what the kernel's buffers take
