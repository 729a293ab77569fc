"""Turns for calls that may take long, beside the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from worker.errors import QueueFull, WaitedTooLong
from worker.platform.threads import run_in_thread

T = TypeVar("T")
_MOST_READ = 1024  # requests that wait to be encoded: as many as may be connected


class OneAtATime:
    """Runs calls that may take long on a thread, one at a time, since they share what is not thread-safe."""

    def __init__(
        self,
        max_waiting: int = _MOST_READ,
        max_wait_s: float = 60.0,
        on_refused: Callable[[QueueFull], None] = lambda error: None,
    ) -> None:
        """Let at most `max_waiting` calls wait for their turn, each for at most `max_wait_s`."""
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._on_refused = on_refused
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    def another(self) -> "OneAtATime":
        """Return a queue with the same limits, for calls that share nothing with these."""
        return OneAtATime(self._max_waiting, self._max_wait_s, self._on_refused)

    async def run(self, call: Callable[[], T]) -> T:
        """Return the call's result, or raise its exception. A cancelled call still delays the next one until it ends.

        Raises:
            QueueFull: too many calls wait already. WaitedTooLong: the call's turn did not come in time.
        """
        try:
            await self._wait_turn()
        except QueueFull as error:
            self._on_refused(error)
            raise
        running = asyncio.ensure_future(run_in_thread(call))
        running.add_done_callback(self._end)
        await asyncio.wait([running])
        return running.result()

    async def _wait_turn(self) -> None:
        if self._turn.locked() and self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._num_waiting} requests wait to be read; try again later")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await self._turn.acquire()
        except TimeoutError:
            raise WaitedTooLong(f"waited {self._max_wait_s:g} s to be read; try again later") from None
        finally:
            self._num_waiting -= 1

    def _end(self, running: "asyncio.Future[T]") -> None:
        self._turn.release()
        if not running.cancelled():
            running.exception()  # mark it as retrieved: its caller may be gone
