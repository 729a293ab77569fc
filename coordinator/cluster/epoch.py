"""Epoch: one chain with the sessions that run on it now. Schedules, sends, receives, commits; requests outlive it."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import NoReturn

from coordinator.cluster.chain import Chain
from coordinator.cluster.flight import Arrival
from coordinator.planning.costs import LaneChooser
from coordinator.sessions.scheduler import Commit, Scheduler
from coordinator.sessions.session import Session
from coordinator.sessions.slots import MOST_WAITING, cache_costs
from coordinator.sessions.waterfall import Route
from worker.errors import BrigadeError


class Epoch:
    """A chain's scheduler and its frames in flight."""

    def __init__(self, chain: Chain, max_waiting: int = MOST_WAITING) -> None:
        lanes = LaneChooser(chain.num_stages, chain.costs.stages_s, chain.costs.hops_s)
        costs = cache_costs(chain.plan, chain.spec)
        self.chain = chain
        self.route = Route(chain.plan.assignments, chain.clock_offsets)
        self.scheduler = Scheduler(
            chain.num_stages, costs, chain.epoch, max_waiting, lanes=lanes.choose, last_step=chain.last_step
        )
        self._idle = asyncio.Event()
        self.has_ended = False

    async def run(self, take: Callable[[Arrival, list[Commit]], None]) -> NoReturn:
        """Keep the chain at work; `take` is given each result and what it made known.

        Raises:
            BrigadeError: the chain failed; what was in flight is lost.
        """
        try:
            while True:
                arrival = await self.chain.receive()
                take(arrival, self.scheduler.commit(arrival.result))
                self.send_all()
        finally:
            self.has_ended = True
            self._idle.set()

    def close(self, session: Session, *, keep: bool) -> None:
        """Take a session off, ended or not; to be followed by `send_all`. Nothing is kept while a node drains."""
        self.scheduler.close(session, keep=keep and self.chain.draining is None)

    def send_all(self) -> None:
        """Send all frames that can be sent now."""
        if self.has_ended:
            return
        with contextlib.suppress(BrigadeError):  # the chain has failed: `run` raises it
            while (frame := self.scheduler.schedule()) is not None:
                self.chain.send(frame)
        if self.scheduler.is_idle:
            self._idle.set()
        else:
            self._idle.clear()

    async def wait_idle(self) -> None:
        """Return once nothing is in flight, or nothing will come back any more."""
        while not self._idle.is_set():
            await self._idle.wait()
