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

_LEAST_OF_OURS, _LONGEST = 8, 512  # characters; other servers may have shorter keys
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
    """Those that a server lets in.

    Raises:
        InputError: the file cannot be read, has no key, or one that is too short.
    """
    return Keys({name: _digest(key) for name, key in _keys_of(path, _LEAST_OF_OURS).items()})


def first_key(path: Path) -> str:
    """The one that a client brings. Raises InputError for a file that cannot be read, or has none."""
    return next(iter(_keys_of(path, least=1).values()))


def _keys_of(path: Path, least: int) -> dict[str, str]:
    """Keys of a file: one per line, as `KEY` or `NAME KEY`; lines that begin with # are skipped."""
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
        if len(words) > 2 or not re.fullmatch(rf"[\x21-\x7e]{{{least},{_LONGEST}}}", key):
            said = f"expected KEY or NAME KEY, of {least} to {_LONGEST} printable ASCII characters"
            raise InputError("api_key_file", f"{path}, line {number}: {said}")
        if name in keys:
            raise InputError("api_key_file", f"{path}, line {number}: expected a name that no other key has")
        keys[name] = key
    if not keys:
        raise InputError("api_key_file", f"{path}: expected a key per line, found none")
    return keys


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
