"""Use: whether something is being used, and for how long it has not been."""

import asyncio
import contextlib
from collections.abc import Iterator


class Use:
    """Of one thing, by however many at a time."""

    def __init__(self) -> None:
        self._num_users = 0
        self._used = asyncio.Event()
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def is_used(self) -> bool:
        return self._num_users > 0

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

    async def wait_unused(self, for_s: float | None) -> None:
        """Return once it has not been for so long without a break; None: never."""
        while True:
            await self._unused.wait()
            try:
                async with asyncio.timeout(for_s):
                    await self._used.wait()
            except TimeoutError:
                if not self.is_used:  # somebody may have come in this very moment
                    return

    async def wait_used(self) -> None:
        await self._used.wait()
