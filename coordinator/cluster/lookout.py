"""Lookout: looks for nodes that the chain is without, and has them join once nothing is under way."""

import asyncio
from collections.abc import Callable, Set

from coordinator.cluster.roster import Roster
from worker.errors import BrigadeError, internal_error_text

_LOOK_S = 2.0  # between two looks
_ASK_S = 1.0


class Lookout:
    """Looks from `start` to `stop`. What asks changes which address is in use: nobody else may ask meanwhile."""

    def __init__(
        self, roster: Roster, useless: Set[str], say: Callable[[str], None], join: Callable[[str], bool]
    ) -> None:
        """`useless` are incarnations that no chain is opened with, by now; `say` takes lines for the user.

        `join` opens a chain with this node if none is needed now; it returns whether it does.
        """
        self._join = join
        self._returned: set[str] = set()  # nodes that have not joined yet
        self._roster = roster
        self._useless = useless
        self._say = say
        self._looking: asyncio.Task[None] | None = None
        self._told: set[str] = set()  # nodes of which it was said

    def start(self, chained: Set[str], is_wanted: Callable[[], bool]) -> None:
        """Look for the nodes that are not `chained`, whenever that `is_wanted`."""
        self._looking = asyncio.create_task(self._look(chained, is_wanted))
        self._looking.add_done_callback(self._ended)

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
            self._looking = None

    def _ended(self, looking: "asyncio.Task[None]") -> None:
        """Say what ended it, if anything but `stop` did: the chain is none the worse for it."""
        if not looking.cancelled() and (error := looking.exception()):
            self._say(str(error) if isinstance(error, BrigadeError) else internal_error_text(error))

    async def _look(self, chained: Set[str], is_wanted: Callable[[], bool]) -> None:
        absent = self._roster.members.keys() - chained
        self._told &= absent
        self._returned &= absent
        while True:
            await asyncio.sleep(_LOOK_S)
            if not is_wanted():
                continue
            if any(self._join(name) for name in self._returned):
                self._returned.clear()  # each is tried once
                return
            if not absent - self._told:
                continue
            for name, reply in (await self._roster.ask(_ASK_S, absent - self._told)).items():
                if reply.incarnation not in self._useless:
                    self._told.add(name)
                    self._returned.add(name)
                    self._say(f"worker {name} is there again; it joins once nothing is under way")
