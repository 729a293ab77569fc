"""The nodes of a cluster: one record each, and for workers the connection and, for our own, the process."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from coordinator.cluster.local import LocalWorker, keep_running
from coordinator.cluster.peer import Peer
from coordinator.planning.plan import MemoryOffer, budgets
from coordinator.planning.recovery import NodeEvent, NodeRecord, NodeState
from protos.brigade_pb2 import HelloReply
from worker.config import ClusterConfig, is_here
from worker.errors import BrigadeError, CallerRefused, InternalError, StageLost, error_text
from worker.node.network import Network
from worker.platform.machine import memory_budget
from worker.platform.tasks import cancel_all

_Answer = tuple[HelloReply, bool]  # whether it was stalled, and its engine runs no step any more
_GRACE_S = 0.2  # for a worker that did not answer in time to give the reason
_HUNG_S = 3.0  # without an answer of a process of our own, after which it is ended


@dataclass
class ClusterNode(NodeRecord):
    """The record of a node; for a worker also its connection, its process and its load."""

    peer: Peer | None = None  # None while its process is being started again
    local: LocalWorker | None = None  # the process, if it is our own and runs
    load: asyncio.Task[None] | None = None  # until its outcome was entered
    offered_bytes: int = 0  # memory, as its process first answered: where free memory counts, it changes all the time
    trouble: BrigadeError | None = None  # why it did not answer the last question
    silent_since: float | None = None  # the first question that its process has not answered
    reported: str = ""  # the refusal that the user has read
    stands_in: bool = False  # a spare one that has taken the place of a lost one
    failure: BrigadeError | None = None  # why it could not load or join last, until it has or another process is there

    @property
    def address(self) -> str:
        """The address in use; empty while it runs nowhere."""
        return self.peer.address if self.peer else ""

    @property
    def is_here(self) -> bool:
        """Whether it shares this machine's memory."""
        return self.peer is not None and is_here(self.peer.address)

    @property
    def refusal(self) -> BrigadeError | None:
        """Why it cannot take part though it is there; None if it answers, or does not answer at all."""
        is_there = isinstance(self.trouble, CallerRefused) or not isinstance(self.trouble, StageLost)
        return self.trouble if is_there else None

    def renew(self) -> None:
        """Note that another process runs there: what the last one refused says nothing of it. A crash may recur."""
        if self.failure is not None and not isinstance(self.failure, (StageLost, InternalError)):
            self.num_failures, self.retry_at, self.failure = 0, -math.inf, None

    def kill(self) -> None:
        """End a process of our own, which is started again; other processes are left alone."""
        if self.local is not None:
            self.local.kill()


class Nodes:
    """This node, then the workers in the configuration's order. An async context manager: it ends our own processes."""

    def __init__(self, peers: Sequence[Peer], cluster: ClusterConfig | None = None) -> None:
        """`cluster` has the memory budgets of nodes, for those that are configured."""
        self._cluster = cluster or ClusterConfig()
        self._offered_bytes = memory_budget()  # before anything is loaded
        self.own = ClusterNode(self._cluster.coordinator.name, is_own=True, state=NodeState.PRESENT)
        self.workers = {peer.name: ClusterNode(peer.name, peer=peer) for peer in peers}
        self._changed = asyncio.Event()
        self._left: list[Peer] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._share_memory()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await cancel_all(*self._keeping)
        await self._close_left()
        for peer in self.peers(self.workers):
            await peer.close()
        await asyncio.gather(*(worker.local.stop() for worker in self.workers.values() if worker.local))

    @property
    def records(self) -> list[ClusterNode]:
        """All nodes, in the order of a chain."""
        return [self.own, *self.workers.values()]

    def keep(self, locals_: Iterable[LocalWorker], network: Network, say: Callable[[str], None]) -> None:
        """Start these workers again whenever they end."""
        for local in locals_:
            self.workers[local.name].local = local
            keeping = asyncio.create_task(self._keep(local, network, say))
            keeping.add_done_callback(partial(_say_failure, local.name, say))
            self._keeping.append(keeping)

    async def _keep(self, first: LocalWorker, network: Network, say: Callable[[str], None]) -> None:
        worker = self.workers[first.name]
        async for local in keep_running(first, say):
            if worker.peer is not None:
                worker.meet(NodeEvent.LOST, time.monotonic())
                self._left.append(worker.peer)  # the chain that lost it may not know yet
            worker.local, worker.silent_since = local, None
            worker.peer = Peer(local.name, [local.address], network) if local else None
            self.note_change()
            if local is not None:
                await self._close_left()

    async def ask(self, names: Collection[str], within_s: float) -> None:
        """Ask these workers at the same time, and enter in their records whether they answer within the time.

        Returns early once every worker has answered or failed, or once a worker of our own has started or ended. A
        process of our own that has answered nothing for long is ended, and started again.
        """
        self._changed.clear()
        workers = [self.workers[name] for name in names]
        asked = {each.name: each.peer for each in workers if each.peer}
        asking = {name: asyncio.create_task(_ask(self.workers[name], peer, within_s)) for name, peer in asked.items()}
        is_over = False
        try:
            is_over = await self._wait_asked(asking.values(), within_s, is_restarting=len(asking) < len(workers))
        finally:
            unanswered = {name for name, task in asking.items() if not task.done()}
            outcomes = dict(zip(asking, await cancel_all(*asking.values()), strict=True))
        now = time.monotonic()
        for worker in workers:
            if worker.peer is not asked.get(worker.name):
                continue  # another process has taken its place
            outcome = outcomes.get(worker.name)
            worker.trouble = outcome if isinstance(outcome, BrigadeError) else None
            if isinstance(outcome, tuple):
                reply, is_idle = outcome
                worker.silent_since = None
                if reply.incarnation != worker.incarnation:
                    worker.offered_bytes = reply.memory_bytes
                    worker.renew()
                worker.answer(reply.incarnation, now)
                if is_idle:
                    worker.meet(NodeEvent.IDLE, now)
            elif is_over or worker.name not in unanswered:
                worker.asked_at = now
                worker.meet(NodeEvent.LOST, now)
                worker.silent_since = None if worker.refusal else worker.silent_since or now
                if worker.silent_since and now - worker.silent_since >= _HUNG_S:
                    worker.kill()
        for outcome in outcomes.values():
            if isinstance(outcome, Exception) and not isinstance(outcome, BrigadeError):
                raise outcome
        self._share_memory()

    async def pause(self, for_s: float) -> None:
        """Wait so long, or until something changes after the workers were asked: a load ends, a process starts."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, for_s)):  # wait_for may swallow a cancellation
                await self._changed.wait()
        self._changed.clear()

    def note_change(self) -> None:
        """End the present `pause`, or the next one."""
        self._changed.set()

    def peers(self, names: Iterable[str]) -> list[Peer]:
        """Return the connections to those of these workers that run."""
        found = (self.workers[name].peer for name in names)
        return [peer for peer in found if peer is not None]

    async def _close_left(self) -> None:
        """Close the connections to processes that have ended."""
        while self._left:
            await self._left.pop().close()

    async def _wait_asked(
        self, asking: Collection["asyncio.Task[_Answer]"], within_s: float, *, is_restarting: bool
    ) -> bool:
        """Wait for all answers, or for a change while a process `is_restarting`; return whether the time is over."""
        changed = asyncio.create_task(self._changed.wait())
        pending: set[asyncio.Task[_Answer] | asyncio.Task[bool]] = {*asking, changed}
        deadline = time.monotonic() + within_s + _GRACE_S
        try:
            while not changed.done() and (len(pending) > 1 or is_restarting):
                left_s = max(0.0, deadline - time.monotonic())
                done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    return True
        finally:
            changed.cancel()
        return False

    def _share_memory(self) -> None:
        """Enter each node's memory budget: the nodes of this machine share its memory."""
        configured = {worker.name: worker.memory for worker in self._cluster.workers}
        there = [each for each in self.workers.values() if each.answers]
        offers = [MemoryOffer(each.offered_bytes, configured.get(each.name), each.is_here) for each in there]
        shares = budgets(MemoryOffer(self._offered_bytes, self._cluster.coordinator.memory), offers)
        for each, share in zip((self.own, *there), shares, strict=True):
            each.memory_bytes = share


def _say_failure(name: str, say: Callable[[str], None], keeping: "asyncio.Task[None]") -> None:
    """Report the error that ended the restarts of a worker. A callback for the end of the task."""
    if not keeping.cancelled() and (error := keeping.exception()):
        say(f"worker {name} is not started again once it ends: {error_text(error)}")


async def _ask(worker: ClusterNode, peer: Peer, within_s: float) -> _Answer:
    """Ask a worker whether it is there, and a stalled one whether its engine is idle. Raises BrigadeError."""
    reply = await peer.hello(within_s)
    is_due = worker.state is NodeState.STALLED and time.monotonic() >= worker.retry_at
    is_same = reply.incarnation == worker.incarnation
    return reply, is_due and is_same and (await peer.status(within_s)).busy_s == 0.0
