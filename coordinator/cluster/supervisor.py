"""Supervisor: keeps a chain open over whichever nodes there are. What to do next is said in planning/recovery.py."""

import asyncio
from collections.abc import Callable, Collection
from typing import Self

from coordinator.cluster.chain import Chain
from coordinator.cluster.chains import Chains
from coordinator.cluster.deployment import Deployment, OwnNode, Progress
from coordinator.cluster.lookout import Lookout
from coordinator.cluster.muster import Muster
from coordinator.cluster.outage import ChainState, Event, Outage, following
from coordinator.cluster.roster import Roster
from coordinator.cluster.timeline import Recovered, Timeline
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import Plan
from coordinator.planning.recovery import USUAL, GiveUp, Limits, Reopen, how
from coordinator.planning.replan import Replan
from worker.errors import (
    BrigadeError,
    ConfigError,
    EngineHung,
    InputError,
    InternalError,
    ModelError,
    NodeBusy,
    NodeReturned,
    NodeSilent,
    OutOfMemory,
    SamplingError,
    StageLost,
)

_FIRST_ASK_S = 0.3  # then longer each time, up to
_LONGEST_ASK_S = 1.0
_PAUSE_S = 0.1  # between two rounds, whatever the nodes say
_IDLE_S = 2.0  # after which a chain is ended for the sake of a node that is there again
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
        replan: Replan | None = None,
    ) -> None:
        """`deployment` is the first one; `say` takes lines for the user.

        `least_context` is how few tokens per request will do where nodes are lost; as many as before if none is given.
        `replan` makes the plans of later chains; without it they are split by bytes.
        """
        self.chain: Chain
        self.num_recoveries = 0
        self.on_recovered: Callable[[Recovered], None] = lambda found: None
        self._state = ChainState.STARTING
        self._outage: Outage | None = None  # the latest
        self._limits = limits
        self._say = say
        replan = replan or Replan(deployment.spec)
        self._muster = Muster(roster, deployment.spec, deployment.plan, least_context, replan)
        self._chains = Chains(own, roster, deployment, say)
        self._lookout = Lookout(roster, self._muster.useless, say, self._join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self._lookout.stop()
        finally:
            await self._chains.close()

    async def open(self, progress: Progress = lambda node, report: None) -> Chain:
        """Load, and open the first chain, anew if a node is lost meanwhile.

        Raises:
            BrigadeError: as `reopen`; a node that cannot hold its layers says so at once.
        """
        await self._muster.ask(_LONGEST_ASK_S)
        try:
            chain = await self._chains.open(self.whole, Timeline(), progress, None)
        except BrigadeError as error:
            if await self._is_lasting(error) or not self._limits.recovery_s:
                raise
            return await self._replace_chain(error, self._begin(error, None), progress)
        self._take(chain)
        self._look_out()
        return chain

    async def reopen(self, error: BrigadeError) -> Chain:
        """The chain on which requests go on after this error.

        Raises:
            StageLost: none could be opened in time.
            BrigadeError: what would be the same on every chain.
        """
        if isinstance(error, _LASTING) or not self._limits.recovery_s:
            raise error
        return await self._replace_chain(error, self._begin(error, self.chain.still_since))

    @property
    def roster(self) -> Roster:
        """All workers, in the chain or not."""
        return self._muster.roster

    @property
    def whole(self) -> Plan:
        """The plan with every node."""
        return self._muster.whole

    @property
    def missing(self) -> list[str]:
        """Nodes that the plan counted on, and that the present chain is without."""
        present = {assignment.name for assignment in self.chain.plan.assignments}
        return [assignment.name for assignment in self.whole.assignments if assignment.name not in present]

    @property
    def trouble(self) -> str:
        """Why there is no chain now; nothing while there is one, or has been none."""
        return "" if self._outage is None or self._state.is_open else self._outage.trouble

    @property
    def timeline(self) -> Timeline:
        """The latest recovery's."""
        return Timeline() if self._outage is None else self._outage.timeline

    def _enter(self, event: Event) -> None:
        self._state = following(self._state, event)

    def _begin(self, error: BrigadeError, still_since: float | None) -> Outage:
        """A chain that was lost before it made a token known is part of the outage that it came from."""
        lost, outage = self._chains.deployment, self._outage
        if outage is None or self._state is not ChainState.PROVING or outage.open_s > self._limits.recovery_s:
            outage = Outage.by(error, lost, still_since, self._limits, self._muster.useless)
        self._enter(Event.LOSS)
        self._outage, outage.lost, outage.trouble = outage, lost, str(error)
        for peer in lost.peers:
            if peer.is_draining:
                self._rule_out(outage, peer.name)
                outage.recovery.leaves(peer.name)
        self._blame(outage, error)
        return outage

    async def _replace_chain(
        self, error: BrigadeError, outage: Outage, progress: Progress = lambda node, report: None
    ) -> Chain:
        try:
            async with asyncio.timeout(self._limits.recovery_s - outage.passed_s):
                await self._lookout.stop()
                chain = await self._recover(error, outage, progress)
        except TimeoutError:
            raise self._given_up(error, outage) from None
        self._look_out()
        return chain

    async def _recover(self, error: BrigadeError, outage: Outage, progress: Progress) -> Chain:
        while True:
            await self._chains.close()
            found = await self._find_plan(error, outage)
            outage.timeline.mark_found()
            try:
                chain = await self._chains.open(found.plan, outage.timeline, progress, self._costs_of(found.plan))
            except BrigadeError as again:
                if await self._is_lasting(again):
                    raise
                error = again
                outage.recovery.failed(outage.passed_s, again.node)
                self._blame(outage, again)
                await asyncio.sleep(_PAUSE_S)
            else:
                self._take(chain)
                self._go_on(outage, how(found, chain.plan))
                return chain

    async def _find_plan(self, error: BrigadeError, outage: Outage) -> Reopen:
        """Ask who is there until that is enough. Raises StageLost once the time is over."""
        ask_s, asked = _FIRST_ASK_S, await self._who_may_answer(error)
        if isinstance(error, NodeReturned):  # nobody waits, and it may need a moment
            ask_s, asked = _LONGEST_ASK_S, None
        while True:
            answering = await self._muster.ask(ask_s, asked)
            outage.recovery.saw(outage.passed_s, self._muster.present)
            decision = outage.recovery.decide(outage.passed_s, self._muster.split)
            if isinstance(decision, Reopen):
                return decision
            if isinstance(decision, GiveUp):
                raise self._given_up(error, outage)
            if ask_s == _LONGEST_ASK_S:
                self._muster.kill_silent(outage.lost.peers, answering)
            await self.roster.pause(min(_PAUSE_S, decision.for_s))
            asked, ask_s = None, min(_LONGEST_ASK_S, 2 * ask_s)

    def _costs_of(self, plan: Plan) -> ChainCosts | None:
        """Those of the lost chain where a request waits and they may serve; None has the new one measure its own."""
        is_awaited = self._outage is not None and self._outage.still_since is not None
        return self.chain.costs if is_awaited and self.chain.num_stages == len(plan.assignments) else None

    async def _is_lasting(self, error: BrigadeError) -> bool:
        """Whether it would be the same again.

        What a worker refuses is for the user to mend as long as no chain has been open at all; later ones are opened
        without it. One that was started anew meanwhile only lacks what the one before had loaded.
        """
        if not self._state.is_first:
            return isinstance(error, _LASTING) and not error.node
        return isinstance(error, _REFUSALS) and await self._muster.is_unchanged(error.node, _FIRST_ASK_S)

    def _take(self, chain: Chain) -> None:
        """This is the chain from now on."""
        chain.can_spare, chain.on_token = self._can_spare, self._proven
        self.chain = chain
        self._enter(Event.OPENED)

    def _go_on(self, outage: Outage, how: str) -> None:
        self.num_recoveries += not outage.is_return
        outage.goes_on(how)
        if outage.still_since is None:  # no request was under way
            self._proven()

    def _proven(self) -> None:
        """The chain is as good as any other: the outage is over, if there was one."""
        if self._state is ChainState.PROVING and self._outage is not None:
            recovered = self._outage.end()
            self._say(recovered.story)
            if not self._outage.is_return:
                self.on_recovered(recovered)
        self._enter(Event.PROVEN)

    def _given_up(self, error: BrigadeError, outage: Outage) -> StageLost:
        missing = outage.recovery.missing
        who = f"{' and '.join(missing)} did not come back" if missing else "no chain could be opened"
        why = "" if self._muster.fits() else ", and the model does not fit without"
        why += f" ({self.roster.refusal})" if self.roster.refusal else ""
        return StageLost(f"{error.message}; {who} within {self._limits.recovery_s:g} s{why}", node=error.node)

    def _blame(self, outage: Outage, error: BrigadeError) -> None:
        """Do without a process that would only fail again; one of our own is started again."""
        if isinstance(error, (EngineHung, NodeSilent)):
            self.roster.kill_own(error.node)
        if isinstance(error, (EngineHung, *_LASTING)):
            self._rule_out(outage, error.node)

    def _rule_out(self, outage: Outage, name: str) -> None:
        for incarnation in self._muster.rule_out(name):
            outage.recovery.rule_out(incarnation)

    async def _who_may_answer(self, error: BrigadeError) -> Collection[str] | None:
        """Whom to ask first, None for all: a lost node that nobody is to wait for does not hold up the others.

        It may have lost one of its addresses only, though, unless it was there all the time.
        """
        may_be_elsewhere = isinstance(error, StageLost) and not isinstance(error, EngineHung)
        if self._limits.rejoin_s or (may_be_elsewhere and await self.roster.is_elsewhere(error.node, _FIRST_ASK_S)):
            return None
        return self.roster.members.keys() - {error.node}

    def _can_spare(self, name: str) -> bool:
        """Whether requests can go on without this worker."""
        return bool(self._limits.recovery_s) and self._muster.fits(without=name)

    def _join(self, name: str) -> bool:
        """End the chain for one with this node, if nobody needs it now."""
        if name not in self.missing or self.chain.idle_s < _IDLE_S:
            return False
        self.chain.end(NodeReturned("is there again", node=name))
        return True

    def _look_out(self) -> None:
        chained = {peer.name for peer in self.chain.peers}
        self._lookout.start(chained | self._muster.spared, lambda: self._state is ChainState.SOUND)
