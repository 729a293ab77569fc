"""The definition of a worker's service: launchd on macOS, systemd on Linux, a plain process without either. Pure.

remote/shared.sh installs, starts and stops what these functions define.
"""

import plistlib
import shlex
from collections.abc import Sequence

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


def define_service(kind: str, name: str, home: str, folder: str, command: Sequence[str]) -> bytes:
    """Return the file that defines the service of the worker `name`.

    Args:
        kind: launchd, systemd or daemon.
        home: its user's home. folder: where the worker's files are.
        command: what becomes the worker.
    """
    return {"launchd": _launchd, "systemd": _systemd, "daemon": _daemon}[kind](name, home, folder, command)


def _launchd(name: str, home: str, folder: str, command: Sequence[str]) -> bytes:
    """A user's agent, as launchd.plist(5) has it: restarted if it fails and started at login, not after a clean exit.

    The worker keeps its Mac awake itself, by a `caffeinate` that ends with it (worker/platform/machine.py): a
    `caffeinate` around it would get launchd's SIGTERM in its place, and no session would be drained.
    """
    log = f"{folder}/worker.log"
    return plistlib.dumps(
        {
            "Label": f"brigade.worker.{name}",
            "ProgramArguments": list(command),
            "WorkingDirectory": home,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": _DRAIN_S,
            "ProcessType": "Interactive",  # no limits of processor and disk, as a background job would have
            "LimitLoadToSessionType": ["Aqua", "Background"],  # logged in at the screen, or by ssh only
            "StandardOutPath": log,
            "StandardErrorPath": log,
            "Umask": 0o077,
        }
    )


def _systemd(name: str, home: str, folder: str, command: Sequence[str]) -> bytes:
    """A user's unit, as systemd.service(5) has it: restarted if it fails, since its address may appear with a cable."""
    words = (word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$").replace("%", "%%") for word in command)
    line = " ".join(f'"{word}"' for word in words)
    log = f"{folder}/worker.log".replace("%", "%%")
    return _UNIT.format(name=name, command=line, log=log, drain_s=_DRAIN_S).encode()


def _daemon(name: str, home: str, folder: str, command: Sequence[str]) -> bytes:
    """A script without a service manager: nothing restarts it; remote/shared.sh finds it by the file of its number."""
    pid_file = shlex.quote(f"{folder}/worker.pid")
    return _SCRIPT.format(home=shlex.quote(home), pid_file=pid_file, command=shlex.join(command)).encode()
