"""Case: one fault on real processes: what is done, what is promised, and how to see whether it is kept."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from coordinator.planning.recovery import Limits
from coordinator.sessions.output import Answer
from tools.faults.rig import Rig
from tools.faults.trial import Seen
from tools.worker_process import is_free
from worker.errors import BrigadeError

KILLED_S = 0.5  # a killed worker is noticed within milliseconds, but this machine may be busy
STOPPED_S = 2.5  # one second without a sign until it is asked, one for its reply

COMES_BACK = Limits(rejoin_s=50, recovery_s=60)
IS_GONE = Limits(rejoin_s=0, recovery_s=60)


@dataclass(frozen=True)
class Case:
    """`group` names the cases that share worker processes; `--part` chooses by its beginning."""

    group: str
    done: str
    promised: str
    run: Callable[[Rig], Awaitable[Seen]]


@dataclass(frozen=True)
class Row:
    """A case and what was seen."""

    group: str
    done: str
    promised: str
    seen: Seen

    @property
    def part(self) -> str:
        return self.group.partition("-")[0]


async def try_case(case: Case, rig: Rig) -> Row:
    """The case's row; one that cannot even be carried out is not kept."""
    try:
        seen = await case.run(rig)
    except (BrigadeError, AssertionError, TimeoutError, OSError) as error:
        seen = Seen(f"{type(error).__name__}: {error}", is_kept=False)
    return Row(case.group, case.done, case.promised, seen)


def num_pieces(answer: Answer) -> int:
    """In how many steps its tokens became known."""
    return len(set(answer.token_times))


async def still(seconds: float) -> None:
    """Leave things as they are for so long: the length of a pause is what a case is about."""
    await asyncio.sleep(seconds)


async def end_workers(rig: Rig) -> Seen:
    """What is left of workers after all that was done to them and to their neighbours."""
    await rig.make_whole()
    codes = await rig.end()
    ports = [is_free(node.address) for node in rig.nodes.values()]
    traces = sum(node.said.count("Traceback") + node.said.count("internal error") for node in rig.nodes.values())
    return Seen(
        f"exit codes {codes}, {ports.count(False)} ports in use, {traces} tracebacks",
        is_kept=codes == [0, 0] and all(ports) and not traces,
    )


def ending(group: str) -> Case:
    """The last case of every group."""
    return Case(group, "SIGTERM to the workers", "exit code 0, no process, no port, no traceback left", end_workers)
