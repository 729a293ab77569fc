"""Aside: calls that may take long, away from the event loop, one at a time. Who waits for one may leave."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from worker.errors import QueueFull, WaitedTooLong
from worker.process.call_thread import run_aside

T = TypeVar("T")

MOST_READ = 1024  # requests that wait to be read at most: as many as may be connected


class OneAtATime:
    """For calls that share what no two threads may use at once."""

    def __init__(
        self,
        max_waiting: int = MOST_READ,
        max_wait_s: float = 60.0,
        on_refused: Callable[[QueueFull], None] = lambda error: None,
    ) -> None:
        """At most `max_waiting` calls wait for their turn, each of them for `max_wait_s`."""
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._on_refused = on_refused
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def run(self, call: Callable[[], T], within_s: float | None = None) -> T:
        """The call's result, or its exception. Cancelled, it ends at once; the next call waits for this one yet.

        Args:
            within_s: how long the call may take, once it is its turn.
        Raises:
            QueueFull: too many wait already. WaitedTooLong: it was not this call's turn in time.
            TimeoutError: the call takes longer than it may; the next one waits for it all the same.
        """
        try:
            await self._wait_turn()
        except QueueFull as error:
            self._on_refused(error)
            raise
        running = asyncio.ensure_future(run_aside(call))
        running.add_done_callback(self._end)
        async with asyncio.timeout(within_s):
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
            running.exception()  # which nobody may wait for any more
