"""Roster: which workers there are, whether they are in the chain or not, and who of them answers."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from coordinator.cluster.keeper import Keeper
from coordinator.cluster.local import LocalWorker
from coordinator.cluster.peer import Peer
from coordinator.planning.budgets import Offer, budgets
from coordinator.planning.plan import Node
from coordinator.planning.recovery import Present
from protos.brigade_pb2 import HelloReply
from worker.config import Cluster, is_loopback, split_address
from worker.errors import ConfigError, StageLost
from worker.node.network import Network
from worker.node.reach import has_succeeded
from worker.process.machine import memory_budget

_ASK_S = 1.0
_PAUSE_S = 0.1


@dataclass
class Member:
    """A worker that may take part; `peer` is None while its process is being started again."""

    name: str
    peer: Peer | None
    keeper: Keeper | None = None  # of a worker of our own


class Roster:
    """The workers in chain order, and this node before them. Use as an async context manager: it keeps our own ones."""

    def __init__(self, peers: Sequence[Peer], cluster: Cluster | None = None) -> None:
        """`cluster` says how much memory nodes may use, where it does."""
        self.members = {peer.name: Member(peer.name, peer) for peer in peers}
        self.refusal: ConfigError | None = None  # of one that was asked last: who cannot be trusted
        self._cluster = cluster or Cluster()
        self._budget = memory_budget()  # before anything is loaded
        self._changed = asyncio.Event()
        self._left: list[Peer] = []
        self._keeping: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for keeping in self._keeping:
            keeping.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self._close_left()
        for peer in self.peers(self.members):
            await peer.close()
        await asyncio.gather(*(member.keeper.stop() for member in self.members.values() if member.keeper))

    def keep(self, workers: Iterable[LocalWorker], network: Network, say: Callable[[str], None]) -> None:
        """Start these again whenever they end."""
        for worker in workers:
            member = self.members[worker.name]

            async def replaced(worker: LocalWorker | None, member: Member = member) -> None:
                if member.peer is not None:
                    self._left.append(member.peer)  # the chain that it was lost from may not know yet
                member.peer = Peer(worker.name, [worker.address], network) if worker else None
                self._changed.set()
                if worker is not None:
                    await self._close_left()

            member.keeper = Keeper(worker, replaced, say)
            self._keeping.append(asyncio.create_task(member.keeper.run()))

    async def ask(self, within_s: float, names: Collection[str] | None = None) -> dict[str, HelloReply]:
        """Ask these workers, or all, at the same time; the replies of those that answer within the time.

        Returns early once every worker has answered or failed, or once a worker of our own has started or ended.
        """
        self._changed.clear()
        names = self.members if names is None else names
        peers = self.peers(names)
        asking = {peer.name: asyncio.create_task(peer.hello(within_s)) for peer in peers}
        try:
            await self._wait_asked(asking.values(), within_s, is_anyone_away=len(peers) < len(names))
            replies = {name: task.result() for name, task in asking.items() if has_succeeded(task)}
        finally:
            for task in asking.values():
                task.cancel()
            outcomes = await asyncio.gather(*asking.values(), return_exceptions=True)
        self.refusal = next((outcome for outcome in outcomes if isinstance(outcome, ConfigError)), None)
        return replies

    async def is_elsewhere(self, name: str, within_s: float) -> bool:
        """Whether this worker, which was lost, can be reached after all, since it has more than one address.

        One that is only being started cannot.
        """
        member = self.members.get(name)
        return member is not None and member.peer is not None and await member.peer.is_elsewhere(within_s)

    async def pause(self, for_s: float) -> None:
        """Wait so long, or until a worker of our own has been started or has ended since they were last asked."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), for_s)

    async def wait_all(self, within_s: float) -> None:
        """Return once every worker answers: those of our own may have ended meanwhile, and are started again.

        Raises:
            StageLost: one does not.
        """
        until = time.monotonic() + within_s
        while missing := self.members.keys() - (await self.ask(_ASK_S)).keys():
            if time.monotonic() >= until:
                raise StageLost(f"does not answer, or ends again and again ({within_s:g} s)", node=min(missing))
            await self.pause(_PAUSE_S)

    def present(self, replies: dict[str, HelloReply]) -> list[Present]:
        """This node and those that answered, with the memory that each may use."""
        configured = {worker.name: worker.memory for worker in self._cluster.workers}
        answered = [name for name in self.members if name in replies]
        offers = [Offer(replies[each].memory_bytes, configured.get(each), self._is_here(each)) for each in answered]
        own = self._cluster.coordinator
        mine, *theirs = budgets(Offer(self._budget, own.memory), offers)
        others = [
            Present(Node(name, memory), replies[name].incarnation)
            for name, memory in zip(answered, theirs, strict=True)
        ]
        return [Present(Node(own.name, mine)), *others]

    def peers(self, names: Iterable[str]) -> list[Peer]:
        """Those of these workers that run."""
        found = (self.members[name].peer for name in names)
        return [peer for peer in found if peer is not None]

    def gone(self, names: Iterable[str]) -> str:
        """The first of these that does not run."""
        return next(name for name in names if self.members[name].peer is None)

    def kill_own(self, name: str) -> None:
        """End a worker of our own that hangs; it is started again. Others are left alone."""
        member = self.members.get(name)
        if member is not None and member.keeper is not None:
            member.keeper.kill()

    async def _close_left(self) -> None:
        """Leave processes that have ended."""
        while self._left:
            await self._left.pop().close()

    async def _wait_asked(
        self, asking: Collection["asyncio.Task[HelloReply]"], within_s: float, *, is_anyone_away: bool
    ) -> None:
        """Return once all that can be known is known, or there is somebody else to ask, or it takes too long."""
        changed = asyncio.create_task(self._changed.wait())
        pending = {*asking, changed}
        deadline = time.monotonic() + within_s
        try:
            while not changed.done() and (len(pending) > 1 or is_anyone_away):
                left_s = deadline - time.monotonic()
                done, pending = await asyncio.wait(
                    pending, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    return
        finally:
            changed.cancel()

    def _is_here(self, name: str) -> bool:
        peer = self.members[name].peer
        return peer is not None and is_loopback(split_address(peer.address)[0])
