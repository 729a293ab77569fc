"""Streams: server-sent events that say now and then that they live, and answers whose client may leave."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from coordinator.http.errors import HttpError, http_error

T = TypeVar("T")
Event = dict[str, Any]

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_KEEP_ALIVE_S = 10.0
_LIVES = b": still at it\n\n"


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


def data(event: Event) -> bytes:
    """An event without a name, as OpenAI's are."""
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named(event: Event) -> bytes:
    """An event that goes by its own `type`, as those of Anthropic and of Open Responses do."""
    return b"event: " + str(event["type"]).encode() + b"\n" + data(event)


async def event_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    *,
    tell: Callable[[HttpError], bytes],
    end: bytes = b"",
    keep_alive_s: float = _KEEP_ALIVE_S,
) -> StreamingResponse:
    """A response of these events. Raises what the first one raises: until then there may be another status.

    Args:
        tell: makes the last event of a failure after that.
        end: what comes after the last event.
    Raises:
        ClientLeft: nobody waits for it any more.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await unless_left(request, asyncio.wait([first], timeout=keep_alive_s))
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()
        raise
    body = _lively(events, first, tell, end, keep_alive_s)
    return StreamingResponse(body, media_type="text/event-stream", headers=_HEADERS)


async def _lively(
    events: AsyncGenerator[bytes, None],
    upcoming: "asyncio.Future[bytes]",
    tell: Callable[[HttpError], bytes],
    end: bytes,
    keep_alive_s: float,
) -> AsyncIterator[bytes]:
    try:
        while True:
            done, _ = await asyncio.wait([upcoming], timeout=keep_alive_s)
            if not done:
                yield _LIVES
                continue
            try:
                event = upcoming.result()
            except StopAsyncIteration:
                yield end
                return
            except Exception as error:
                yield tell(http_error(error))
                return
            yield event
            upcoming = asyncio.ensure_future(anext(events))
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)
        await events.aclose()


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves meanwhile. Raises ClientLeft then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
