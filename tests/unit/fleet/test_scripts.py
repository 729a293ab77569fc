"""What the scripts do on a machine where not all is as it should be."""

from pathlib import Path

import pytest

from tests.unit.fleet.machine import FakeMachine


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
