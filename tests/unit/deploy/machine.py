"""A machine of a test, on which our scripts run with programs that play the system's."""

import os
import shlex
import subprocess
from pathlib import Path

from coordinator.deploy.ssh import assigned, text_of

PROC = Path("/proc/self/stat")  # without it the scripts for Linux cannot be tried
_ASKS = ("print ", "--user show-environment", "--user --quiet is-active ")


class FakeMachine:
    """A home, and a service's program that knows what was loaded and writes down how it is called."""

    def __init__(self, folder: Path, system: str, program: str, does: str) -> None:
        self.home = folder / "home"
        self.shell = ["bash", "--posix"] if system == "Darwin" else ["dash"]  # what /bin/sh is on most of them
        self._programs = folder / "programs"
        self._calls = folder / "calls"
        for each in (self.home, self._programs):
            each.mkdir()
        self.write("uname", f"echo {system}")
        self.write("id", "echo 501")
        self.write("loginctl", "echo yes")
        if PROC.exists():
            self.write("ps", '[ "$1 $2 $3" = "-o lstart= -p" ] && exec cut -d " " -f 22 "/proc/$4/stat" 2>/dev/null')
        self.write(program, f'cd {shlex.quote(str(folder))}\necho "$@" >> calls\n{does}')

    def run(self, script: str, **values: str) -> str:
        """What one of our scripts tells there."""
        done = self.attempt(script, **values)
        done.check_returncode()
        return done.stdout

    def attempt(self, script: str, **values: str) -> subprocess.CompletedProcess[str]:
        """The same where it may fail."""
        env = {"HOME": str(self.home), "PATH": f"{self._programs}:{os.environ['PATH']}"}
        usual = {"name": "mini", "key_file": "mini.pem", "parcel": "sent", "seen": "0"}
        fed = assigned(usual | values) + text_of(script)
        return subprocess.run(
            [*self.shell, "-s"], input=fed.decode(), env=env, capture_output=True, text=True, timeout=60
        )

    def settle(self, kind: str, service: bytes, **values: str) -> str:
        """Start the worker by this definition; what that tells."""
        sent = self.home / ".brigade" / "worker-mini" / "sent"
        sent.mkdir(parents=True)
        (sent / "service").write_bytes(service)
        self.installed("v")
        return self.run("settle", **{"kind": kind, "restarts": "yes", "started": "x", "version": "v", **values})

    def installed(self, version: str) -> Path:
        """Put a version there that is complete."""
        folder = self.home / ".brigade" / "versions" / version
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").touch(mode=0o700)
        (folder / "complete").touch()
        return folder

    def hold(self, thing: str, pid: int, number: int = 1) -> Path:
        """Have this process have a turn at something, the first one or a later one."""
        turn = self.home / ".brigade" / "turns" / thing / str(number)
        turn.parent.mkdir(parents=True, exist_ok=True)
        turn.symlink_to(identity(pid))
        return turn

    def told(self) -> list[str]:
        """The commands that changed something, since the last time."""
        lines = self._calls.read_text().splitlines()
        self._calls.write_text("")
        return [line for line in lines if not line.startswith(_ASKS)]

    def write(self, name: str, text: str) -> None:
        """Put a program there that is found before any other of its name."""
        (self._programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (self._programs / name).chmod(0o755)


def identity(pid: int) -> str:
    """A process as the scripts call it."""
    if PROC.exists():
        return f"{pid} {Path(f'/proc/{pid}/stat').read_text().split()[21]}"
    env = os.environ | {"LC_ALL": "C", "TZ": "UTC0"}
    told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], env=env, capture_output=True, text=True, check=True)
    return f"{pid} " + told.stdout.removesuffix("\n")
