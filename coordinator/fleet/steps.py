"""What has to be done on a node, from what is wanted and what was found there. Pure."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from coordinator.fleet.found import Found
from coordinator.fleet.service_daemon import script
from coordinator.fleet.service_launchd import plist
from coordinator.fleet.service_systemd import unit

DEFINITIONS: Mapping[str, Callable[[str, Found], bytes]] = {"launchd": plist, "systemd": unit, "daemon": script}


class Action(StrEnum):
    """What the user wants of workers that are to run."""

    START = "start"  # whatever does not run, or not as it should
    RESTART = "restart"  # whatever runs, too
    UPDATE = "update"  # the same after a new installation


@dataclass(frozen=True)
class Wish:
    """What is to be on a node: its configuration, its certificate if links are encrypted, its service's definition."""

    version: str
    config: bytes
    key: bytes | None
    service: bytes

    @property
    def started(self) -> str:
        """Another one for whatever needs a restart; a worker takes up a new certificate without."""
        return digest(b"\n".join((self.version.encode(), self.config, self.service)))


@dataclass(frozen=True)
class Steps:
    """`files` are to be put in their places, by the names that settle.sh knows."""

    installs: bool
    files: Mapping[str, bytes]
    restarts: bool
    was_alive: bool

    @property
    def are_none(self) -> bool:
        return not (self.installs or self.files or self.restarts)

    @property
    def story(self) -> str:
        """What was done, for a table."""
        started = "restarted" if self.was_alive else "started"
        done = {"installed": self.installs, "new certificate": "key.pem" in self.files, started: self.restarts}
        return ", ".join(what for what, is_done in done.items() if is_done) or "unchanged"


def version_folder(package: str, there: Iterable[str], action: Action) -> str:
    """Where the package of this id is or will be installed: an update leaves alone what a worker may be running.

    Args:
        there: the folders of installed versions: an id each, and for updates of one a dot and a number.
    """
    found = (re.fullmatch(rf"{re.escape(package)}(?:\.(\d{{1,9}}))?", each) for each in there)
    numbers = [int(each[1] or 0) for each in found if each]
    number = max(numbers, default=0) + (1 if numbers and action is Action.UPDATE else 0)
    return f"{package}.{number}" if number else package


def steps_for(wish: Wish, found: Found, action: Action) -> Steps:
    """The fewest that make it so."""
    are_there = {"cluster.yaml": found.config, "key.pem": found.key, "service": found.service}
    wanted = {"cluster.yaml": wish.config, "key.pem": wish.key, "service": wish.service}
    files = {name: file for name, file in wanted.items() if file is not None and digest(file) != are_there[name]}
    installs = wish.version not in found.versions
    is_as_wished = found.is_alive and found.started == wish.started and not files.keys() - {"key.pem"}
    restarts = installs or action is Action.RESTART or not is_as_wished
    return Steps(installs, files, restarts, found.is_alive)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
