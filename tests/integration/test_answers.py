"""Why a worker that was launched is not reached, as `brigade launch` tells it."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from coordinator.deploy import launch
from coordinator.deploy.install import LaunchMode
from coordinator.deploy.launch import Launch, wait_answer
from coordinator.deploy.package import Package
from coordinator.deploy.ssh import Read, Remote
from tests.integration.certificates import Certificates
from tests.integration.conftest import serving
from worker.config import WorkerConfig
from worker.errors import BrigadeError, ConfigError
from worker.node.certificates import KeyFile, Role
from worker.node.network import Network


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ENDS_S", 0.1)


class Running(Remote):
    """The account of a worker that goes on, and has said one thing."""

    async def run(self, *given: Any, **more: Any) -> dict[str, list[str]]:
        await asyncio.Event().wait()
        return {}

    async def log(self, num_lines: int, read: Read, *, follows: bool = False, since_start: bool = False) -> None:
        assert since_start and not follows
        read("it listens")


@pytest.mark.parametrize(
    ("within_s", "address", "why"),
    [
        (
            30.0,
            "mini.invalid:1",  # no name server knows one that ends so (RFC 6761)
            r"the name mini\.invalid does not resolve on this machine: check its `address:` in .*\.",
        ),
        (0.2, "127.0.0.1:1", r"nothing answers at 127\.0\.0\.1:1: is that its address, .*Firewall\)\?"),
    ],
)
async def test_the_reason_is_told(within_s: float, address: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ANSWER_S", within_s)
    worker = WorkerConfig(name="mini", address=address, ssh="mac")
    with pytest.raises(BrigadeError, match=f"^runs, but {why} Its log: it listens$"):
        await wait_answer(worker, Network(insecure=True), Running("mini", "mac"))


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_worker_that_ran_already_and_does_not_answer_is_to_be_restarted(
    is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "ANSWER_S", 0.2)
    worker = WorkerConfig(name="mini", address="127.0.0.1:1", ssh="mac")
    with pytest.raises(BrigadeError, match=r"nothing answers at") as caught:
        await wait_answer(worker, Network(launched=["mini"]), Running("mini", "mac"), is_new=is_new)
    fix = "from here: brigade launch mini --config cluster.yaml --restart"
    assert (fix in caught.value.message) == (not is_new)


async def test_where_tls_fails_another_process_may_answer_in_its_place(tmp_path: Path) -> None:
    async with serving(1) as [node]:
        worker = WorkerConfig(name="mini", address=node.address, ssh="mac")
        why = r"^it does not encrypt, .*; or another process answers at its address\. .*: it listens$"
        certificates = Certificates(tmp_path)
        certificates.coordinator()
        keys = KeyFile(certificates.authority.folder, "coordinator", Role.COORDINATOR)
        with pytest.raises(ConfigError, match=why):  # without the advice to launch it
            await wait_answer(worker, Network(keys=keys, launched=["mini"]), Running("mini", "mac"))


@pytest.mark.parametrize("address", ["", "mini.invalid:1"], ids=["taken", "unknown"])
async def test_a_worker_that_ends_is_told_with_its_own_words_whatever_answers_in_its_place(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends only once another process has answered, or the address is known to be none."""
    monkeypatch.setattr(launch, "ENDS_S", 30.0)

    class Ending(Running):
        async def run(self, *given: Any, **more: Any) -> dict[str, list[str]]:
            await asyncio.sleep(0.5)
            return {}

        async def log(self, num_lines: int, read: Read, **how: bool) -> None:
            read("error: cannot listen")

    async with serving(1) as [node]:
        worker = WorkerConfig(name="mini", address=address or node.address, ssh="mac")
        with pytest.raises(BrigadeError, match=r"^ended when it was started; its log: error: cannot listen$"):
            await wait_answer(worker, Certificates(tmp_path).coordinator(), Ending("mini", "mac"))


async def test_a_damaged_installation_is_to_be_made_anew() -> None:
    class Ended(Running):
        async def run(self, *given: Any, **more: Any) -> dict[str, list[str]]:
            return {}

        async def log(self, num_lines: int, read: Read, **how: bool) -> None:
            read("ModuleNotFoundError: No module named 'yaml'")

    worker = WorkerConfig(name="mini", address="127.0.0.1:1", ssh="mac")
    with pytest.raises(BrigadeError, match=r"its log: Module.* 'yaml'; brigade launch --update installs it anew$"):
        await wait_answer(worker, Network(insecure=True), Ended("mini", "mac"))


# A machine with version v, whose worker runs on and is started anew with whatever it is sent.
SSH = """\
#!/bin/sh
case "$*" in *tar*) cat >/dev/null; exit 0 ;; esac
case "$(cat)" in
*"# Runs as long as"*) exec sleep 60 ;;
*) printf '@brigade %s\\n' "home /h" "kind daemon" "free 9999999 1%" "version {version}" {alive} ;;
esac
"""


@pytest.mark.parametrize("alive", ["", "'alive yes'"], ids=["was ended", "ran"])
async def test_who_answered_already_before_the_start_is_another_process(
    alive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may have run at another address, and find its new one taken."""
    package = Package("1.0", {}, "")
    (tmp_path / "ssh").write_text(SSH.replace("{version}", package.id).replace("{alive}", alive))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with serving(1) as [node]:
        worker = WorkerConfig(name=node.name, address=node.address, ssh="mac")
        raw = {"workers": [{"name": node.name, "address": node.address, "ssh": "mac"}]}
        launching = Launch(raw, package, {}, Network(insecure=True), LaunchMode.START)
        [outcome] = await launching.run([worker], lambda name, phase: None)
    assert f"another process answers at {node.address} as worker {node.name}: end that one" in str(outcome.error)
