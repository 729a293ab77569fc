"""Keys: who may ask. Compared in constant time; kept as digests."""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from worker.errors import InputError

_KEY = r"[\x21-\x7e]{8,512}"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Keys:
    """Digests of keys, by the names of their holders."""

    digests: Mapping[str, bytes]

    def holder(self, key: str) -> str | None:
        """Whose key it is. All are compared, whichever fits."""
        digest = _digest(key)
        found = [name for name, kept in self.digests.items() if hmac.compare_digest(kept, digest)]
        return found[0] if found else None


def is_readable_by_others(path: Path) -> bool:
    """Whether other users of this machine may know the keys."""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def load_keys(path: Path) -> Keys:
    """Keys of a file: one per line, as `KEY` or `NAME KEY`; lines that begin with # are skipped.

    Raises:
        InputError: it cannot be read, has no key, or one that is too short.
    """
    try:
        lines = _read(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("api_key_file", f"{path} cannot be read: {error}") from error
    digests: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, key = words if len(words) == 2 else (f"key {number}", words[0])
        if len(words) > 2 or not re.fullmatch(_KEY, key):
            raise InputError(
                "api_key_file", f"{path}, line {number}: expected KEY or NAME KEY, of 8 characters or more"
            )
        if name in digests:
            raise InputError("api_key_file", f"{path}, line {number}: expected a name that no other key has")
        digests[name] = _digest(key)
    if not digests:
        raise InputError("api_key_file", f"{path}: expected a key per line, found none")
    return Keys(digests)


def _read(path: Path) -> bytes:
    """Not by its size alone: it may grow, and what is no file has none. A pipe would be waited for at its opening."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InputError("api_key_file", f"{path}: expected a file, found something else")
        found = file.read(_MOST_BYTES + 1)
    if len(found) > _MOST_BYTES:
        raise InputError("api_key_file", f"{path}: expected at most {_MOST_BYTES} bytes")
    return found


def key_of(headers: Mapping[str, str]) -> str | None:
    """The key that a request brings, as a bearer's or as `x-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
