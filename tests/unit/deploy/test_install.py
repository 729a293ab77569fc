"""What launch makes of a node's machine: the Python to use, the fewest steps, and the worker's part of cluster.yaml."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.deploy.install import (
    LaunchMode,
    RemoteState,
    Target,
    choose_python,
    digest,
    node_part,
    read_pythons,
    read_state,
    require_space,
    steps_for,
    uv_request,
    version_folder,
)
from worker.config import load_cluster
from worker.errors import BrigadeError

DIGITS = "9" * 5000  # no number is too long to be read
# As `df -Pk .` prints it on macOS, in the form that POSIX asks for.
MAC = {
    "home": ["/Users/anna"],
    "free": ["/dev/disk3s5      971350180 512345678 421234567    55%    /System/Volumes/Data"],
    "uv": ["/Users/anna/.local/bin/uv"],
    "version": ["0123456789abcdef", "fedcba9876543210"],
    "kind": ["launchd"],
    "config": [""],
    "started": ["abc"],
    "alive": ["yes"],
}


def test_a_mac_is_read() -> None:
    found = read_state(MAC)
    assert (found.home, found.kind, found.free_bytes) == ("/Users/anna", "launchd", 421234567 * 1024)
    assert found.versions == {"0123456789abcdef", "fedcba9876543210"} and found.is_alive and found.started == "abc"
    assert found.config == "" and found.key == ""
    require_space(found)
    with pytest.raises(BrigadeError, match=r"expected 2.0 GiB free at /Users/anna for the installation, found 1.5 GiB"):
        require_space(replace(found, free_bytes=3 << 29))
    assert read_state(MAC | {"free": [f"x {DIGITS} 55% /"]}).free_bytes > 0


@pytest.mark.parametrize(
    ("told", "message"),
    [
        *(({missing: []}, "expected macOS or Linux there") for missing in ("home", "free", "kind")),
        ({"kind": [""]}, "expected launchd, systemd, daemon as the kind of service, found ''"),
        ({"kind": ["\x1b[2J"]}, r"found '\x1b[2J'"),
        ({"home": ["/Users/\x1b[2J"]}, "found /Users/\ufffd[2J"),
    ],
)
def test_a_machine_that_cannot_be_worked_with_is_refused(told: dict[str, list[str]], message: str) -> None:
    with pytest.raises(BrigadeError, match=re.escape(message)):
        read_state({word: lines for word, lines in (MAC | told).items() if lines})


def test_the_python_that_fits_best_is_taken_and_without_one_it_is_said_what_to_do() -> None:
    for lines, chosen in (
        (["3.12.4 whole /a", "3.11.9 whole /b", "3.13.0 whole /c"], "/b"),  # 3.11 runs here
        (["3.9.6 whole /old", "3.12.4 whole /a", "3.13.0 bare /c"], "/a"),
        (["nonsense", f"3.{DIGITS}.1 whole /a", "3.11.3 whole /with a space/python3"], "/with a space/python3"),
    ):
        assert choose_python(read_pythons(lines), (3, 11)).path == chosen
    for lines, found in (
        ([], "found none"),
        (["3.9.6 whole /old"], "found Python 3.9.6"),
        (["3.11.3 bare /debian"], "found Python 3.11.3 without one of them"),
        (["3.11.2 whole /debian"], "expected uv, or Python 3.11.3 or newer with venv and pip, found Python 3.11.2"),
    ):
        with pytest.raises(BrigadeError, match=re.escape(found) + ".*astral.sh/uv/install.sh"):
            choose_python(read_pythons(lines), (3, 11))


def test_uv_is_asked_for_a_release_that_runs_here() -> None:
    assert [uv_request(each) for each in ((3, 11), (3, 12))] == [">=3.11.3,<3.12", ">=3.12.0,<3.13"]


TARGET = Target("v2", b"config", b"key", b"service")
AS_WANTED = RemoteState(
    "/h", 1, "daemon", versions=frozenset({"v2"}), config=digest(b"config"), key=digest(b"key"),
    service=digest(b"service"), started=TARGET.started, is_alive=True,
)  # fmt: skip
NOTHING = RemoteState("/h", 1, "daemon")


@pytest.mark.parametrize(
    ("found", "action", "installs", "files", "restarts", "story"),
    [
        (AS_WANTED, "start", False, "", False, "unchanged"),
        (AS_WANTED, "restart", False, "", True, "restarted"),
        (NOTHING, "start", True, "cluster.yaml key.pem service", True, "installed, new certificate, started"),
        (replace(AS_WANTED, is_alive=False), "start", False, "", True, "started"),
        (replace(AS_WANTED, key=""), "start", False, "key.pem", False, "new certificate"),
        (replace(AS_WANTED, config="other"), "start", False, "cluster.yaml", True, "restarted"),
        (replace(AS_WANTED, started="other"), "start", False, "", True, "restarted"),
        (replace(AS_WANTED, versions=frozenset({"v1"})), "start", True, "", True, "installed, restarted"),
    ],
)
def test_fewest_steps(found: RemoteState, action: str, installs: bool, files: str, restarts: bool, story: str) -> None:
    steps = steps_for(TARGET, found, LaunchMode(action))
    assert (steps.installs, " ".join(sorted(steps.files)), steps.restarts) == (installs, files, restarts)
    assert steps.summary == story and steps.are_none == (story == "unchanged")


def test_an_update_has_a_folder_of_its_own() -> None:
    for there, action, folder in (
        ([], "start", "v2"),
        ([], "update", "v2"),
        (["v1", "v2"], "start", "v2"),
        (["v1.7", "v2"], "update", "v2.1"),
        (["v2.1"], "start", "v2.1"),
        (["v2.9", "v2.10", "v2"], "restart", "v2.10"),
        (["v2.10"], "update", "v2.11"),
        (["v2", "v2.old", f"v2.{DIGITS}"], "update", "v2.1"),  # no folders of ours
    ):
        assert version_folder("v2", there, LaunchMode(action)) == folder


def test_a_new_certificate_alone_is_no_reason_to_restart() -> None:
    assert replace(TARGET, key=b"new").started == TARGET.started
    changed = [replace(TARGET, version="x"), replace(TARGET, config=b"x"), replace(TARGET, service=b"x"), TARGET]
    assert len({each.started for each in changed}) == 4
    assert "key.pem" not in steps_for(replace(TARGET, key=None), NOTHING, LaunchMode.START).files, "without encryption"


FULL: dict[str, Any] = yaml.safe_load("""
model: &model owner/name
models: [shelf, ~/models, /volumes/models]
pull: hub
tls: {keys: some/where}
context: 8192
layers: [3, 2, 1]
order: fixed
coordinator: {name: studio, memory: 64GiB}
workers:
  - {name: mini, address: "10.0.0.2:50070", memory: 16GB, ssh: anna@mini.local}
  - {name: air, address: ["10.0.0.3:50070", "10.0.1.3:50070"], model: *model, ssh: air}
""")


def test_a_node_gets_its_entry_and_the_keys_that_count_on_workers(tmp_path: Path) -> None:
    assert node_part(FULL, "air") == {
        "model": "owner/name",
        "models": ["~/shelf", "~/models", "/volumes/models"],
        "pull": "hub",
        "tls": {"keys": "keys"},
        "workers": [{"name": "air", "address": ["10.0.0.3:50070", "10.0.1.3:50070"], "model": "owner/name"}],
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(node_part(FULL, "mini")))
    [worker] = load_cluster(path).workers
    assert (worker.name, worker.addresses, worker.memory) == ("mini", ("10.0.0.2:50070",), 16 * 10**9)
