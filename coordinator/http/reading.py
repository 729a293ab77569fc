"""Reading: a request's body, bounded, as JSON, as the shape that its route expects."""

import json
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from coordinator.http.errors import refuse
from coordinator.shapes.body import read

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, shape: type[Body], most_bytes: int) -> Body:
    """Raises Refusal (400, 413, 415), or InputError for a field that is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise refuse(415, f"expected content-type application/json, found {kind or 'none'}", "unsupported_media_type")
    return read(shape, _as_object(await _bytes_of(request, most_bytes)))


async def _bytes_of(request: Request, most: int) -> bytes:
    too_large = refuse(413, f"expected a body of at most {most} bytes", "request_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > most:
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
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise refuse(400, f"expected JSON, found something else ({error})", "invalid_json") from None
    if not isinstance(found, dict):
        raise refuse(400, f"expected a JSON object, found {type(found).__name__}", "invalid_json")
    return found
