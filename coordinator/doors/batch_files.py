"""The files of a batch: OpenAI's request lines, and the answers' lines, which a later run goes on from."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.errors import InputError
from worker.process.json_text import json_bytes

Json = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One request."""

    number: int  # of its line
    custom_id: str
    method: str
    url: str
    body: Json


@dataclass(frozen=True)
class Batch:
    """All requests that could be read, and what is wrong with the other lines."""

    entries: Sequence[Entry]
    problems: Sequence[str]


def read_batch(path: Path) -> Batch:
    """Raises InputError for a file that cannot be read."""
    entries: dict[str, Entry] = {}
    problems = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    entry = _entry(number, line)
                    if entry.custom_id in entries:
                        first = entries[entry.custom_id].number
                        raise ValueError(f"custom_id {entry.custom_id!r} is that of line {first} already")
                    entries[entry.custom_id] = entry
                except ValueError as error:
                    problems.append(f"{path}, line {number}: {error}; left out")
    except OSError as error:
        raise InputError("", f"{path} cannot be read: {error.strerror}") from error
    return Batch([*entries.values()], problems)


def _entry(number: int, line: bytes) -> Entry:
    """Raises ValueError for what is no request, or none that an answer could be told apart by."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, found something else ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("custom_id"), str):
        raise ValueError("expected a JSON object with a custom_id, a text")
    body = found.get("body")
    if not isinstance(body, dict):
        raise ValueError("expected a body, an object")
    return Entry(number, found["custom_id"], str(found.get("method", "POST")), str(found.get("url")), body)


class Answers:
    """The file of answers, which only grows. Made by `open_answers`."""

    def __init__(self, descriptor: int, known: Mapping[str, int]) -> None:
        self.known = known  # the ids that it had when it was opened, with the HTTP status of each answer
        self._descriptor = descriptor

    def add(self, line: Json) -> None:
        """A line more. Raises OSError if there is no room for it."""
        rest = memoryview(json_bytes(line) + b"\n")
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


@contextmanager
def open_answers(path: Path) -> Iterator[Answers]:
    """The file, made if it is not there; the end of a line that was not written whole is cut off.

    Raises:
        InputError: it cannot be written or locked, another run writes it, or it holds something else.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise InputError("output", f"cannot write {path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("output", f"another run writes {path}") from None
        except OSError as error:
            raise InputError("output", f"cannot lock {path}: {error.strerror}") from error
        known, end = _known(path)
        os.ftruncate(descriptor, end)
        yield Answers(descriptor, known)
    finally:
        os.close(descriptor)


def _known(path: Path) -> tuple[dict[str, int], int]:
    """The ids of all whole lines with what became of them, and where these end."""
    known: dict[str, int] = {}
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                found = json.loads(line)
                known[str(found["custom_id"])] = _status(found)
            except (ValueError, LookupError, TypeError, AttributeError):
                said = "expected the answers of an earlier run, found something else"
                raise InputError("output", f"{path}, line {number}: {said}; give another file") from None
    return known, end


def _status(line: Json) -> int:
    """Of an answer; one that tells none and is no error is whole."""
    response = line.get("response") or {}
    return int(response.get("status_code", 500 if line.get("error") else 200))
