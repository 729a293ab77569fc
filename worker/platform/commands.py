"""Runs system commands that print settings, in English and with limits on time and output."""

import os
import subprocess
from collections.abc import Callable

RunProgram = Callable[..., str]  # takes a program and its arguments; returns its output, "" if it is missing or fails

_SYSTEM = [os.path.join(os.sep, *parts) for parts in (("usr", "sbin"), ("sbin",))]  # often not in a service's PATH
WITHIN_S = 15.0  # system_profiler takes seconds
_MAX_CHARACTERS = 1 << 20


class Commands:
    """A RunProgram that records in `unread` the programs that exist but failed. Blocks: call it from a thread."""

    def __init__(self) -> None:
        self.unread: list[str] = []

    def __call__(self, *command: str) -> str:
        """Return the command's output. The exit code is ignored: some programs report a disabled feature by it."""
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SYSTEM])
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=WITHIN_S,
                env=os.environ | {"LC_ALL": "C", "PATH": path},
            )
        except FileNotFoundError:
            return ""
        except (OSError, subprocess.TimeoutExpired):
            self.unread.append(os.path.basename(command[0]))
            return ""
        return done.stdout[:_MAX_CHARACTERS].decode(errors="replace")
