"""Supervisor: keeps a chain open over whichever nodes there are. What to do next is said in planning/recovery.py."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self

from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment, OwnNode, Progress
from coordinator.cluster.lookout import Lookout
from coordinator.cluster.roster import Roster
from coordinator.cluster.timeline import Recovered, Timeline
from coordinator.planning.contexts import Contexts, plan_largest
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import Node, Plan
from coordinator.planning.recovery import USUAL, GiveUp, Limits, Present, Recovery, Reopen, how
from worker.errors import (
    BrigadeError,
    ConfigError,
    EngineHung,
    InputError,
    InternalError,
    ModelError,
    NodeBusy,
    NodeSilent,
    OutOfMemory,
    SamplingError,
    StageLost,
)

_FIRST_ASK_S = 0.3  # then longer each time, up to
_LONGEST_ASK_S = 1.0
_PAUSE_S = 0.1  # between two rounds, whatever the nodes say
_LASTING = (ModelError, ConfigError, InputError, SamplingError, InternalError)  # it would be the same again
_REFUSALS = (*_LASTING, NodeBusy, OutOfMemory)  # likewise, for the first chain


class Supervisor:
    """Opens the first chain, and the next one whenever a chain is lost. Use as an async context manager."""

    def __init__(
        self,
        own: OwnNode,
        roster: Roster,
        deployment: Deployment,
        limits: Limits = USUAL,
        *,
        say: Callable[[str], None] = lambda line: None,
        least_context: int | None = None,
    ) -> None:
        """`deployment` is the first one; `say` takes lines for the user.

        `least_context` is how few tokens per request will do where nodes are lost; as many as before if none is given.
        """
        self.chain: Chain
        self.num_recoveries = 0
        self.trouble = ""  # why there is no chain now
        self.timeline = Timeline()
        self.on_recovered: Callable[[Recovered], None] = lambda found: None
        self._own = own
        self._roster = roster
        self._deployment = deployment
        self._whole = deployment.plan  # with every node
        self._contexts = Contexts(least_context or self._whole.context, self._whole.context)
        self._limits = limits
        self._say = say
        self._epoch = 0
        self._recovery: Recovery | None = None  # until the chain that it led to has made a token known
        self._began = self._opened_at = 0.0  # seconds, monotonic
        self._still_since: float | None = None
        self._story = ""  # what was lost, for the user
        self._cause = self._culprit = ""  # class name of the error that was first, and whose it was
        self._lost = deployment  # that of the lost chain
        self._present: list[Present] = []
        self._useless: set[str] = set()  # incarnations
        self._chains = AsyncExitStack()
        self._lookout = Lookout(roster, self._useless, say)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._lookout.stop()
        await self._chains.aclose()

    async def open(self, progress: Progress = lambda node, report: None) -> Chain:
        """Load, and open the first chain, anew if a node is lost meanwhile.

        Raises:
            BrigadeError: as `reopen`; a node that cannot hold its layers says so at once.
        """
        self._present = self._roster.present(await self._roster.ask(_LONGEST_ASK_S))
        try:
            chain = await self._open(self._deployment.plan, progress)
        except BrigadeError as error:
            if await self._is_lasting(error) or not self._limits.recovery_s:
                raise
            self._begin(error, None)
            return await self._replace_chain(error, progress)
        self._look_out(chain)
        return chain

    async def reopen(self, error: BrigadeError) -> Chain:
        """The chain on which requests go on after this error.

        Raises:
            StageLost: none could be opened in time.
            BrigadeError: what would be the same on every chain.
        """
        if isinstance(error, _LASTING) or not self._limits.recovery_s:
            raise error
        self._begin(error, self.chain.still_since)
        return await self._replace_chain(error)

    @property
    def roster(self) -> Roster:
        """All workers, in the chain or not."""
        return self._roster

    @property
    def whole(self) -> Plan:
        """The plan with every node."""
        return self._whole

    @property
    def missing(self) -> list[str]:
        """Nodes that the plan counted on, and that the present chain is without."""
        present = {assignment.name for assignment in self.chain.plan.assignments}
        return [assignment.name for assignment in self._whole.assignments if assignment.name not in present]

    async def _replace_chain(self, error: BrigadeError, progress: Progress = lambda node, report: None) -> Chain:
        self.trouble = str(error)
        try:
            async with asyncio.timeout(self._limits.recovery_s - self._passed_s):
                await self._lookout.stop()
                chain = await self._recover(error, progress)
        except TimeoutError:
            raise self._given_up(error) from None
        self.trouble = ""
        self._look_out(chain)
        return chain

    def _begin(self, error: BrigadeError, still_since: float | None) -> None:
        """A chain that was lost before it made a token known is part of the recovery that it came from."""
        held_s = time.monotonic() - self._opened_at
        self._lost = self._deployment
        if self._recovery is None or held_s > self._limits.recovery_s:
            self._recovery = Recovery(self._lost.plan, self._limits)
            self._began = time.monotonic()
            self.timeline = Timeline(lost_at=self._began)
            self._still_since = still_since
            self._story, self._cause, self._culprit = str(error), type(error).__name__, error.node
            for incarnation in self._useless:
                self._recovery.rule_out(incarnation)
        for peer in self._lost.peers:
            if peer.is_draining:
                self._rule_out(peer.name)
                self._recovery.leaves(peer.name)
        self._blame(error)

    async def _recover(self, error: BrigadeError, progress: Progress) -> Chain:
        assert self._recovery is not None
        while True:
            await self._chains.aclose()
            found = await self._find_plan(error)
            self.timeline.found_at = time.monotonic()
            try:
                chain = await self._open(found.plan, progress)
            except BrigadeError as again:
                if await self._is_lasting(again):
                    raise
                error = again
                self._recovery.failed(self._passed_s, again.node)
                self._blame(again)
                await asyncio.sleep(_PAUSE_S)
            else:
                self._go_on(chain, found)
                return chain

    async def _find_plan(self, error: BrigadeError) -> Reopen:
        """Ask who is there until that is enough. Raises StageLost once the time is over."""
        assert self._recovery is not None
        ask_s, asked = _FIRST_ASK_S, self._who_may_answer(error)
        while True:
            replies = await self._roster.ask(ask_s, asked)
            self._present = self._roster.present(replies)
            self._recovery.saw(self._passed_s, self._present)
            decision = self._recovery.decide(self._passed_s, self._split)
            if isinstance(decision, Reopen):
                return decision
            if isinstance(decision, GiveUp):
                raise self._given_up(error)
            if ask_s == _LONGEST_ASK_S:
                self._kill_silent(replies.keys())
            await self._roster.pause(min(_PAUSE_S, decision.for_s))
            asked, ask_s = None, min(_LONGEST_ASK_S, 2 * ask_s)

    async def _open(self, plan: Plan, progress: Progress = lambda node, report: None) -> Chain:
        """Have the nodes load what they lack, and open a chain; nothing is left of it if that fails."""
        names = [assignment.name for assignment in plan.assignments[1:]]
        peers = self._roster.peers(names)
        if len(peers) < len(names):
            raise StageLost("has ended while a chain was opened", node=self._roster.gone(names))
        self._deployment = replace(self._deployment, plan=plan, peers=peers)
        await self._own.load(self._deployment, progress)
        self.timeline.loaded_at = time.monotonic()
        self._epoch += 1
        async with AsyncExitStack() as stack:
            chain = Chain(self._own, self._deployment, self._epoch, costs=self._costs_of(plan), say=self._say)
            await stack.enter_async_context(chain)
            await chain.open(progress)
            self._chains = stack.pop_all()
        chain.can_spare, chain.on_token = self._can_spare, self._ended
        self.chain, self._opened_at = chain, time.monotonic()
        self.timeline.opened_at = self._opened_at
        return chain

    def _costs_of(self, plan: Plan) -> ChainCosts | None:
        """Those of the lost chain where a request waits and they may serve; None has the new one measure its own."""
        if self._recovery is None or self._still_since is None or self.chain.num_stages != len(plan.assignments):
            return None
        return self.chain.costs

    async def _is_lasting(self, error: BrigadeError) -> bool:
        """Whether it would be the same again.

        What a worker refuses is for the user to mend as long as no chain has been open at all; later ones are opened
        without it. One that was started anew meanwhile only lacks what the one before had loaded.
        """
        if self._opened_at:
            return isinstance(error, _LASTING) and not error.node
        if not isinstance(error, _REFUSALS):
            return False
        known = {each.node.name: each.incarnation for each in self._present}
        replies = await self._roster.ask(_FIRST_ASK_S, {error.node} & self._roster.members.keys())
        return all(reply.incarnation == known.get(name) for name, reply in replies.items())

    def _go_on(self, chain: Chain, found: Reopen) -> None:
        self.num_recoveries += 1
        took_s = time.monotonic() - self._began
        self._story += f"; going on {how(found, chain.plan)} after {took_s:.1f} s"
        if self._still_since is None:  # no request was under way
            self._ended()

    def _ended(self) -> None:
        """The chain is as good as any other: the recovery is over."""
        if self._recovery is None:
            return
        still, still_s = "", None
        if self._still_since is not None:
            still_s = time.monotonic() - self._still_since
            still = f", the stream stood still for {still_s:.1f} s"
        self._say(self._story + still)
        took_s = self._opened_at - self._began
        self.on_recovered(Recovered(self._cause, self._culprit, self._story + still, took_s, still_s))
        self._recovery = None

    def _given_up(self, error: BrigadeError) -> StageLost:
        assert self._recovery is not None
        missing = self._recovery.missing
        who = f"{' and '.join(missing)} did not come back" if missing else "no chain could be opened"
        fits = self._split([each.node for each in self._present]) is not None
        why = "" if fits else ", and the model does not fit without"
        why += f" ({self._roster.refusal})" if self._roster.refusal else ""
        return StageLost(f"{error.message}; {who} within {self._limits.recovery_s:g} s{why}", node=error.node)

    def _blame(self, error: BrigadeError) -> None:
        """Do without a process that would only fail again; one of our own is started again."""
        if isinstance(error, (EngineHung, NodeSilent)):
            self._roster.kill_own(error.node)
        if isinstance(error, (EngineHung, *_LASTING)):
            self._rule_out(error.node)

    def _rule_out(self, name: str) -> None:
        """Of this node the process that was asked last for a chain: by now there may be another one."""
        assert self._recovery is not None
        for each in self._present:
            if each.node.name == name and each.incarnation:
                self._useless.add(each.incarnation)
                self._recovery.rule_out(each.incarnation)

    def _who_may_answer(self, error: BrigadeError) -> Collection[str] | None:
        """Whom to ask first, None for all: a lost node that nobody is to wait for does not hold up the others."""
        return None if self._limits.rejoin_s else self._roster.members.keys() - {error.node}

    def _kill_silent(self, answering: Collection[str]) -> None:
        """End workers of our own that were part of the lost chain, and still run and say nothing."""
        for peer in self._lost.peers:
            if peer.name not in answering and self._roster.members[peer.name].peer is peer:
                self._roster.kill_own(peer.name)

    def _can_spare(self, name: str) -> bool:
        """Whether requests can go on without this worker."""
        if not self._limits.recovery_s:
            return False
        return self._split([each.node for each in self._present if each.node.name != name]) is not None

    def _split(self, nodes: Sequence[Node]) -> Plan | None:
        """The best plan over these nodes, where one fits; over all of them the one that was asked for."""
        if [node.name for node in nodes] == [assignment.name for assignment in self._whole.assignments]:
            return self._whole
        spec = self._deployment.spec
        found = plan_largest(spec, nodes, self._contexts) if len(nodes) <= spec.num_layers else None
        return found if found and found.fits else None

    def _look_out(self, chain: Chain) -> None:
        self._lookout.start({peer.name for peer in chain.peers}, lambda: self._recovery is None)

    @property
    def _passed_s(self) -> float:
        return time.monotonic() - self._began
