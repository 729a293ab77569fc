"""Streams: server-sent events that say now and then that they live, and answers whose client may leave."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from coordinator.cluster.log import log
from coordinator.http.errors import HttpError, Refusal, http_error
from coordinator.http.served import Served
from coordinator.resident.model import ResidentModel
from coordinator.resident.tally import REQUEST_ID
from worker.errors import BrigadeError, internal_error_kind
from worker.process.json_text import json_bytes

T = TypeVar("T")
Event = dict[str, Any]
Begin = Callable[[ResidentModel], Coroutine[Any, Any, AsyncGenerator[bytes, None]]]

DONE = b"data: [DONE]\n\n"  # the end of a stream, as OpenAI's clients know it
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_LIVES = b": still at it\n\n"


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


def data(event: Event) -> bytes:
    """An event without a name, as OpenAI's are."""
    return b"data: " + json_bytes(event, separators=(",", ":")) + b"\n\n"


def named(event: Event) -> bytes:
    """An event that goes by its own `type`, as those of Anthropic and of Open Responses do."""
    return b"event: " + str(event["type"]).encode() + b"\n" + data(event)


async def event_stream(
    request: Request, events: AsyncGenerator[bytes, None], *, tell: Callable[[HttpError], bytes], end: bytes = b""
) -> "EventStream":
    """A response of these events. Raises what the first one raises: until then there may be another status.

    Args:
        tell: makes the last event of a failure after that.
        end: what comes after the last event.
    Raises:
        ClientLeft: nobody waits for it any more.
    """
    served: Served = request.app.state.served
    first = asyncio.ensure_future(anext(events))
    try:
        await unless_left(request, _wait_first(first, served))
        if first.done():
            first.result()
    except BaseException:
        await _close(events, first)
        raise
    return EventStream(request, events, first, tell, end, heartbeat_s=served.limits.heartbeat_s)


async def model_stream(
    request: Request, begin: Begin, *, tell: Callable[[HttpError], bytes], end: bytes = b""
) -> "EventStream":
    """As `event_stream`, of the events that `begin` makes of the model.

    One that is asleep may take minutes to be read: it is waited for by a stream that has begun, and says that it lives.
    """
    served: Served = request.app.state.served
    waking = asyncio.ensure_future(served.wake_model())
    try:
        await unless_left(request, asyncio.wait([waking], timeout=served.limits.heartbeat_s))
        if waking.done():
            events = await unless_left(request, begin(waking.result()))
            return await event_stream(request, events, tell=tell, end=end)
    except BaseException:
        waking.cancel()
        raise
    events = _once_awake(waking, begin)
    return EventStream(
        request, events, asyncio.ensure_future(anext(events)), tell, end, heartbeat_s=served.limits.heartbeat_s
    )


async def _once_awake(waking: "asyncio.Future[ResidentModel]", begin: Begin) -> AsyncGenerator[bytes, None]:
    async with aclosing(await begin(await waking)) as events:
        async for event in events:
            yield event


async def _wait_first(first: "asyncio.Future[bytes]", served: Served) -> None:
    await asyncio.wait([first], timeout=served.limits.heartbeat_s)
    if not first.done() and served.has_waiting:  # it may be refused yet
        await asyncio.wait([first], timeout=served.limits.queue_timeout_s)


class EventStream(StreamingResponse):
    """Sends events until they end, fail, or the client is gone. Whichever it is, what they come from is closed then."""

    def __init__(
        self,
        request: Request,
        events: AsyncGenerator[bytes, None],
        upcoming: "asyncio.Future[bytes]",
        tell: Callable[[HttpError], bytes],
        end: bytes = b"",
        *,
        heartbeat_s: float,
    ) -> None:
        """`upcoming` is the first event, which may not be there yet."""
        super().__init__((), media_type="text/event-stream", headers=_HEADERS)
        self._request = request
        self._events = events
        self._upcoming = upcoming
        self._tell = tell
        self._end = end
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(self._request, self._send_all(send))
        except ClientLeft:
            pass
        finally:
            await _close(self._events, self._upcoming)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._lively()) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lively(self) -> AsyncGenerator[bytes, None]:
        while True:
            done, _ = await asyncio.wait([self._upcoming], timeout=self._heartbeat_s)
            if not done:
                yield _LIVES
                continue
            try:
                event = self._upcoming.result()
            except StopAsyncIteration:
                yield self._end
                return
            except Exception as error:  # HTTP's rim: its status is sent, and no handler of the application is asked
                if not isinstance(error, BrigadeError | Refusal):
                    _log_bug(error)
                yield self._tell(http_error(error))
                return
            yield event
            self._upcoming = asyncio.ensure_future(anext(self._events))


def _log_bug(error: Exception) -> None:
    """It is more than the affair of the client, who is told."""
    request_id, kind = REQUEST_ID.get(), internal_error_kind(error)
    log("bug", f"{request_id or 'request'}: {kind}", level="error", request_id=request_id or None)


async def _close(events: AsyncGenerator[bytes, None], upcoming: "asyncio.Future[bytes]") -> None:
    upcoming.cancel()
    await asyncio.gather(upcoming, return_exceptions=True)
    await events.aclose()


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves meanwhile. Raises ClientLeft then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
