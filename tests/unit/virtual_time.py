"""An event loop whose clock stands still while there is work, and jumps to the next timer when there is none."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):  # SelectSelector knows only the first 1024 file descriptors
    """Waits for nothing, and notes how long that would have taken."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits, and for nothing that has a deadline"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualTime:
    """Runs coroutines, while `time.monotonic` is the loop's clock."""

    def __init__(self) -> None:
        self._clock = _Jumping()
        self.loop = asyncio.SelectorEventLoop(self._clock)

    @property
    def now(self) -> float:
        return self._clock.now

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: self._clock.now)
            patch.setattr(time, "monotonic_ns", lambda: round(self._clock.now * 1e9))
            return self.loop.run_until_complete(work)

    def close(self) -> set["asyncio.Task[Any]"]:
        """End the loop; what still ran then."""
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left, timeout=1))
        self.loop.close()
        return left


class SameThread:
    """Stands for the MLX thread: its loop is the one that runs, so that both share one clock."""

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        await asyncio.sleep(0)  # it is another thread, after all
        return await work

    async def run(self, call: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        return call()

    def post(self, call: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_soon(call)
