"""Answers to requests: whole as JSON, or as a stream of server-sent events. All APIs use these functions."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from coordinator.api.errors import HttpError, JSONResponse, http_error
from coordinator.api.left_out import leave_out
from coordinator.api.server import Server
from coordinator.cluster.log import log
from coordinator.engine.caller import REQUEST_ID
from coordinator.engine.engine import Engine
from coordinator.engine.inputs import InputProcessor
from coordinator.sessions.output import Output
from coordinator.sessions.request import Request as EngineRequest
from worker.errors import BrigadeError, internal_error_kind
from worker.platform.tasks import cancel_all
from worker.platform.text import json_bytes

T = TypeVar("T")

Event = Mapping[str, Any] | str  # the data of a server-sent event: an object, or text as it stands
DONE = "[DONE]"  # the end of a stream in OpenAI's APIs
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_HEARTBEAT = b": still at it\n\n"
_AGAIN_S = 0.5  # after which a stream without an event asks again whether its request may be refused


class ApiAnswer(ABC):
    """The answer to one request in the form of one API. Built from the outputs of one or more engine requests."""

    is_stream = False
    is_traced = False  # its stats have a waterfall

    @abstractmethod
    async def prepare(self, inputs: InputProcessor) -> Sequence[EngineRequest]:
        """Return the requests whose outputs make the answer. Raises InputError with the API's names of fields."""

    @abstractmethod
    def events(self, index: int, output: Output) -> Iterator[Event]:
        """Yield the events of a request's next output."""

    def end(self) -> Iterator[Event]:
        """Yield the events after the last output."""
        yield DONE

    def failed(self, error: HttpError) -> Iterator[Event]:
        """Yield the last events of a stream that has failed."""
        yield error.to_openai()

    @abstractmethod
    def add(self, index: int, output: Output) -> None:
        """Take a request's next output for the whole answer."""

    @abstractmethod
    def whole(self) -> Mapping[str, Any]:
        """Return the answer as one object, once all outputs were added."""

    async def collect(self, engine: Engine, requests: Sequence[EngineRequest]) -> Mapping[str, Any]:
        """Return the answer as one object. Its parts are made as the outputs come: other streams go on in between."""
        async with aclosing(engine.generate_all(requests, traced=self.is_traced)) as outputs:
            async for index, output in outputs:
                self.add(index, output)
        return self.whole()


class ClientLeft(Exception):
    """The client has closed its connection."""


def encode(event: Event) -> bytes:
    """Return the bytes of an event. It is named by its `type` if it has one, as Anthropic and Open Responses want."""
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return name + b"data: " + json_bytes(event, separators=(",", ":")) + b"\n\n"


async def respond(request: Request, answer: ApiAnswer) -> Response:
    """Answer a request, whole or as a stream.

    Raises:
        ClientLeft: the client has left. And what `ApiAnswer.prepare`, `Server.wake_engine` and `Engine.generate` raise,
            as long as the answer may have a status of its own.
    """
    server: Server = request.app.state.server
    requests: Sequence[EngineRequest] = ()

    async def prepare() -> Engine:
        """Read the request, so that what it leaves out is known before the headers go; then wait for the engine."""
        nonlocal requests
        with server.stats.preparing():
            requests = await answer.prepare(server.inputs)
        for name in requests[0].not_enforced:
            leave_out(name)
        return await server.wake_engine()

    async def whole() -> Mapping[str, Any]:
        engine = await prepare()
        return await answer.collect(engine, requests)

    async def events() -> AsyncGenerator[Event, None]:
        engine = await prepare()
        async with aclosing(engine.generate_all(requests, traced=answer.is_traced)) as outputs:
            async for index, output in outputs:
                for event in answer.events(index, output):
                    yield event
        for event in answer.end():
            yield event

    def may_be_refused() -> bool:
        return not requests or (server.engine is not None and not server.engine.has_begun(requests))

    if not answer.is_stream:
        return JSONResponse(await unless_left(request, whole()))
    return await event_stream(request, events(), answer.failed, may_be_refused)


async def event_stream(
    request: Request,
    events: AsyncGenerator[Event, None],
    failed: Callable[[HttpError], Iterable[Event]],
    may_be_refused: Callable[[], bool] = lambda: False,
) -> "EventStream":
    """Return a response of these events. Raises ClientLeft, and what the first event raises if it comes soon.

    The first event is awaited for a heartbeat, and then for at most the queue's timeout while the request may be
    refused. It is not awaited longer: a model that is asleep may take minutes to load, and the heartbeats show that the
    server is alive.
    """
    limits = request.app.state.server.limits
    first = asyncio.ensure_future(anext(events))

    async def wait_first() -> None:
        end = asyncio.get_running_loop().time() + limits.heartbeat_s + limits.queue_timeout_s
        await asyncio.wait([first], timeout=limits.heartbeat_s)
        while not first.done() and may_be_refused() and (left_s := end - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait([first], timeout=min(left_s, limits.heartbeat_s, _AGAIN_S))

    try:
        await unless_left(request, wait_first())
        if first.done():
            first.result()
    except BaseException:
        await _close(events, first)
        raise
    return EventStream(request, events, first, failed)


class EventStream(StreamingResponse):
    """Sends events until they end, fail, or the client has left; then closes their source."""

    def __init__(
        self,
        request: Request,
        events: AsyncGenerator[Event, None],
        upcoming: "asyncio.Future[Event]",
        failed: Callable[[HttpError], Iterable[Event]],
    ) -> None:
        """`upcoming` is the first event, which may not be there yet; `failed` makes the last events of a failure."""
        self._pieces = self._with_heartbeats(request.app.state.server.limits.heartbeat_s)
        super().__init__(self._pieces, media_type="text/event-stream", headers=_HEADERS)
        self._request = request
        self._events = events
        self.upcoming = upcoming
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(self._request, self.stream_response(send))
        except ClientLeft:
            pass
        finally:
            await self._pieces.aclose()
            await _close(self._events, self.upcoming)

    async def _with_heartbeats(self, heartbeat_s: float) -> AsyncGenerator[bytes, None]:
        while True:
            done, _ = await asyncio.wait([self.upcoming], timeout=heartbeat_s)
            if not done:
                yield _HEARTBEAT
                continue
            try:
                event = self.upcoming.result()
            except StopAsyncIteration:
                return
            except Exception as error:  # the status is sent already: no handler of the application will see it
                if not isinstance(error, BrigadeError | HttpError):
                    request_id = REQUEST_ID.get()  # the client gets the error; log it too, since it is a bug
                    message = f"{request_id or 'request'}: {internal_error_kind(error)}"
                    log("bug", message, level="error", request_id=request_id or None)
                for last in self._failed(http_error(error)):
                    yield encode(last)
                return
            yield encode(event)
            self.upcoming = asyncio.ensure_future(anext(self._events))


async def _close(events: AsyncGenerator[Event, None], upcoming: "asyncio.Future[Event]") -> None:
    await cancel_all(upcoming)
    await events.aclose()


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client leaves meanwhile, cancel it and raise ClientLeft."""

    async def wait_left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        raise ClientLeft

    return await unless(wait_left(), work)


async def unless(failing: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If `failing` raises first, cancel the work and raise that error."""
    tasks = working, other = asyncio.ensure_future(work), asyncio.ensure_future(failing)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            other.result()
        return working.result()
    finally:
        await cancel_all(*tasks)
