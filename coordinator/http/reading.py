"""Reading: a request's body, bounded, as JSON, as the shape that its route expects."""

import asyncio
import json
from functools import partial
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from coordinator.http.errors import refuse
from coordinator.shapes.body import read
from worker.process.call_thread import run_aside

Body = TypeVar("Body", bound=BaseModel)

MOST_AT_ONCE = 64 << 10  # bytes that are parsed on the event loop: more would keep the others waiting
_SEND_S = 60.0  # how long a client may take to send its body
_CLOSE = {"Connection": "close"}  # with what is still to come


async def read_body(request: Request, shape: type[Body], most_bytes: int) -> Body:
    """Raises Refusal (400, 408, 413, 415), or InputError for a field that is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise refuse(415, f"expected content-type application/json, found {kind or 'none'}", "unsupported_media_type")
    try:
        async with asyncio.timeout(_SEND_S):
            body = await _bytes_of(request, most_bytes)
    except TimeoutError:
        raise refuse(408, f"expected a whole body within {_SEND_S:g} s", "request_timeout", headers=_CLOSE) from None
    parse = partial(_parsed, shape, body)
    return await run_aside(parse) if len(body) > MOST_AT_ONCE else parse()


def _parsed(shape: type[Body], body: bytes) -> Body:
    return read(shape, _as_object(body))


async def _bytes_of(request: Request, most: int) -> bytes:
    too_large = refuse(413, f"expected a body of at most {most} bytes", "request_too_large", headers=_CLOSE)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 12 or int(length) > most):
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise too_large
    except ClientDisconnect:
        raise refuse(400, "the client left before it had sent its request", "incomplete_request") from None
    return bytes(body)


def _as_object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise refuse(400, f"expected JSON, found something else ({error})", "invalid_json") from None
    if not isinstance(found, dict):
        raise refuse(400, f"expected a JSON object, found {type(found).__name__}", "invalid_json")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
