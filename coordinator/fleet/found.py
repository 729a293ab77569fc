"""What remote/look.sh has found on a node, and what follows for paths there. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.errors import BrigadeError
from worker.process.printable import printable

LEAST_PYTHON = (3, 11)
ROOM_BYTES = 2 << 30  # that an installation needs for a moment, downloads included
KINDS = ("launchd", "systemd", "daemon")  # of service
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_TURN = re.compile(r"\d{1,18}")
_ROOM = re.compile(r"(\d{1,18})\s+\d+%")  # in a line of `df -Pk`: KiB available, and the share in use behind it


@dataclass(frozen=True)
class Python:
    """An interpreter there; `is_whole` if it can make virtual environments and has pip."""

    version: tuple[int, ...]
    path: str
    is_whole: bool


@dataclass(frozen=True)
class Found:
    """A node's machine, and the worker there.

    Digests are hexadecimal SHA-256 of what is there now, "" if nothing is; `started` is what the worker was started
    with.
    """

    home: str
    free_bytes: int
    kind: str  # of KINDS
    uv: str = ""
    versions: frozenset[str] = frozenset()
    version: str = ""  # the one that is to run, once that is known
    config: str = ""
    key: str = ""
    service: str = ""
    started: str = ""
    is_alive: bool = False
    turn: str = "0"  # the number of the last launch or stop of this worker

    def folder(self, name: str) -> str:
        return f"{self.home}/{folder_of(name)}"

    def log(self, name: str) -> str:
        return f"{self.folder(name)}/worker.log"

    def command(self, name: str) -> Sequence[str]:
        """What serves as the worker of this name."""
        python = f"{self.home}/.brigade/versions/{self.version}/bin/python"
        # -P: or a folder named worker in that home would be run instead
        return python, "-P", "-m", "worker", "--config", f"{self.folder(name)}/cluster.yaml", "--name", name


def folder_of(name: str) -> str:
    """Where a worker's files lie below its user's home, one for each name: even `..` is one."""
    return f".brigade/worker-{name}"


def read_found(told: Mapping[str, Sequence[str]]) -> Found:
    """From the lines of look.sh by their first words.

    Raises:
        BrigadeError: what is needed is missing: no shell of a Unix answered; or the rest cannot be worked with.
    """
    last = {word: lines[-1] for word, lines in told.items()}
    room, turn = _ROOM.search(last.get("free", "")), last.get("turn", "")
    if not ({"home", "kind"} <= set(last) and room):
        raise BrigadeError("expected macOS or Linux there, found no shell that tells its home and free space")
    if _CONTROL.search(last["home"]):  # which no property list may hold
        raise BrigadeError(f"expected a home without control characters there, found {printable(last['home'])}")
    if last["kind"] not in KINDS:
        raise BrigadeError(f"expected {', '.join(KINDS)} as the kind of service, found {printable(repr(last['kind']))}")
    return Found(
        last["home"],
        int(room[1]) * 1024,
        last["kind"],
        uv=last.get("uv", ""),
        versions=frozenset(told.get("version", ())),
        config=last.get("config", ""),
        key=last.get("key", ""),
        service=last.get("service", ""),
        started=last.get("started", ""),
        is_alive="alive" in told,
        turn=turn if _TURN.fullmatch(turn) else "0",
    )


def require_room(found: Found) -> None:
    """Raise BrigadeError if there is too little space for an installation."""
    if found.free_bytes < ROOM_BYTES:
        need, free = (f"{size / 2**30:.1f} GiB" for size in (ROOM_BYTES, found.free_bytes))
        raise BrigadeError(f"expected {need} free at {printable(found.home)} for the installation, found {free}")


def read_pythons(lines: Sequence[str]) -> list[Python]:
    """From the lines of pythons.sh."""
    found = {}
    for line in lines:
        if match := re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9}) (whole|bare) (.+)", line):
            version = int(match[1]), int(match[2]), int(match[3])
            found[match[5]] = Python(version, match[5], match[4] == "whole")
    return list(found.values())


def choose_python(pythons: Sequence[Python], here: tuple[int, int]) -> Python:
    """The one to install with: of the version that runs here if it is there, since its packages are known to fit.

    Raises:
        BrigadeError: none will do.
    """
    fitting = [python for python in pythons if python.version >= LEAST_PYTHON and python.is_whole]
    if fitting:
        return max(fitting, key=lambda python: (python.version[:2] == here, python.version))
    least = ".".join(map(str, LEAST_PYTHON))
    raise BrigadeError(
        f"expected uv, or Python {least} or newer with venv and pip, found {_told(pythons)}; on that machine: "
        "curl -LsSf https://astral.sh/uv/install.sh | sh"
    )


def _told(pythons: Sequence[Python]) -> str:
    if not pythons:
        return "none"
    newest = max(pythons, key=lambda python: python.version)
    lacks = "" if newest.is_whole else " without one of them"
    return f"Python {'.'.join(map(str, newest.version))}{lacks}"
