"""Authentication: API keys, the host names that requests may give, and an id for every request."""

import hashlib
import hmac
import os
import re
import stat
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.errors import HttpError, error_response, http_error
from coordinator.engine.caller import ARRIVED, BEST_PRIORITY, KEY_DIGEST, KEY_HOLDER, REQUEST_ID
from worker.errors import InputError, QueueFull
from worker.platform.files import reading
from worker.platform.text import counted

OPEN_PATHS = ("/health", "/live", "/")  # no key needed, unless a query makes them cost a step of the chain
_MIN_KEY, _MAX_KEY = 8, 512  # characters; the keys that a client sends to other servers may be shorter
MAX_FILE_BYTES = 1 << 20
_ID = r"[A-Za-z0-9._-]{1,128}"
KEY_VARIABLE = "BRIGADE_API_KEY"  # an environment variable: a command line is seen by all users of a machine
_LIMITS = re.compile(r"( at_once=(?P<at_once>[1-9][0-9]{0,5}))?( priority=(?P<priority>-?[0-9]{1,9}))?")


@dataclass(frozen=True)
class Key:
    """The SHA-256 digest of a key, the name of its holder, and the limits of its requests."""

    holder: str
    digest: bytes
    most_at_once: int | None = None  # None: any number
    best_priority: int = 0


ANYONE = Key("", b"")  # the key of requests that need none


def find_key(keys: Sequence[Key], given: str) -> Key | None:
    """Return the key whose text is given. Compares all keys, in constant time."""
    digest = hashlib.sha256(given.encode()).digest()
    return next(iter([key for key in keys if hmac.compare_digest(key.digest, digest)]), None)


def is_readable_by_others(path: Path) -> bool:
    """Return whether other users of this machine may read the file."""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def load_keys(path: Path | None) -> Sequence[Key] | None:
    """Return the keys that a server accepts, from a file and the environment; None without any.

    Raises:
        InputError: the file cannot be read or has no key, or a key is too short.
    """
    known = _read_keys(path, _MIN_KEY) if path else {}
    if key := os.environ.get(KEY_VARIABLE):
        known.setdefault(key, _make_key(KEY_VARIABLE, key, _MIN_KEY, KEY_VARIABLE))
    return list(known.values()) or None


def first_key(path: Path | None) -> str | None:
    """Return the key that a client sends: the file's first, else that of the environment; None without any.

    Raises:
        InputError: the file cannot be read, or has none.
    """
    if path:
        return next(iter(_read_keys(path, 1)))
    if key := os.environ.get(KEY_VARIABLE):
        _make_key(KEY_VARIABLE, key, 1, KEY_VARIABLE)
    return key or None


def _make_key(holder: str, key: str, min_length: int, place: str, *limits: Any) -> Key:
    """Raises InputError for a key that is too short or cannot be sent."""
    if not re.fullmatch(rf"[\x21-\x7e]{{{min_length},{_MAX_KEY}}}", key):
        raise InputError("api_key_file", f"{place}: expected {min_length} to {_MAX_KEY} printable ASCII characters")
    return Key(holder, hashlib.sha256(key.encode()).digest(), *limits)


def _read_keys(path: Path, min_length: int) -> dict[str, Key]:
    """Read one key per line, as `[NAME] KEY [at_once=N] [priority=N]`; lines that begin with # are skipped."""
    with reading("api_key_file", path):
        lines = _read(path).decode("utf-8-sig").splitlines()  # editors of Windows begin it with a byte order mark
    keys: dict[str, Key] = {}
    for number, line in enumerate(lines, 1):
        place, words = f"{path}, line {number}", line.split()
        if not words or words[0].startswith("#"):
            continue
        has_name = len(words) > 1 and not _LIMITS.fullmatch(f" {words[1]}")
        limits = _LIMITS.fullmatch("".join(f" {word}" for word in sorted(words[1 + has_name :])))
        if limits is None or words[has_name].startswith(("#", "at_once", "priority")):
            raise InputError(
                "api_key_file", f"{place}: expected KEY or NAME KEY, and then at_once=N and priority=N, if any"
            )
        at_once, priority = limits["at_once"], int(limits["priority"] or 0)
        name, key = words[:2] if has_name else (f"key {number}", words[0])
        if name in (KEY_VARIABLE, *(each.holder for each in keys.values())) or key in keys:
            expected = f"expected a name and a key that no other line has, and no key named {KEY_VARIABLE}"
            raise InputError("api_key_file", f"{place}: {expected}")
        keys[key] = _make_key(name, key, min_length, place, int(at_once) if at_once else None, priority)
    if not keys:
        raise InputError("api_key_file", f"{path}: expected a key per line, found none")
    return keys


def _read(path: Path) -> bytes:
    """Read at most `MAX_FILE_BYTES`, and only a regular file: a pipe could block."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InputError("api_key_file", f"{path}: expected a file, found something else")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise InputError("api_key_file", f"{path}: expected at most {MAX_FILE_BYTES} bytes")
    return content


class AuthMiddleware:
    """Checks the Host and the key of every request, and adds a request id to its answer."""

    def __init__(
        self,
        app: ASGIApp,
        on_refused: Callable[[QueueFull], None],
        *,
        keys: Sequence[Key] | None,
        hosts: Collection[str],
    ) -> None:
        """
        Args:
            on_refused: called for each request beyond its key's limit.
            hosts: names that a Host header may have beside addresses, against DNS rebinding; none: any name.
        """
        self._app = app
        self._on_refused = on_refused
        self._keys = keys
        self._hosts = frozenset(hosts)
        self._at_once: Counter[str] = Counter()  # requests that are being answered, by the holder of their key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if re.fullmatch(_ID, given) else f"req_{uuid.uuid4().hex}"
        REQUEST_ID.set(request_id)
        ARRIVED.set(time.monotonic_ns())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                sent["X-Request-Id"] = sent["Request-Id"] = request_id  # OpenAI's name for it, and Anthropic's
            await send(message)

        try:
            self._require_host(headers)
            key = self._key(scope, headers)
            with self._counted(key, is_counted=scope["method"] == "POST"):
                KEY_HOLDER.set(key.holder)
                KEY_DIGEST.set(key.digest.hex())
                BEST_PRIORITY.set(key.best_priority)
                await self._app(scope, receive, send_with_id)
        except (HttpError, QueueFull) as error:  # the application answers its own
            await error_response(scope["path"], http_error(error))(scope, receive, send_with_id)

    def _require_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        name = name.lower().removesuffix(".")  # of a name that is written completely
        if self._hosts and name not in self._hosts and not is_address(name):
            reason = f"expected a Host that this server is known by, found {headers.get('host', 'none')!r}"
            raise HttpError(403, f"{reason}; start the server with --allowed-host and that name", "unknown_host")

    def _key(self, scope: Scope, headers: Headers) -> Key:
        """Return the key of a request; ANYONE where none is needed. Raises HttpError (401) for a wrong key."""
        if self._keys is None or (scope["path"] in OPEN_PATHS and not scope["query_string"]):
            return ANYONE
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        if found := [key for key in (find_key(self._keys, each) for each in given) if key]:
            return found[0]
        reason = "expected an API key of this server (Authorization: Bearer KEY), found "
        reason += "another one" if any(given) else "none"
        raise HttpError(401, reason, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    @contextmanager
    def _counted(self, key: Key, *, is_counted: bool) -> Iterator[None]:
        """Count a request of this key while it is answered. Raises QueueFull beyond the key's limit."""
        holder, most = key.holder, key.most_at_once
        if is_counted and most is not None and self._at_once[holder] >= most:
            full = QueueFull(f"expected at most {counted(most, 'request')} at once with this key; try again later")
            self._on_refused(full)
            raise full
        self._at_once[holder] += is_counted
        try:
            yield
        finally:
            self._at_once[holder] -= is_counted


def is_address(host: str) -> bool:
    """Return whether a Host is an IP address, which no page can rebind."""
    try:
        return bool(ip_address(host))
    except ValueError:
        return False
