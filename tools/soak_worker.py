"""A worker process of its own, behind a network of its own, and what happens to both while it serves."""

import asyncio
import contextlib
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.cluster.peer import Peer
from tools.proxy import Proxy, proxy_to
from worker.errors import StageLost
from worker.node.network import Network

_START_S = 60.0
_PORTS = range(20_000, 30_000)  # below those that systems give out by themselves


class SoakWorker:
    """A `python -m worker` that can be reached through a proxy only, on the same address whichever process it is."""

    def __init__(self, name: str, model: str, port: int, proxy: Proxy) -> None:
        self.name = name
        self._model = model
        self._port = port
        self._proxy = proxy
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    @asynccontextmanager
    async def running(cls, name: str, model: str) -> AsyncIterator["SoakWorker"]:
        """One that is there until the context ends."""
        port = _free_port()
        with proxy_to(f"127.0.0.1:{port}") as proxy:
            worker = cls(name, model, port, proxy)
            await worker.start()
            try:
                yield worker
            finally:
                await worker.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def peer(self) -> Peer:
        """The worker as a coordinator sees it."""
        return Peer(self.name, self._proxy.address, Network())

    async def start(self) -> None:
        """Return once it listens, or has ended."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worker", "--name", self.name, "--bind", f"127.0.0.1:{self._port}"),
            *("--model", self._model, "--follow-parent"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_S):
            line = await self._process.stdout.readline()
        if not line:
            await self._process.wait()  # `revive` says so

    async def revive(self) -> str:
        """Start another process if this one has ended; says how, for nobody ended it."""
        assert self._process is not None
        code = self._process.returncode
        if code is None:
            return ""
        await self.start()
        return f"{self.name} ended by itself with exit code {code}"

    async def kill(self) -> None:
        """SIGKILL, and nothing in its place."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def kill_and_start(self, numbers: random.Random) -> None:
        """SIGKILL, and after a while another process."""
        await self.kill()
        await asyncio.sleep(numbers.uniform(0.0, 4.0))
        await self.start()

    async def stop_for_a_while(self, numbers: random.Random) -> None:
        """SIGSTOP, and SIGCONT."""
        self._send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(numbers.uniform(0.3, 4.0))
        finally:
            self._send_signal(signal.SIGCONT)

    async def cut_for_a_while(self, numbers: random.Random) -> None:
        """A cable that is pulled, and plugged in again."""
        self._proxy.is_blackhole = True
        try:
            await asyncio.sleep(numbers.uniform(0.3, 4.0))
        finally:
            self._proxy.is_blackhole = False
            self._proxy.reset()  # what was sent meanwhile is lost: nobody can go on with these

    async def reset(self, numbers: random.Random) -> None:
        """All its connections end; new ones pass."""
        self._proxy.reset()

    def _send_signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


def _free_port() -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise StageLost("found no free port")
