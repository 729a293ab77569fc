"""A worker behind a network of its own, and what happens to both while it serves."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.cluster.peer import Peer
from tools.proxy import Proxy, proxy_to
from tools.worker_process import START_S, WorkerProcess, is_free, until
from worker.node.network import Network

_KILLED_S = 10.0


class SoakWorker:
    """A worker that can be reached through a proxy only, on the same address whichever process it is."""

    def __init__(self, process: WorkerProcess, proxy: Proxy) -> None:
        self.name = process.name
        self._process = process
        self._proxy = proxy

    @classmethod
    @asynccontextmanager
    async def running(cls, name: str, model: str) -> AsyncIterator["SoakWorker"]:
        """One that is there until the context ends, or this process."""
        process = WorkerProcess(name, arguments=("--model", model, "--follow-parent"))
        with proxy_to(process.address) as proxy:
            worker = cls(process, proxy)
            await worker.start()
            try:
                yield worker
            finally:
                await worker.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def peer(self) -> Peer:
        """The worker as a coordinator sees it."""
        return Peer(self.name, [self._proxy.address], Network())

    async def start(self) -> None:
        """Return once it listens, or has ended: `revive` says so."""
        process = self._process
        process.start()
        await until(lambda: not (process.is_running and is_free(process.address)), START_S, f"{self.name} starts")

    async def revive(self) -> str:
        """Start another process if this one has ended; says how, for nobody ended it."""
        if self._process.is_running:
            return ""
        code = await self._process.wait_ended(_KILLED_S)
        await self.start()
        return f"{self.name} ended by itself with exit code {code}"

    async def kill(self) -> None:
        """SIGKILL, and nothing in its place."""
        self._process.kill()
        await self._process.wait_ended(_KILLED_S)

    async def kill_and_start(self, numbers: random.Random) -> None:
        """SIGKILL, and after a while another process."""
        await self.kill()
        await asyncio.sleep(numbers.uniform(0.0, 4.0))
        await self.start()

    async def stop_for_a_while(self, numbers: random.Random) -> None:
        """SIGSTOP, and SIGCONT."""
        self._process.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(numbers.uniform(0.3, 4.0))
        finally:
            self._process.signal(signal.SIGCONT)

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
