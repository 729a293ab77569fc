from dataclasses import replace

import pytest

from coordinator.fleet.found import KINDS, Found
from coordinator.fleet.steps import DEFINITIONS, Action, Wish, digest, steps_for, version_folder

WISH = Wish("v2", b"config", b"key", b"service")
AS_WISHED = Found(
    "/h", 1, "daemon", versions=frozenset({"v2"}), config=digest(b"config"), key=digest(b"key"),
    service=digest(b"service"), started=WISH.started, is_alive=True,
)  # fmt: skip
NOTHING = Found("/h", 1, "daemon")


@pytest.mark.parametrize(
    ("found", "action", "installs", "files", "restarts", "story"),
    [
        (AS_WISHED, "start", False, "", False, "unchanged"),
        (AS_WISHED, "restart", False, "", True, "restarted"),
        (NOTHING, "start", True, "cluster.yaml key.pem service", True, "installed, new certificate, started"),
        (replace(AS_WISHED, is_alive=False), "start", False, "", True, "started"),
        (replace(AS_WISHED, key=""), "start", False, "key.pem", False, "new certificate"),
        (replace(AS_WISHED, config="other"), "start", False, "cluster.yaml", True, "restarted"),
        (replace(AS_WISHED, started="other"), "start", False, "", True, "restarted"),
        (replace(AS_WISHED, versions=frozenset({"v1"})), "start", True, "", True, "installed, restarted"),
    ],
)
def test_the_fewest_steps(found: Found, action: str, installs: bool, files: str, restarts: bool, story: str) -> None:
    steps = steps_for(WISH, found, Action(action))
    assert (steps.installs, " ".join(sorted(steps.files)), steps.restarts) == (installs, files, restarts)
    assert steps.story == story and steps.are_none == (story == "unchanged")


@pytest.mark.parametrize(
    ("there", "action", "folder"),
    [
        ([], "start", "v2"),
        ([], "update", "v2"),
        (["v1", "v2"], "start", "v2"),
        (["v1.7", "v2"], "update", "v2.1"),
        (["v2.1"], "start", "v2.1"),
        (["v2.9", "v2.10", "v2"], "restart", "v2.10"),
        (["v2.10"], "update", "v2.11"),
        (["v2", "v2.old", f"v2.{'9' * 5000}"], "update", "v2.1"),  # no folders of ours
    ],
)
def test_an_update_has_a_folder_of_its_own(there: list[str], action: str, folder: str) -> None:
    assert version_folder("v2", there, Action(action)) == folder


def test_links_without_encryption_need_no_certificate() -> None:
    assert "key.pem" not in steps_for(replace(WISH, key=None), NOTHING, Action.START).files


def test_a_new_certificate_alone_is_no_reason_to_restart() -> None:
    assert replace(WISH, key=b"new").started == WISH.started
    assert len({replace(WISH, **{part: "x" if part == "version" else b"x"}).started for part in
                ("version", "config", "service")} | {WISH.started}) == 4  # type: ignore[arg-type]  # fmt: skip


def test_each_kind_of_service_has_its_definition() -> None:
    assert tuple(DEFINITIONS) == KINDS
