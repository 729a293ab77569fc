"""Due: what was loaded waits for its coordinator, which attaches it once the slowest of its workers has loaded, too."""

import asyncio
import contextlib
from collections.abc import Iterator

from protos.brigade_pb2 import Coordinator
from worker.errors import NodeBusy
from worker.process.use import Use

LONGEST_S = 600.0  # a coordinator that has not come by then has ended, or has given up


class Due:
    """Counts as use, from the end of a load until somebody attaches what it loaded, or nobody has for long."""

    def __init__(self, use: Use) -> None:
        self._use = use
        self._coordinator_id = ""
        self._waiting = contextlib.ExitStack()

    @contextlib.contextmanager
    def loading_for(self, coordinator: Coordinator) -> Iterator[None]:
        """Once the context has ended well, what was loaded in it is due to this one."""
        with self._use.using():
            yield
            self._begin(coordinator.id)

    def end(self) -> None:
        self._coordinator_id = ""
        self._waiting.close()

    @property
    def is_to_come(self) -> bool:
        """Whether somebody has loaded layers here and is about to use them."""
        return bool(self._coordinator_id)

    def refuse_others(self, coordinator: Coordinator) -> None:
        """Raises NodeBusy where it is due to another one."""
        if self._coordinator_id not in ("", coordinator.id):
            raise NodeBusy("has loaded its layers for another coordinator, which is about to use them")

    def _begin(self, coordinator_id: str) -> None:
        self.end()
        self._coordinator_id = coordinator_id
        self._waiting.enter_context(self._use.using())
        self._waiting.callback(asyncio.get_running_loop().call_later(LONGEST_S, self.end).cancel)
