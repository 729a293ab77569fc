"""What a request contains and the server leaves out: named in a header of its answer, and once in the log."""

import re
from collections.abc import Iterable
from contextvars import ContextVar

from coordinator.cluster.log import log

HEADER = "Brigade-Left-Out"
_MOST_LETTERS = 64  # of a name: clients choose them
_MOST_NAMED = 20  # in a header
_MOST_LOGGED = 100
_FOUND: ContextVar[dict[str, None] | None] = ContextVar("left_out", default=None)


def begin_request() -> dict[str, None]:
    """Return the names that `leave_out` will collect in this context and in the tasks that it starts."""
    found: dict[str, None] = {}
    _FOUND.set(found)
    return found


def leave_out(name: str) -> str:
    """Note that the present request contains this and the server leaves it out; return the name, cleaned and cut."""
    name = clean(name)
    if (found := _FOUND.get()) is not None and len(found) < _MOST_NAMED:
        found[name] = None
    return name


def clean(name: str) -> str:
    """Return a client's word as a header and a log may hold it."""
    return re.sub(r"[^\w./:-]+", "?", name[:_MOST_LETTERS], flags=re.ASCII)


class SeenNames:
    """Logs what requests contain and the server does not use: each name once, and at most 100 of them."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def note(self, event: str, what: str, names: Iterable[str]) -> None:
        """Log the names that are new; `what` says what happens to them."""
        for name in map(clean, names):
            if (event, name) not in self._seen and len(self._seen) < _MOST_LOGGED:
                self._seen.add((event, name))
                log(event, f"{what}: {name}", name=name)
