"""Chains: one after another over the nodes of a deployment, none before the last one is closed."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment, OwnNode, Progress
from coordinator.cluster.roster import Roster
from coordinator.cluster.timeline import Timeline
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import Plan
from worker.errors import StageLost


class Chains:
    """Loads, opens and closes. `close` is to be called before each further one, and in the end."""

    def __init__(self, own: OwnNode, roster: Roster, deployment: Deployment, say: Callable[[str], None]) -> None:
        self.deployment = deployment  # that of the present chain, or of the one that is opened
        self._own = own
        self._roster = roster
        self._say = say
        self._epoch = 0
        self._open = AsyncExitStack()

    async def open(self, plan: Plan, timeline: Timeline, progress: Progress, costs: ChainCosts | None) -> Chain:
        """Have the nodes load what they lack, and open a chain; nothing is left of it if that fails.

        `costs` are those of the chain before, if they hold for this one.
        """
        names = [assignment.name for assignment in plan.assignments[1:]]
        peers = self._roster.peers(names)
        if len(peers) < len(names):
            raise StageLost("has ended while a chain was opened", node=self._roster.gone(names))
        self.deployment = replace(self.deployment, plan=plan, peers=peers)
        await self._own.load(self.deployment, progress)
        timeline.mark_loaded()
        self._epoch += 1
        async with AsyncExitStack() as stack:
            chain = Chain(self._own, self.deployment, self._epoch, costs=costs, say=self._say)
            await stack.enter_async_context(chain)
            await chain.open(progress)
            self._open = stack.pop_all()
        timeline.mark_opened()
        return chain

    async def close(self) -> None:
        """Close the present chain, if there is one."""
        await self._open.aclose()
