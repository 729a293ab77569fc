"""Keep-alive: layers that nobody has used for a while are let go, and read again for whoever comes next."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from worker.node.loader import Loader


class Use:
    """Whether what a node holds is being used."""

    def __init__(self) -> None:
        self._num_users = 0
        self._used = asyncio.Event()
        self._unused = asyncio.Event()
        self._unused.set()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """It is, for as long as this context lives."""
        self._num_users += 1
        self._used.set()
        self._unused.clear()
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._used.clear()
                self._unused.set()

    async def wait_unused(self, for_s: float) -> None:
        """Return once it has not been for so long without a break."""
        while True:
            await self._unused.wait()
            try:
                async with asyncio.timeout(for_s):
                    await self._used.wait()
            except TimeoutError:
                if self._unused.is_set():  # somebody may have come in this very moment
                    return

    async def wait_used(self) -> None:
        await self._used.wait()


@contextlib.asynccontextmanager
async def letting_go(use: Use, loader: Loader, keep_alive_s: float | None) -> AsyncIterator[None]:
    """Let go of what the loader holds whenever it has not been used for so long; None keeps it."""
    if keep_alive_s is None:
        yield
        return
    task = asyncio.create_task(_let_go_again_and_again(use, loader, keep_alive_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _let_go_again_and_again(use: Use, loader: Loader, keep_alive_s: float) -> None:
    while True:
        await use.wait_unused(keep_alive_s)
        await loader.let_go(f"unused for {keep_alive_s:g} s")
        await use.wait_used()
