"""Answers to requests: at once as JSON, or as a stream of server-sent events. All APIs go this way."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from coordinator.api.errors import HttpError, JSONResponse, Refusal, http_error
from coordinator.api.server import Server
from coordinator.cluster.log import log
from coordinator.engine.engine import Engine, collect
from coordinator.engine.stats import REQUEST_ID
from coordinator.sessions.output import Output
from coordinator.sessions.request import Request as EngineRequest
from worker.errors import BrigadeError, InputError, internal_error_kind
from worker.platform.text import json_bytes

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"  # the end of a stream, as OpenAI's clients know it
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_HEARTBEAT = b": still at it\n\n"


class Answer(Protocol):
    """One request's answer in the form of an API."""

    async def prepare(self, engine: Engine) -> Sequence[EngineRequest]:
        """Return the requests whose outputs make the answer. Raises InputError for the API's own fields."""
        ...

    def events(self, index: int, output: Output) -> Iterable[bytes]:
        """Return the events of the next output of a request."""
        ...

    def end(self) -> Iterable[bytes]:
        """Return the events after the last output."""
        ...

    def failed(self, error: HttpError) -> bytes:
        """Return the last events of a stream that has failed."""
        ...

    def whole(self, outputs: Sequence[Sequence[Output]]) -> Mapping[str, Any]:
        """Return the answer as one object, of all outputs of every request."""
        ...


class ClientLeft(Exception):
    """The client has closed its connection."""


def data(event: Mapping[str, Any]) -> bytes:
    """Return an event without a name, as OpenAI's are."""
    return b"data: " + json_bytes(event, separators=(",", ":")) + b"\n\n"


def named(event: Mapping[str, Any]) -> bytes:
    """Return an event named by its `type`, as those of Anthropic and of Open Responses are."""
    return b"event: " + str(event["type"]).encode() + b"\n" + data(event)


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Raise InputErrors of this block with the names that an API has for our fields."""
    try:
        yield
    except InputError as error:
        raise type(error)(names.get(error.field, error.field), error.message) from error


async def respond(request: Request, answer: Answer, *, stream: bool, traced: bool = False) -> Response:
    """Answer a request, at once or as a stream.

    Raises:
        ClientLeft: the client has left. And what `Server.wake_model`, `Answer.prepare` and `Engine.generate` raise,
            as long as the answer may have a status of its own.
    """
    server: Server = request.app.state.server
    if not stream:
        engine = await unless_left(request, server.wake_model())
        requests = await unless_left(request, answer.prepare(engine))
        outputs = await unless_left(request, collect(engine, requests, traced=traced))
        return JSONResponse(answer.whole(outputs))
    waking = asyncio.ensure_future(server.wake_model())
    try:
        await unless_left(request, asyncio.wait([waking], timeout=server.limits.heartbeat_s))
        if waking.done():
            requests = await unless_left(request, answer.prepare(waking.result()))
            return await event_stream(request, _events(waking, requests, answer, traced=traced), answer.failed)
    except BaseException:
        waking.cancel()
        raise
    # a model that is asleep may take minutes to load: the stream begins before, and shows that it lives
    events = _events(waking, None, answer, traced=traced)
    return EventStream(request, events, asyncio.ensure_future(anext(events)), answer.failed)


async def _events(
    waking: "asyncio.Future[Engine]", requests: Sequence[EngineRequest] | None, answer: Answer, *, traced: bool
) -> AsyncGenerator[bytes, None]:
    """Yield all events of an answer; none before the first output, until which it may be refused with a status."""
    engine = await waking
    if requests is None:
        requests = await answer.prepare(engine)
    async with aclosing(engine.generate_all(requests, traced=traced)) as outputs:
        async for index, output in outputs:
            for event in answer.events(index, output):
                yield event
    for event in answer.end():
        yield event


async def event_stream(
    request: Request, events: AsyncGenerator[bytes, None], failed: Callable[[HttpError], bytes]
) -> "EventStream":
    """Return a response of these events. Raises ClientLeft, and what the first event raises if it comes soon."""
    server: Server = request.app.state.server
    first = asyncio.ensure_future(anext(events))

    async def wait_first() -> None:
        await asyncio.wait([first], timeout=server.limits.heartbeat_s)
        if not first.done() and server.model and server.model.num_waiting:  # it may be refused yet
            await asyncio.wait([first], timeout=server.limits.queue_timeout_s)

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
        events: AsyncGenerator[bytes, None],
        upcoming: "asyncio.Future[bytes]",
        failed: Callable[[HttpError], bytes],
    ) -> None:
        """`upcoming` is the first event, which may not be there yet; `failed` makes the last event of a failure."""
        super().__init__((), media_type="text/event-stream", headers=_HEADERS)
        self._request = request
        self._events = events
        self._upcoming = upcoming
        self._failed = failed
        self._heartbeat_s = request.app.state.server.limits.heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(self._request, self._send_all(send))
        except ClientLeft:
            pass
        finally:
            await _close(self._events, self._upcoming)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._with_heartbeats()) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _with_heartbeats(self) -> AsyncGenerator[bytes, None]:
        while True:
            done, _ = await asyncio.wait([self._upcoming], timeout=self._heartbeat_s)
            if not done:
                yield _HEARTBEAT
                continue
            try:
                event = self._upcoming.result()
            except StopAsyncIteration:
                return
            except Exception as error:  # the status is sent already: no handler of the application will see it
                if not isinstance(error, BrigadeError | Refusal):
                    request_id = REQUEST_ID.get()  # the client gets the error; log it too, since it is a bug
                    message = f"{request_id or 'request'}: {internal_error_kind(error)}"
                    log("bug", message, level="error", request_id=request_id or None)
                yield self._failed(http_error(error))
                return
            yield event
            self._upcoming = asyncio.ensure_future(anext(self._events))


async def _close(events: AsyncGenerator[bytes, None], upcoming: "asyncio.Future[bytes]") -> None:
    upcoming.cancel()
    await asyncio.gather(upcoming, return_exceptions=True)
    await events.aclose()


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client leaves meanwhile. Raises ClientLeft then."""

    async def wait_left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(wait_left())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
