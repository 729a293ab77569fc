"""Muster: which processes answer, which of them are of no use, and how the model is split over the others."""

from collections.abc import Collection, Sequence

from coordinator.cluster.peer import Peer
from coordinator.cluster.roster import Roster
from coordinator.planning.contexts import Contexts
from coordinator.planning.plan import Node, Plan
from coordinator.planning.recovery import Present
from coordinator.planning.replan import Replan
from worker.model.modelspec import ModelSpec


class Muster:
    """What the roster's workers said when they were asked last, and what came of them."""

    def __init__(self, roster: Roster, spec: ModelSpec, whole: Plan, least_context: int | None, replan: Replan) -> None:
        """`whole` is the plan with every node that counts; `least_context` and `replan` as a supervisor takes them."""
        self.roster = roster
        self.whole = whole
        self.present: Sequence[Present] = ()
        self.useless: set[str] = set()  # incarnations
        self._spec = spec
        self._replan = replan
        self._contexts = Contexts(least_context or whole.context, whole.context)

    @property
    def spared(self) -> set[str]:
        """Workers without whom the first plan was faster: no chain waits for them."""
        return self.roster.members.keys() - {assignment.name for assignment in self.whole.assignments}

    async def ask(self, within_s: float, names: Collection[str] | None = None) -> Collection[str]:
        """Ask as `Roster.ask`; who answers."""
        replies = await self.roster.ask(within_s, names)
        self.present = self.roster.present(replies)
        return replies.keys()

    async def is_unchanged(self, name: str, within_s: float) -> bool:
        """Whether no other process than before answers for this node, if one does."""
        known = {each.node.name: each.incarnation for each in self.present}
        replies = await self.roster.ask(within_s, {name} & self.roster.members.keys())
        return all(reply.incarnation == known.get(name) for name, reply in replies.items())

    def rule_out(self, name: str) -> list[str]:
        """The node's process that was asked last is of no use: by now there may be another one. Its incarnation."""
        found = [each.incarnation for each in self.present if each.node.name == name and each.incarnation]
        self.useless.update(found)
        return found

    def kill_silent(self, peers: Sequence[Peer], answering: Collection[str]) -> None:
        """End those of these that are our own, and still run and say nothing."""
        for peer in peers:
            if peer.name not in answering and self.roster.members[peer.name].peer is peer:
                self.roster.kill_own(peer.name)

    def fits(self, *, without: str = "") -> bool:
        """Whether the present nodes can hold the model, if need be without this one."""
        return self.split([each.node for each in self.present if each.node.name != without]) is not None

    def split(self, nodes: Sequence[Node]) -> Plan | None:
        """The best plan over these nodes, where one fits; over all of them the one that was asked for."""
        if [node.name for node in nodes] == [assignment.name for assignment in self.whole.assignments]:
            return self.whole
        found = self._replan(nodes, self._contexts) if len(nodes) <= self._spec.num_layers else None
        return found if found and found.fits else None
