"""What the scripts do on a machine where not all is as it should be."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.fleet.machine import FakeMachine

# As far as it matters here. An installation writes down whose lock there is meanwhile.
UV = """\
cat .brigade/versions/lock/pid >>turns
[ "$1" = venv ] || exit 0
for target; do :; done
mkdir -p "$target/bin"
echo '#!/bin/sh' >"$target/bin/python"
chmod +x "$target/bin/python"
"""
# Whoever waits a second finds, after it, that the other installation is done.
SLEEP = "cat .brigade/versions/lock/pid >>waited\nrm -r .brigade/versions/lock"
# Another one who waits was quicker, once: it has dropped the stale lock and has one of its own now.
MV = """\
if [ "$1" = "$PWD/.brigade/versions/lock" ] && mkdir once 2>/dev/null; then
    rm -r "$1"
    mkdir "$1"
    echo {pid} >"$1/pid"
fi
exec {mv} "$@"
"""


@pytest.fixture(params=["Linux", "Darwin"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path, request.param, "launchctl", "exit 113")


def folder_of(machine: FakeMachine, name: str) -> Path:
    folder = machine.home / ".brigade" / f"worker-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("kind", ["", "upstart", "main"])
@pytest.mark.parametrize("script", ["look", "stop", "watch"])
def test_a_service_of_no_known_kind_is_a_failure(machine: FakeMachine, script: str, kind: str) -> None:
    """It may be an empty file, of a full disk."""
    file = folder_of(machine, "mini") / "kind"
    file.write_text(kind)
    done = machine.attempt(script)
    assert done.returncode == 1 and "was" not in done.stdout
    assert done.stderr == f"expected launchd, systemd or daemon in {file}, found '{kind}': remove it, launch again\n"


def test_what_cannot_be_written_leaves_what_was_there(machine: FakeMachine) -> None:
    file = folder_of(machine, "mini") / "kind"
    file.write_text("daemon\n")
    file.with_name("kind.new").symlink_to("/dev/full")
    done = machine.attempt("settle", kind="systemd", restarts="no", version="v", started="")
    assert done.returncode == 1 and f"cannot write {file}\n" in done.stderr
    assert file.read_text() == "daemon\n"


def test_nothing_is_dropped_while_another_installs(machine: FakeMachine) -> None:
    lock = locked(machine, str(os.getpid()))
    unused = lock.with_name("unused")
    unused.mkdir()
    settle(machine, "mini", "v1")
    assert unused.exists() and (lock / "pid").read_text() == str(os.getpid())
    (lock / "pid").write_text(ended())
    settle(machine, "mini", "v1")
    assert not unused.exists() and not lock.exists()


def test_what_was_installed_for_another_worker_is_not_dropped_before_that_one_has_it(machine: FakeMachine) -> None:
    for name, version in (("mini", "v1"), ("air", "v2")):
        install(machine, name, version)
        settle(machine, "mini", "v1")
    assert versions(machine) == {"v1", "v2"}
    settle(machine, "air", "v2")
    settle(machine, "air", "v1")
    assert versions(machine) == {"v1"}


@pytest.mark.parametrize("pid", ["", "no number", "of one that has ended"])
def test_a_lock_that_nobody_holds_is_waited_for_by_nobody(machine: FakeMachine, pid: str) -> None:
    lock = locked(machine, ended() if pid.startswith("of") else pid)
    os.utime(lock, (0, lock.stat().st_mtime - 90))
    told = install(machine, "mini", "v1")
    assert "waiting" not in told and not (machine.home / "waited").exists()
    assert versions(machine) == {"v1"}


@pytest.mark.parametrize("pid", ["", str(os.getpid())], ids=["nobody yet", "one that lives"])
def test_a_lock_that_another_may_hold_is_waited_for(machine: FakeMachine, pid: str) -> None:
    lock = locked(machine, pid)
    os.utime(lock, (0, lock.stat().st_mtime - (1700 if pid else 30)))
    assert "@brigade phase waiting for another installation" in install(machine, "mini", "v1")
    assert (machine.home / "waited").read_text() == pid
    turns = set((machine.home / "turns").read_text().split())
    assert len(turns) == 1 and pid not in turns and not lock.exists()


def test_of_two_who_wait_neither_takes_the_others_turn(machine: FakeMachine) -> None:
    locked(machine, ended())
    machine.write("mv", MV.format(pid=os.getpid(), mv=shutil.which("mv")))
    assert "waiting for another installation" in install(machine, "mini", "v1")
    assert (machine.home / "waited").read_text().split() == [str(os.getpid())]


def locked(machine: FakeMachine, pid: str) -> Path:
    """The lock, with this in it; without a file if there is nothing in it."""
    lock = machine.home / ".brigade" / "versions" / "lock"
    lock.mkdir(parents=True, exist_ok=True)
    if pid:
        (lock / "pid").write_text(pid)
    return lock


def versions(machine: FakeMachine) -> set[str]:
    return {path.name for path in (machine.home / ".brigade" / "versions").iterdir()}


def ended() -> str:
    """The number of a process that has."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return str(process.pid)


def install(machine: FakeMachine, name: str, version: str) -> str:
    folder_of(machine, name)
    machine.write("uv", UV)
    machine.write("sleep", SLEEP)
    return machine.run("install", name=name, version=version, uv="uv", python="", wanted="3.12", wheel_name="wheel")


def settle(machine: FakeMachine, name: str, version: str) -> None:
    folder_of(machine, name)
    machine.run("settle", name=name, kind="daemon", restarts="no", started="", version=version)
