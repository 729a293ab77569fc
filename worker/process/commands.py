"""Commands of the system that tell how it is set up: bounded in time, and asked in English."""

import os
import subprocess
from collections.abc import Callable

Ask = Callable[..., str]  # what a command prints; nothing if it is not there, or takes too long

_SYSTEM = [os.path.join(os.sep, *parts) for parts in (("usr", "sbin"), ("sbin",))]  # a service may lack them in PATH
_WITHIN_S = 15.0  # system_profiler takes seconds
_MOST_CHARACTERS = 1 << 20


class Commands:
    """Runs commands, and notes those that were there and gave no answer. Blocks whoever asks: not for an event loop."""

    def __init__(self) -> None:
        self.unread: list[str] = []

    def __call__(self, *command: str) -> str:
        """What it prints, whatever its exit code: some that tell of something switched off fail by it."""
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
        return done.stdout[:_MOST_CHARACTERS].decode(errors="replace")
