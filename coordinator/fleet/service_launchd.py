"""A worker as a launchd agent of its user, on macOS: the property list. remote/shared.sh loads and unloads it."""

import plistlib

from coordinator.fleet.found import Found

_DRAIN_S = 20  # launchd's patience before it kills: a worker drains for ten seconds


def plist(name: str, found: Found) -> bytes:
    """launchd.plist(5). It starts the worker again if it fails, and at login; not if it has ended in order.

    The worker keeps its Mac awake itself, by a `caffeinate` that ends with it (worker/process/machine.py). Around the
    worker, caffeinate would get launchd's SIGTERM in its place, and no session would be drained.
    """
    log = found.log(name)
    return plistlib.dumps(
        {
            "Label": f"brigade.worker.{name}",
            "ProgramArguments": list(found.command(name)),
            "WorkingDirectory": found.home,
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
