"""Authentication: API keys, the host names that requests may give, and an id for every request."""

import hashlib
import hmac
import os
import re
import stat
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.errors import HttpError, error_response
from coordinator.engine.stats import REQUEST_ID
from worker.errors import InputError

OPEN_PATHS = ("/health", "/live", "/")  # no key needed, unless a query makes them cost a step of the chain
_MIN_KEY, _MAX_KEY = 8, 512  # characters; the keys that a client sends to other servers may be shorter
_MAX_FILE_BYTES = 1 << 20
_ID = r"[A-Za-z0-9._-]{1,128}"


@dataclass(frozen=True)
class Keys:
    """SHA-256 digests of keys, by the names of their holders."""

    digests: Mapping[str, bytes]

    def holder(self, key: str) -> str | None:
        """Return the name of the key's holder. Compares all keys, in constant time."""
        digest = hashlib.sha256(key.encode()).digest()
        found = [name for name, kept in self.digests.items() if hmac.compare_digest(kept, digest)]
        return found[0] if found else None


def is_readable_by_others(path: Path) -> bool:
    """Return whether other users of this machine may read the file."""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def load_keys(path: Path) -> Keys:
    """Read the keys that a server accepts.

    Raises:
        InputError: the file cannot be read, has no key, or has one that is too short.
    """
    keys = _read_keys(path, _MIN_KEY)
    return Keys({name: hashlib.sha256(key.encode()).digest() for name, key in keys.items()})


def first_key(path: Path) -> str:
    """Return the key that a client sends. Raises InputError if the file cannot be read, or has none."""
    return next(iter(_read_keys(path, 1).values()))


def _read_keys(path: Path, min_length: int) -> dict[str, str]:
    """Read one key per line, as `KEY` or `NAME KEY`; lines that begin with # are skipped."""
    try:
        lines = _read(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("api_key_file", f"{path} cannot be read: {error}") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, key = words if len(words) == 2 else (f"key {number}", words[0])
        if len(words) > 2 or not re.fullmatch(rf"[\x21-\x7e]{{{min_length},{_MAX_KEY}}}", key):
            expected = f"expected KEY or NAME KEY, of {min_length} to {_MAX_KEY} printable ASCII characters"
            raise InputError("api_key_file", f"{path}, line {number}: {expected}")
        if name in keys:
            raise InputError("api_key_file", f"{path}, line {number}: expected a name that no other key has")
        keys[name] = key
    if not keys:
        raise InputError("api_key_file", f"{path}: expected a key per line, found none")
    return keys


def _read(path: Path) -> bytes:
    """Read at most `_MAX_FILE_BYTES`, and only a regular file: a pipe could block."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InputError("api_key_file", f"{path}: expected a file, found something else")
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise InputError("api_key_file", f"{path}: expected at most {_MAX_FILE_BYTES} bytes")
    return content


class AuthMiddleware:
    """Checks the Host and the key of every request, and adds a request id to its answer."""

    def __init__(self, app: ASGIApp, *, keys: Keys | None, hosts: Collection[str]) -> None:
        """`hosts` are the names that a Host header may have beside addresses, against DNS rebinding; none: any name."""
        self._app = app
        self._keys = keys
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if re.fullmatch(_ID, given) else f"req_{uuid.uuid4().hex}"
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                sent["X-Request-Id"] = sent["Request-Id"] = request_id  # OpenAI's name for it, and Anthropic's
            await send(message)

        if error := self._check(scope, headers):
            await error_response(scope["path"], error)(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)

    def _check(self, scope: Scope, headers: Headers) -> HttpError | None:
        host = headers.get("host", "")
        name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if self._hosts and name.lower() not in self._hosts and not _is_address(name):
            found = headers.get("host", "none")
            return HttpError(403, f"expected a Host that this server is known by, found {found!r}", "unknown_host")
        if self._keys is None or (scope["path"] in OPEN_PATHS and not scope["query_string"]):
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        if any([self._keys.holder(key) for key in given]):
            return None
        found = "another one" if any(given) else "none"
        reason = f"expected an API key of this server (Authorization: Bearer KEY), found {found}"
        return HttpError(401, reason, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _is_address(host: str) -> bool:
    """Return whether a Host is an IP address, which no page can rebind."""
    try:
        return bool(ip_address(host))
    except ValueError:
        return False
