"""How layers are split over whichever nodes there are: by speed where it is known, and all memory put to use. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.contexts import Contexts, plan_largest
from coordinator.planning.fastest import Aim, fastest
from coordinator.planning.objective import USUAL_REQUESTS, Objective
from coordinator.planning.plan import Node, Plan
from coordinator.planning.speeds import NOTHING_KNOWN, Survey
from worker.model.modelspec import ModelSpec


@dataclass(frozen=True)
class Replan:
    """Makes the plan of one model's first chain, and of later ones, which may be without some of the nodes."""

    spec: ModelSpec
    survey: Survey = NOTHING_KNOWN
    is_order_fixed: bool = False
    may_be_alone: bool = True  # whether workers may be left out until the first node is alone
    objective: Objective = "latency"
    num_requests: int = USUAL_REQUESTS  # at once, for throughput

    def __call__(self, nodes: Sequence[Node], contexts: Contexts) -> Plan:
        """The fastest plan of those that hold the least context, with the largest context that it has room for.

        For throughput that is the least context of all requests, if there is memory for so many. While the speed of a
        node is unknown, or if none holds the least context: as `plan_largest` has it.
        """
        if not self.survey.covers(node.name for node in nodes):
            return plan_largest(self.spec, nodes, contexts)
        may_be_alone = self.may_be_alone or len(nodes) == 1
        sizes = (self.num_requests, 1) if self.objective == "throughput" else (1,)
        aims = (self._aim(contexts, num_sessions, may_be_alone) for num_sessions in sizes)
        found = next(filter(None, (fastest(self.spec, nodes, self.survey, aim) for aim in aims)), None)
        if found is None:
            return plan_largest(self.spec, nodes, contexts)
        by_name = {node.name: node for node in nodes}
        members = [by_name[assignment.name] for assignment in found.assignments]
        return plan_largest(self.spec, members, contexts, found.layers)

    def _aim(self, contexts: Contexts, num_sessions: int, may_be_alone: bool) -> Aim:
        return Aim(contexts.least, num_sessions, self.objective, self.num_requests, self.is_order_fixed, may_be_alone)
