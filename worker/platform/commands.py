"""Runs the commands that show a system's settings, in English and bounded in time and output."""

import os
import subprocess
from collections.abc import Callable

RunProgram = Callable[..., str]  # takes a command's words; returns its output, "" if it is missing or takes too long

_SYSTEM = [os.path.join(os.sep, *parts) for parts in (("usr", "sbin"), ("sbin",))]  # a service may lack them in PATH
_WITHIN_S = 15.0  # system_profiler takes seconds
_MAX_CHARACTERS = 1 << 20


class Commands:
    """An Ask that lists in `unread` the existing commands that failed. It blocks, so call it from a thread."""

    def __init__(self) -> None:
        self.unread: list[str] = []

    def __call__(self, *command: str) -> str:
        """Return the command's output, whatever its exit code: some fail to report that a feature is off."""
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SYSTEM])
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_WITHIN_S,
                env=os.environ | {"LC_ALL": "C", "PATH": path},
            )
        except FileNotFoundError:
            return ""
        except (OSError, subprocess.TimeoutExpired):
            self.unread.append(os.path.basename(command[0]))
            return ""
        return done.stdout[:_MAX_CHARACTERS].decode(errors="replace")
