"""What the scripts do on a machine where not all is as it should be."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from coordinator.deploy.ssh import Remote
from tests.unit.deploy.machine import PROC, FakeMachine

# As far as it matters here. Whoever installs while another does leaves a note of it.
UV = """\
[ "$1" = venv ] || exit 0
mkdir installing || echo "$*" >>at_once
for target; do :; done
mkdir -p "$target/bin"
echo '#!/bin/sh' >"$target/bin/python"
chmod +x "$target/bin/python"
echo "$target" >>made
rmdir installing
"""
SLEEP = "exec {sleep} 0.01"
# Whoever waits a second finds, after it, that the other one has ended.
SLEEP_TO_ITS_END = "kill -KILL {pid}; while kill -0 {pid}; do :; done 2>/dev/null"


@pytest.fixture(params=["Linux", "Darwin"] if PROC.exists() else ["Darwin"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> FakeMachine:
    found = FakeMachine(tmp_path, request.param, "launchctl", "exit 113")
    found.write("uv", UV)
    found.write("sleep", SLEEP.format(sleep=shutil.which("sleep")))
    return found


def folder_of(machine: FakeMachine, name: str) -> Path:
    folder = machine.home / ".brigade" / f"worker-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_service_of_no_known_kind_is_a_failure(machine: FakeMachine) -> None:
    """It may be an empty file, of a full disk."""
    file = folder_of(machine, "mini") / "kind"
    for script, kind in (("look", ""), ("look", "upstart"), ("look", "main"), ("stop", ""), ("watch", "upstart")):
        file.write_text(kind)
        done = machine.attempt(script)
        told = f"@brigade expected launchd, systemd or daemon in {file}, found '{kind}': remove it, launch again\n"
        assert (done.returncode, done.stderr) == (1, told) and "was" not in done.stdout


def test_nothing_is_dropped_while_another_installs_and_old_parcels_go_after_an_hour(machine: FakeMachine) -> None:
    folder = folder_of(machine, "mini")
    for name, minutes in (("sent-old", 90), ("sent-new", 30)):  # of launches that were cut off
        (folder / name).mkdir()
        (folder / name / "wheel").write_text("x")
        os.utime(folder / name, (0, folder.stat().st_mtime - 60 * minutes))
    unused = machine.installed("unused")
    with living() as other:
        machine.hold("versions", other)
        settle(machine, "mini", "v1")
        assert versions(machine) == {"v1", "unused"} and (unused / "complete").exists()
    settle(machine, "mini", "v1")
    assert versions(machine) == {"v1"}
    assert [each.name for each in folder.glob("sent*")] == ["sent-new"]


def test_half_made_versions_of_a_launch_that_was_cut_off_are_removed(machine: FakeMachine) -> None:
    settle(machine, "mini", "v1")
    for half in ("v1.1", "v2", "v3"):
        (machine.home / ".brigade" / "versions" / half / "lib").mkdir(parents=True)
    (folder_of(machine, "air") / "version").write_text("v3\n")  # of a worker that may run
    with living() as other:
        machine.hold("versions", other, 9)
        machine.run("look")
        assert versions(machine) == {"v1", "v1.1", "v2", "v3"}
    machine.run("look")
    assert versions(machine) == {"v1", "v3"}
    machine.run("look")


def test_what_was_installed_is_not_dropped_before_its_worker_has_it(machine: FakeMachine) -> None:
    for name, version in (("mini", "v1"), ("air", "v2")):
        install(machine, name, version)
        settle(machine, "mini", "v1")
    assert versions(machine) == {"v1", "v2"}
    settle(machine, "air", "v2")
    settle(machine, "air", "v1")
    assert versions(machine) == {"v1"}
    install(machine, "mini", "v2")  # by another launch, for the same worker
    settle(machine, "mini", "v1")
    assert versions(machine) == {"v1", "v2"}


def test_no_worker_is_started_from_a_dropped_version_or_on_a_full_disk(machine: FakeMachine) -> None:
    folder = folder_of(machine, "mini")
    (folder / "started").write_text("old\n")
    done = machine.attempt("settle", kind="daemon", restarts="yes", started="x", version="gone")
    assert done.returncode == 1
    assert done.stderr == "@brigade another launch has just dropped gone there: launch again\n"
    assert (folder / "started").exists()
    file = folder / "kind"
    file.write_text("daemon\n")
    file.with_name("kind.new").symlink_to("/dev/full")
    machine.installed("v")
    done = machine.attempt("settle", kind="systemd", restarts="no", version="v", started="")
    assert done.returncode == 1 and f"cannot write {file}\n" in done.stderr
    assert file.read_text() == "daemon\n"
    folder.with_name("turns").rename(folder.with_name("old"))
    folder.with_name("turns").write_text("")
    done = machine.attempt("install", version="v1", wheel_name="wheel")
    assert done.returncode == 1 and f"cannot write {machine.home}/.brigade/turns/versions\n" in done.stderr


def test_a_version_whose_python_was_removed_is_installed_anew(machine: FakeMachine) -> None:
    """As by Homebrew or uv, to which the environment only links."""
    python = machine.installed("v1") / "bin" / "python"
    assert "@brigade version v1\n" in machine.run("look")
    python.unlink()
    python.symlink_to(machine.home / "gone")
    assert "@brigade version" not in machine.run("look")
    assert machine.attempt("settle", kind="daemon", restarts="no", started="", version="v1").returncode == 1
    install(machine, "mini", "v1")
    assert "@brigade version v1\n" in machine.run("look")


def test_of_many_who_install_one_does_at_a_time_and_what_it_has_made_is_the_others_too(machine: FakeMachine) -> None:
    """The one who had its turn before them has ended, and has left half an installation."""
    wanted = ["v1", "v1", "v1", "v2", "v2", "v3"]
    with living() as other:
        machine.hold("versions", other)
    (machine.home / ".brigade" / "versions" / "v1" / "lib").mkdir(parents=True)
    with ThreadPoolExecutor(len(wanted)) as pool:
        told = list(pool.map(partial(install, machine), map(str, range(len(wanted))), wanted))
    assert not (machine.home / "at_once").exists()
    made = (machine.home / "made").read_text().split()
    assert sorted(Path(each).name for each in made) == ["v1", "v2", "v3"] and len(told) == len(wanted)
    assert not (machine.home / ".brigade" / "versions" / "v1" / "lib").exists()
    assert len(list((machine.home / ".brigade" / "turns" / "versions").iterdir())) == 1


def test_an_installation_that_is_under_way_is_waited_for(machine: FakeMachine) -> None:
    with living() as other:
        machine.hold("versions", other)
        machine.write("sleep", SLEEP_TO_ITS_END.format(pid=other))
        told = install(machine, "mini", "v1")
    assert f"@brigade phase waiting for another installation (process {other} there)\n" in told
    with living() as other:  # nobody waits for a turn of a process that has ended, or had another one's number
        turn = machine.hold("versions", other, 9)
        turn.unlink()
        turn.symlink_to(f"{other} 1")
        assert "waiting" not in install(machine, "mini", "v2")
        machine.hold("versions", other, 19)
    assert "waiting" not in install(machine, "air", "v3")


def test_a_turn_that_does_not_end_is_told_with_its_process(machine: FakeMachine) -> None:
    (folder_of(machine, "mini") / "kind").write_text("daemon\n")
    machine.write("sleep", "exit 0")  # time flies
    with living() as other:
        machine.hold("worker-mini", other)
        done = machine.attempt("stop")
    told = f"@brigade a launch is not done after 60 s: see its process {other} there, or end that\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_an_installation_that_fails_is_told_before_its_own_words_and_leaves_nothing(machine: FakeMachine) -> None:
    parcel = folder_of(machine, "mini") / "sent"
    parcel.mkdir()
    (parcel / "wheel").write_text("x")
    machine.write("uv", '[ "$1" = venv ] && mkdir "$5" && exit 0\necho "  cause: client error (Connect)" >&2\nexit 2')
    done = machine.attempt("install", version="v1", uv="uv", python="", wanted="3.12", wheel_name="wheel")
    told = Remote("mini", "mini").failure(done.returncode, done.stderr).message
    assert told == "uv could not install brigade's packages: cause: client error (Connect)"
    assert versions(machine) == set() and not parcel.exists()


def test_of_a_log_only_what_it_says_since_its_start_is_shown(machine: FakeMachine) -> None:
    log = folder_of(machine, "mini") / "worker.log"
    log.write_text("old\n")
    asked = {"lines": "3", "follow": "no"}
    assert machine.run("log", **asked, since_start="yes") == "old\n"  # of a launch that noted no beginning
    machine.write("systemctl", f'case "$*" in *" restart "*) echo new >>{log} ;; *is-active*) exit 3 ;; esac')
    machine.settle("systemd", b"unit")
    assert machine.run("log", **asked, since_start="yes") == "new\n"
    assert machine.run("log", **asked) == "old\nnew\n"


def test_who_follows_a_log_ends_with_whoever_asked(machine: FakeMachine) -> None:
    """Linux's tail would notice by itself, a Mac's does not."""
    (folder_of(machine, "mini") / "worker.log").touch()
    machine.write("tail", f"exec {shutil.which('sleep')} 90")
    assert machine.run("log", lines="1", follow="yes") == ""


def versions(machine: FakeMachine) -> set[str]:
    return {path.name for path in (machine.home / ".brigade" / "versions").iterdir()}


@contextlib.contextmanager
def living() -> Iterator[int]:
    """A process that has ended afterwards, or before."""
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        yield pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def install(machine: FakeMachine, name: str, version: str) -> str:
    folder_of(machine, name)
    return machine.run("install", name=name, version=version, uv="uv", python="", wanted="3.12", wheel_name="wheel")


def settle(machine: FakeMachine, name: str, version: str) -> None:
    folder_of(machine, name)
    machine.installed(version)
    machine.run("settle", name=name, kind="daemon", restarts="no", started="", version=version)
