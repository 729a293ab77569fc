"""Whether something is in use, and for how long it has been idle."""

import asyncio
import contextlib
from collections.abc import Iterator


class Use:
    """Counts the users of one thing."""

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
        """Count one user for the length of this context."""
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
        """Return once it has been unused for `for_s` seconds without a break; never if None."""
        while True:
            await self._unused.wait()
            try:
                async with asyncio.timeout(for_s):
                    await self._used.wait()
            except TimeoutError:
                if not self.is_used:  # not used since the timeout fired
                    return

    async def wait_used(self) -> None:
        await self._used.wait()
