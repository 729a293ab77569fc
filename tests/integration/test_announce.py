"""Nodes that announce themselves, heard by real DNS-SD: on loopback, and between machines made of namespaces."""

import asyncio
import secrets
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from zeroconf import Error, ServiceStateChange
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from coordinator.deploy import discovery as browsing
from coordinator.deploy.discovery import MAX_ANNOUNCEMENTS, Heard, ServiceListener, browse
from tests.integration.certificates import Certificates
from tests.integration.links import Told
from worker.errors import StageLost
from worker.node.announce import SERVICE, About, about, announced, announcing, places_of
from worker.node.log import worker_log
from worker.node.network import Network
from worker.platform.interfaces import Interface

LISTENS_S = (0.25, 1, 4, 16)  # a busy machine may need longer ones
LOOPBACK = ["127.0.0.1:50999"]
LINKS = Path(__file__).with_name("links.py")


async def hear(name: str, *, beside_others: bool = False) -> tuple[About, Heard]:
    """The node of this name, or the same `beside_others` that are none."""
    for listens_s in LISTENS_S:
        heard = await browse(listens_s)
        found = [node for node in heard.nodes if node.name == name]
        if found and (heard.num_ignored or not beside_others):
            return found[0], heard
    raise AssertionError(f"{name} was not heard")


async def test_a_node_is_heard_as_it_is_and_what_no_node_would_say_is_counted(tmp_path: Path) -> None:
    name, liar = f"mini.a{secrets.token_hex(4)}", f"liar-{secrets.token_hex(4)}"
    said = about(name, Certificates(tmp_path).network(name))
    assert len(said.fingerprint) == 64
    properties = {"name": "\x1b]0;mini\x07", "version": "0.1.0", "process": "0a1b2c3d"}
    at = {"port": 1, "parsed_addresses": ["127.0.0.1"], "server": f"{liar}.local."}
    lie = AsyncServiceInfo(SERVICE, f"{liar}.{SERVICE}", properties=properties, **at)
    async with AsyncZeroconf(interfaces=["127.0.0.1"]) as lying:
        await lying.async_register_service(lie, cooperating_responders=True)
        async with announced(said, await places_of(LOOPBACK)):
            found, heard = await hear(name, beside_others=True)
    assert (found, heard.nodes[found]) == (said, ["127.0.0.1:50999"])
    assert heard.num_ignored and all(node.name.isprintable() for node in heard.nodes)


async def test_a_node_that_cannot_announce_itself_says_so_once() -> None:
    name, out = "m" * 200, Told()  # more than an announcement holds
    async with announcing(partial(about, name, Network()), LOOPBACK, worker_log("mini", out)):
        await out.is_said.wait()
    assert out.getvalue().count("\n") == 1
    assert "cannot announce itself (expected a name of at most 128 letters" in out.getvalue()


@pytest.mark.parametrize("case", ["loopback", pytest.param("wildcard", marks=pytest.mark.long)])
def test_a_node_is_heard_where_it_listens_and_nowhere_else(case: str) -> None:
    """On two machines of namespaces, with a cable between them: `links.py` says what each case claims."""
    if not (shutil.which("ip") and shutil.which("unshare")) or subprocess.run(["unshare", "--net", "true"]).returncode:
        pytest.skip("no network namespaces can be made here")
    done = subprocess.run(["unshare", "--net", sys.executable, LINKS, case], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "as expected\n"), done.stdout + done.stderr


class Noting(ServiceListener):
    """Does not resolve what it hears of."""

    num_asked = 0

    async def _resolve(self, zeroconf: Any, instance: str) -> None:
        self.num_asked += 1


async def test_only_so_many_announcements_are_looked_at_and_each_once() -> None:
    ear = Noting(0.0)
    for number in range(MAX_ANNOUNCEMENTS + 44):
        for change in (ServiceStateChange.Added, ServiceStateChange.Updated, ServiceStateChange.Removed):
            ear.on_change(cast(Any, None), "", f"node-{number}.{SERVICE}", change)
    ear.on_change(cast(Any, None), "", f"node-0.{SERVICE}", ServiceStateChange.Added)
    await ear.wait_resolved()
    assert (ear.num_asked, ear.heard.num_ignored) == (MAX_ANNOUNCEMENTS, 44)


@pytest.mark.parametrize(
    "name", ["printer._http._tcp.local.", f"mini\n.{SERVICE}", f"{'m' * 64}.{SERVICE}", f".{SERVICE}"]
)
async def test_who_points_to_what_is_no_node_is_ignored_and_ends_nothing(name: str) -> None:
    ear = ServiceListener(0.0)
    async with AsyncZeroconf(interfaces=["127.0.0.1"]) as listener:
        ear.on_change(listener.zeroconf, SERVICE, name, ServiceStateChange.Added)
        await ear.wait_resolved()
    assert ear.heard == Heard(num_ignored=1)


async def test_a_failure_without_words_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Interface]:
        raise Error

    monkeypatch.setattr(browsing, "own_interfaces", fail)
    with pytest.raises(StageLost, match=r"on this machine's networks: Error$"):
        await browse(0.1)


async def test_a_listener_that_fails_leaves_no_task_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        """A browser that hears of one node and fails."""

        def __init__(self, zeroconf: Any, service_type: str, handlers: list[Any]) -> None:
            handlers[0](zeroconf, SERVICE, f"mini.{SERVICE}", ServiceStateChange.Added)

        async def __aenter__(self) -> None:
            await asyncio.sleep(0)  # resolving begins
            raise OSError("no network")

        async def __aexit__(self, *exc: object) -> None: ...

    monkeypatch.setattr("zeroconf.asyncio.AsyncServiceBrowser", Failing)
    monkeypatch.setattr(browsing, "own_interfaces", lambda: [Interface("lo", ("127.0.0.1",))])
    with pytest.raises(StageLost, match="no network"):
        await browse(60.0)
    assert not [task for task in asyncio.all_tasks() if "_resolve" in repr(task)]
