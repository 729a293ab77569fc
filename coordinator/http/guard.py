"""Guard: what every request passes first: the host it names, its key, a request id on its answer. Pure ASGI."""

import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http.errors import HttpError, refuse
from coordinator.http.keys import Keys, key_of
from coordinator.http.refusals import refusal_response
from coordinator.resident.tally import REQUEST_ID

OPEN_PATHS = ("/health", "/live", "/")  # for everybody, but nothing that costs a step of the chain
_ID = r"[A-Za-z0-9._-]{1,128}"


class Guard:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, *, keys: Keys | None, hosts: Collection[str]) -> None:
        """`hosts` are the names by which the server may be called, against DNS rebinding; none: by any."""
        self._app = app
        self._keys = keys
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        own_id = headers.get("x-request-id", "")
        request_id = own_id if re.fullmatch(_ID, own_id) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = MutableHeaders(scope=message)
                told["X-Request-Id"] = told["Request-Id"] = request_id  # OpenAI's name for it, and Anthropic's
            await send(message)

        if refusal := self._refusal(scope, headers):
            await refusal_response(scope, refusal)(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)

    def _refusal(self, scope: Scope, headers: Headers) -> HttpError | None:
        if self._hosts and _host_of(headers.get("host", "")) not in self._hosts:
            found = headers.get("host", "none")
            return refuse(403, f"expected a Host that this server is known by, found {found!r}", "unknown_host").error
        if self._keys is None or (scope["path"] in OPEN_PATHS and not scope["query_string"]):
            return None
        key = key_of(headers)
        if key is not None and (holder := self._keys.holder(key)):
            scope["state"]["holder"] = holder
            return None
        found = "another one" if key else "none"
        said = f"expected an API key of this server (Authorization: Bearer KEY), found {found}"
        return HttpError(401, "authentication_error", said, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _host_of(header: str) -> str:
    """The host of HOST or HOST:PORT; without brackets."""
    host = header.rpartition("]")[0].lstrip("[") if header.startswith("[") else header.partition(":")[0]
    return host.lower()
