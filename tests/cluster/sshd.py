"""Macs of a test: an OpenSSH server on loopback with a port per Mac, each with a home of its own, and an ssh for them.

There Python finds, by PYTHONPATH, the packages that the tests run with, but not this project: pip has nothing to fetch.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.processes import Stream
from tools.worker_process import free_port

_EMPTY = Path("/run/sshd")  # where the server insists on an empty folder
_MAY = os.getuid() == 0 or _EMPTY.is_dir()
PROGRAM = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin") if _MAY else None
SSH = shutil.which("ssh")
WHY_NOT = "no OpenSSH server here: brigade launch is not tried"
HOMES = {"mini": "Anna's home", "air": "air"}  # the first has what a shell would stumble over
_SERVER = """\
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
_CLIENT = """\
Host *
  HostName 127.0.0.1
  User {user}
  IdentityFile "{keys}/user"
  IdentitiesOnly yes
  UserKnownHostsFile "{keys}/known_hosts"
  GlobalKnownHostsFile none
"""
# What a user may have for sessions of their own, one of which is open and has the port
_INTERACTIVE = """\
  RequestTTY force
  RemoteCommand tmux attach
  LocalForward 127.0.0.1:{port} 127.0.0.1:1
  ExitOnForwardFailure yes
"""


@dataclass(frozen=True)
class Macs:
    """Their homes and free ports for their workers, by name; `folder` has a program `ssh` that knows them."""

    folder: Path
    homes: dict[str, Path]
    ports: dict[str, int]

    def folder_of(self, name: str) -> Path:
        """Where a launched worker's files are."""
        return self.homes[name] / ".brigade" / f"worker-{name}"

    def process(self, name: str) -> psutil.Process | None:
        """The worker of this name, while it runs."""
        with contextlib.suppress(OSError, psutil.Error):
            process = psutil.Process(int((self.folder_of(name) / "worker.pid").read_text()))
            if process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def entry(self, name: str) -> str:
        """Its line in a cluster.yaml."""
        return f"  - {{name: {name}, address: '127.0.0.1:{self.ports[name]}', ssh: {name}}}\n"

    def end(self) -> None:
        """Whatever state their workers are in."""
        for home in self.homes.values():
            for process in processes_naming(home):
                process.kill()


@contextlib.contextmanager
def macs(folder: Path) -> Iterator[Macs]:
    """Started, and ended with all that runs below their homes."""
    assert PROGRAM and SSH
    found = Macs(folder, {name: folder / home for name, home in HOMES.items()}, {name: free_port() for name in HOMES})
    ports = {name: free_port() for name in HOMES}
    _write_keys(folder, ports.values())
    _write_client(folder, ports)
    (folder / "sshd_config").write_text(_server_config(folder, found.homes, ports))
    if os.getuid() == 0:
        _EMPTY.mkdir(mode=0o755, exist_ok=True)
    server = subprocess.Popen(
        [PROGRAM, "-D", "-e", "-f", folder / "sshd_config"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert server.stderr
    said = Stream(server.stderr)
    try:
        for port in ports.values():
            said.wait_match(rf"listening on \S+ port {port}", 10.0)
        yield found
    finally:
        found.end()
        server.send_signal(signal.SIGTERM)
        server.wait(10.0)
        said.close()


def _write_keys(folder: Path, ports: Iterable[int]) -> None:
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    host = (folder / "host.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"[127.0.0.1]:{port} {host}" for port in ports))


def _write_client(folder: Path, ports: dict[str, int]) -> None:
    hosts = "".join(f"Host {name}\n  Port {port}\n{_INTERACTIVE.format(port=port)}" for name, port in ports.items())
    user = psutil.Process().username()
    (folder / "ssh_config").write_text(hosts + _CLIENT.format(user=user, keys=folder))
    program = folder / "programs" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {SSH} -F {shlex.quote(str(folder / "ssh_config"))} "$@"\n')
    program.chmod(0o755)


def _server_config(folder: Path, homes: dict[str, Path], ports: dict[str, int]) -> str:
    packages, programs = link_packages(folder / "packages"), _programs(folder / "remote_programs")
    lines = [_SERVER.format(keys=folder)]
    lines += [f"ListenAddress 127.0.0.1:{port}\n" for port in ports.values()]
    for name, port in ports.items():
        homes[name].mkdir()
        env = {
            "HOME": homes[name],
            "PATH": f"{programs}:/usr/bin:/bin",
            "PYTHONPATH": packages,
            "PIP_NO_INDEX": "1",
            "HF_HUB_OFFLINE": "1",
        }
        lines.append(f"Match LocalPort {port}\n  SetEnv " + " ".join(f'"{key}={value}"' for key, value in env.items()))
        lines.append("\n")
    return "".join(lines)


def link_packages(folder: Path) -> Path:
    """Link to all packages that the tests run with, except this project."""
    folder.mkdir()
    name_of_such = Path(sysconfig.get_paths()["purelib"]).name
    for entry in (each for path in map(Path, sys.path) if path.name == name_of_such for each in path.iterdir()):
        if "brigade" not in entry.name and not (folder / entry.name).exists():
            (folder / entry.name).symlink_to(entry)
    return folder


def _programs(folder: Path) -> Path:
    folder.mkdir()
    base = getattr(sys, "_base_executable", sys.executable)
    (folder / "python{}.{}".format(*sys.version_info)).symlink_to(base)
    return folder


def processes_naming(path: Path) -> list[psutil.Process]:
    """Return the processes with this path, or one below it, in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(path) in word for word in process.cmdline()):
                found.append(process)
    return found
