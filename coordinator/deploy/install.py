"""What `brigade launch` finds on a node's machine, what has to be there, and the fewest steps between both. Pure."""

import hashlib
import plistlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import yaml

from worker.config import KEYS_FOLDER
from worker.errors import BrigadeError
from worker.platform.text import printable

SERVICES = ("launchd", "systemd", "daemon")
_MIN_PYTHON = (3, 11, 3)  # as pyproject.toml says
_NEEDED_BYTES = 2 << 30  # of an installation, downloads included
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_TURN = re.compile(r"\d{1,18}")
_DF_LINE = re.compile(r"(\d{1,18})\s+\d+%")  # of `df -Pk`: KiB available, then the share in use
# Keys of cluster.yaml that workers do not read.
_COORDINATOR_KEYS = {"context", "layers", "order", "objective", "coordinator"}
_DRAIN_S = 20  # before a service manager kills: a worker drains for ten seconds
_UNIT = """\
[Unit]
Description=brigade worker {name}
StartLimitIntervalSec=0

[Service]
ExecStart={command}
WorkingDirectory=~
Restart=on-failure
RestartSec=10
TimeoutStopSec={drain_s}
UMask=0077
StandardOutput=append:{log}
StandardError=append:{log}

[Install]
WantedBy=default.target
"""
_SCRIPT = """\
#!/bin/sh
cd {home} || exit 1
echo $$ >{pid_file}
exec {command}
"""


def uv_request(python: tuple[int, int]) -> str:
    """Return uv's words for the releases of this version of Python on which brigade runs."""
    (major, minor), least = python, max((*python, 0), _MIN_PYTHON)
    return f">={'.'.join(map(str, least))},<{major}.{minor + 1}"


@dataclass(frozen=True)
class Python:
    """An interpreter on a node's machine; `is_whole` if it has venv and pip."""

    version: tuple[int, ...]
    path: str
    is_whole: bool


@dataclass(frozen=True)
class RemoteState:
    """A node's machine and the worker there, as remote/look.sh reports them.

    `config`, `key` and `service` are the hexadecimal SHA-256 of those files, "" for a missing one; `started` is the
    `Target.started` of the running worker.
    """

    home: str
    free_bytes: int
    kind: str  # of SERVICES
    uv: str = ""
    versions: frozenset[str] = frozenset()  # installed
    config: str = ""
    key: str = ""
    service: str = ""
    started: str = ""
    is_alive: bool = False
    turn: str = "0"  # the number of the last launch or stop of this worker


def worker_folder(name: str) -> str:
    """Return the folder of a worker's files, relative to its user's home. Even the name `..` stays inside it."""
    return f".brigade/worker-{name}"


def read_state(lines: Mapping[str, Sequence[str]]) -> RemoteState:
    """Parse the lines of look.sh, grouped by their first word.

    Raises:
        BrigadeError: the machine is no Unix, or reports a home or a kind of service that cannot be used.
    """
    last = {word: of_word[-1] for word, of_word in lines.items()}
    free, turn = _DF_LINE.search(last.get("free", "")), last.get("turn", "")
    if not ({"home", "kind"} <= set(last) and free):
        raise BrigadeError("expected macOS or Linux there, found no shell that reports its home and free space")
    if _CONTROL.search(last["home"]):  # a property list cannot hold them
        raise BrigadeError(f"expected a home without control characters there, found {printable(last['home'])}")
    if last["kind"] not in SERVICES:
        kinds = ", ".join(SERVICES)
        raise BrigadeError(f"expected {kinds} as the kind of service, found {printable(repr(last['kind']))}")
    texts = {key: last.get(key, "") for key in ("uv", "config", "key", "service", "started")}
    return RemoteState(
        last["home"],
        int(free[1]) * 1024,
        last["kind"],
        versions=frozenset(lines.get("version", ())),
        is_alive="alive" in lines,
        turn=turn if _TURN.fullmatch(turn) else "0",
        **texts,
    )


def require_space(state: RemoteState) -> None:
    """Raise BrigadeError if the disk is too full for an installation."""
    if state.free_bytes < _NEEDED_BYTES:
        need, free = (f"{size / 2**30:.1f} GiB" for size in (_NEEDED_BYTES, state.free_bytes))
        raise BrigadeError(f"expected {need} free at {printable(state.home)} for the installation, found {free}")


def read_pythons(lines: Sequence[str]) -> list[Python]:
    """Parse the lines of pythons.sh."""
    found = {}
    for line in lines:
        if match := re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9}) (whole|bare) (.+)", line):
            found[match[5]] = Python(tuple(map(int, match.group(1, 2, 3))), match[5], match[4] == "whole")
    return list(found.values())


def choose_python(pythons: Sequence[Python], here: tuple[int, int]) -> Python:
    """Return the interpreter to install with, preferably of this process's version: its packages are known to fit.

    Raises:
        BrigadeError: none is new enough and has venv and pip.
    """
    fitting = [python for python in pythons if python.version >= _MIN_PYTHON and python.is_whole]
    if fitting:
        return max(fitting, key=lambda python: (python.version[:2] == here, python.version))
    found = "none"
    if pythons:
        newest = max(pythons, key=lambda python: python.version)
        found = f"Python {'.'.join(map(str, newest.version))}{'' if newest.is_whole else ' without one of them'}"
    raise BrigadeError(
        f"expected uv, or Python {'.'.join(map(str, _MIN_PYTHON))} or newer with venv and pip, found {found}; on that "
        "machine: curl -LsSf https://astral.sh/uv/install.sh | sh"
    )


class LaunchMode(StrEnum):
    """How far a launch goes with workers that run already."""

    START = "start"  # start workers that do not run, or run with other files
    RESTART = "restart"  # restart all
    UPDATE = "update"  # install anew and restart all


@dataclass(frozen=True)
class Target:
    """What has to be on a node's machine: a version, and the contents of files; `key` is None without encryption."""

    version: str
    config: bytes
    key: bytes | None
    service: bytes

    @classmethod
    def of(cls, name: str, raw: Mapping[str, Any], version: str, key: bytes | None, state: RemoteState) -> "Target":
        """Return the target of the worker `name`; `raw` are the keys of a valid cluster.yaml."""
        config = yaml.safe_dump(node_part(raw, name), sort_keys=False, allow_unicode=True).encode()
        return cls(version, config, key, define_service(state, name, version))

    @property
    def started(self) -> str:
        """A digest that changes with whatever requires a restart; a worker reads a new certificate without one."""
        return digest(b"\n".join((self.version.encode(), self.config, self.service)))


@dataclass(frozen=True)
class Steps:
    """What to do on a node's machine; `files` are to be replaced, by the names that settle.sh knows."""

    installs: bool
    files: Mapping[str, bytes] = field(default_factory=dict)
    restarts: bool = False
    was_alive: bool = False

    @property
    def are_none(self) -> bool:
        return not (self.installs or self.files or self.restarts)

    @property
    def summary(self) -> str:
        started = "restarted" if self.was_alive else "started"
        done = {"installed": self.installs, "new certificate": "key.pem" in self.files, started: self.restarts}
        return ", ".join(what for what, is_done in done.items() if is_done) or "unchanged"


def steps_for(target: Target, state: RemoteState, action: LaunchMode) -> Steps:
    """Return the fewest steps from this state to the target."""
    present = {"cluster.yaml": state.config, "key.pem": state.key, "service": state.service}
    wanted = {"cluster.yaml": target.config, "key.pem": target.key, "service": target.service}
    files = {name: file for name, file in wanted.items() if file is not None and digest(file) != present[name]}
    installs = target.version not in state.versions
    runs_as_wanted = state.is_alive and state.started == target.started and not files.keys() - {"key.pem"}
    restarts = installs or action is LaunchMode.RESTART or not runs_as_wanted
    return Steps(installs, files, restarts, state.is_alive)


def version_folder(package: str, existing: Iterable[str], action: LaunchMode) -> str:
    """Return the folder of the package with this id; an update gets a new one, since a worker may run the old one.

    Args:
        existing: folders of installed versions: an id each, for updates of that id followed by a dot and a number.
    """
    found = (re.fullmatch(rf"{re.escape(package)}(?:\.(\d{{1,9}}))?", each) for each in existing)
    numbers = [int(each[1] or 0) for each in found if each]
    number = max(numbers, default=0) + (1 if numbers and action is LaunchMode.UPDATE else 0)
    return f"{package}.{number}" if number else package


def node_part(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the part of cluster.yaml that the worker `name` needs: its own entry and the keys that concern workers.

    Another worker's new address, or the coordinator's new split, thus does not restart this one.

    Args:
        raw: the keys of a cluster.yaml that `load_cluster` accepts.
    """
    part = {key: value for key, value in raw.items() if key not in _COORDINATOR_KEYS}
    if part.get("tls"):
        part["tls"] = {"keys": KEYS_FOLDER}
    if part.get("models"):  # folders beside this machine's file do not exist there: take them from the user's home
        part["models"] = [each if each.startswith(("/", "~")) else f"~/{each}" for each in part["models"]]
    [entry] = [worker for worker in raw["workers"] if worker["name"] == name]
    part["workers"] = [{key: value for key, value in entry.items() if key != "ssh"}]
    return part


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def define_service(state: RemoteState, name: str, version: str) -> bytes:
    """Return the file that defines the worker's service, for the kind of service that its machine has.

    remote/shared.sh installs, starts and stops it. All kinds but the plain process restart a worker that fails.
    """
    folder = f"{state.home}/{worker_folder(name)}"
    python = f"{state.home}/.brigade/versions/{version}/bin/python"
    # -P: a folder named worker in the home must not be run instead
    command = [python, "-P", "-m", "worker", "--config", f"{folder}/cluster.yaml", "--name", name]
    log = f"{folder}/worker.log"
    if state.kind == "launchd":
        return _launchd_agent(name, state.home, command, log)
    if state.kind == "systemd":  # systemd.service(5)
        escaped = (
            word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$").replace("%", "%%") for word in command
        )
        line = " ".join(f'"{word}"' for word in escaped)
        return _UNIT.format(name=name, command=line, log=log.replace("%", "%%"), drain_s=_DRAIN_S).encode()
    pid_file = shlex.quote(f"{folder}/worker.pid")  # by which remote/shared.sh finds the process
    return _SCRIPT.format(home=shlex.quote(state.home), pid_file=pid_file, command=shlex.join(command)).encode()


def _launchd_agent(name: str, home: str, command: Sequence[str], log: str) -> bytes:
    """Return a user's agent (launchd.plist(5)) that starts at login, and again if it fails, not after a clean exit.

    The worker keeps its Mac awake itself, with a `caffeinate` that ends with it (worker/platform/machine.py): a
    `caffeinate` around it would get launchd's SIGTERM in its place, and no session would be drained.
    """
    return plistlib.dumps(
        {
            "Label": f"brigade.worker.{name}",
            "ProgramArguments": command,
            "WorkingDirectory": home,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": _DRAIN_S,
            "ProcessType": "Interactive",  # without a background job's limits of processor and disk
            "LimitLoadToSessionType": ["Aqua", "Background"],  # logged in at the screen, or by ssh only
            "StandardOutPath": log,
            "StandardErrorPath": log,
            "Umask": 0o077,
        }
    )
