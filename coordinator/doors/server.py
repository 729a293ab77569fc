"""Server: a `brigade serve`, or another server of OpenAI's shape, that is asked by HTTP."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from coordinator.doors.client import client_settings, no_answer
from worker.errors import BrigadeError, InputError, ServerFailed

Json = dict[str, Any]
_TIMES = httpx2.Timeout(5.0, read=120.0)  # of silence: a stream says every few seconds that it lives
_WRONG_REQUEST = (400, 404, 413, 415, 422)
_DATA, _DONE = "data: ", "[DONE]"


class Server:
    """One model of a server. Made by `open_server`."""

    def __init__(self, client: httpx2.AsyncClient, url: str, name: str) -> None:
        self._client = client
        self._url = url
        self.name = name

    async def events(self, path: str, body: Json) -> AsyncGenerator[Json, None]:
        """The events of a stream. Closing the iterator ends it.

        Raises:
            InputError: the request is wrong. ServerFailed: it was not answered, or not to its end.
        """
        asked = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}} | body
        try:
            async with self._client.stream("POST", path, json=asked) as response:
                if response.status_code != 200:
                    raise _refused(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line == _DATA + _DONE:
                        return
                    if line.startswith(_DATA):
                        yield _event(line.removeprefix(_DATA))
        except (httpx2.HTTPError, ValueError) as error:
            raise ServerFailed(f"the server at {self._url} broke off: {error or type(error).__name__}") from error
        raise ServerFailed(f"the server at {self._url} ended its stream without a last event")


@asynccontextmanager
async def open_server(url: str, key: str | None) -> AsyncIterator[Server]:
    """Raises InputError if it does not let us in, or this is no URL. ServerFailed: there is no such server."""
    async with httpx2.AsyncClient(**client_settings(url, key), timeout=_TIMES) as client:
        yield Server(client, url, await _name(client, url))


async def _name(client: httpx2.AsyncClient, url: str) -> str:
    """The model's. Raises what `open_server` raises."""
    try:
        response = await client.get("v1/models")
        if response.status_code == 401:
            raise InputError("server", f"{url} wants a key: give --api-key-file")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx2.TransportError as error:
        raise no_answer(url, error) from error
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        said = f"{url} answers, but not as a server of OpenAI's API does"
        raise ServerFailed(f"{said} ({str(error) or type(error).__name__})") from error


def _event(text: str) -> Json:
    event = json.loads(text)
    if not isinstance(event, dict):
        raise ValueError(f"expected an object, found {text[:40]!r}")
    if "error" in event:
        raise ServerFailed(str(event["error"].get("message")))
    return event


def _refused(status: int, body: bytes) -> BrigadeError:
    try:
        error = json.loads(body)["error"]
        message, field = str(error["message"]), str(error.get("param") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, field = f"HTTP status {status}", ""
    if status in _WRONG_REQUEST:
        return InputError(field, message.removeprefix(f"{field}: "))
    return ServerFailed(f"the server answers with status {status}: {message}")
