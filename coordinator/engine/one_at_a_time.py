"""Turns for calls that may take long, beside the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from worker.errors import WaitedTooLong
from worker.platform.threads import run_in_thread

T = TypeVar("T")


class OneAtATime:
    """Runs calls that may take long on a thread, one at a time, since they share what is not thread-safe."""

    def __init__(
        self, max_wait_s: float = 60.0, on_refused: Callable[[WaitedTooLong], None] = lambda error: None
    ) -> None:
        """Let each call wait for its turn for at most `max_wait_s`."""
        self._max_wait_s = max_wait_s
        self._on_refused = on_refused
        self._turn = asyncio.Lock()

    def another(self) -> "OneAtATime":
        """Return a queue with the same limit, for calls that share nothing with these."""
        return OneAtATime(self._max_wait_s, self._on_refused)

    async def run(self, call: Callable[[], T]) -> T:
        """Return the call's result, or raise its exception. A cancelled call still delays the next one until it ends.

        Raises:
            WaitedTooLong: the call's turn did not come in time.
        """
        try:
            async with asyncio.timeout(self._max_wait_s):
                await self._turn.acquire()
        except TimeoutError:
            error = WaitedTooLong(f"waited {self._max_wait_s:g} s to be read; try again later")
            self._on_refused(error)
            raise error from None
        running = asyncio.ensure_future(run_in_thread(call))
        running.add_done_callback(self._end)
        await asyncio.wait([running])
        return running.result()

    def _end(self, running: "asyncio.Future[T]") -> None:
        self._turn.release()
        if not running.cancelled():
            running.exception()  # mark it as retrieved: its caller may be gone
