"""Why a worker that was launched is not reached, as `brigade launch` tells it."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.fleet import answers
from coordinator.fleet.answers import wait_answer
from coordinator.fleet.ssh import Read, Remote
from worker.config import Worker
from worker.errors import BrigadeError
from worker.node.network import Network


class Running(Remote):
    """The account of a worker that goes on, and has said one thing."""

    async def run(self, *given: Any, **more: Any) -> dict[str, list[str]]:
        await asyncio.Event().wait()
        return {}

    async def output(self, script: str, values: Mapping[str, str], read: Read, *, is_followed: bool = False) -> None:
        assert (script, values["since_start"]) == ("log", "yes")
        read("it listens")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (
            f"{'x' * 64}.invalid:1",
            r"the name x{64}\.invalid does not resolve on this machine: check its `address:` in .*\.",
        ),
        ("127.0.0.1:1", r"nothing answers at 127\.0\.0\.1:1 \(0 s\): is that its address, .*Firewall\)\?"),
    ],
)
async def test_the_reason_is_told(address: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_WITHIN_S", 0.2)
    worker = Worker(name="mini", address=address, ssh="mac")
    with pytest.raises(BrigadeError, match=f"^runs, but {why} Its log: it listens$"):
        await wait_answer(worker, Network(insecure=True), Running("mini", "mac"), {}, "")
