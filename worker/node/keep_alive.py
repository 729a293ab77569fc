"""Keep-alive: layers that nobody has used for a while are let go, and read again for whoever comes next."""

import contextlib
from collections.abc import AsyncIterator

from worker.node.loader import Loader
from worker.node.log import Log
from worker.process.beside import beside
from worker.process.use import Use


@contextlib.asynccontextmanager
async def letting_go(use: Use, loader: Loader, keep_alive_s: float | None, log: Log) -> AsyncIterator[None]:
    """Let go of what the loader holds whenever it has not been used for so long; None keeps it."""
    if keep_alive_s is None:
        yield
        return
    async with beside(_let_go_again_and_again(use, loader, keep_alive_s), log.say_failed):
        yield


async def _let_go_again_and_again(use: Use, loader: Loader, keep_alive_s: float) -> None:
    while True:
        await use.wait_unused(keep_alive_s)
        await loader.let_go(f"unused for {keep_alive_s:g} s")
        await use.wait_used()
