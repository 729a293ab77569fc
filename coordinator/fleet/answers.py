"""Whether a worker that was started answers where the chain will call it, and why not if its process has ended."""

import asyncio
from collections import deque

from coordinator.cluster.ways import Ways
from coordinator.fleet.ssh import Remote
from worker.config import Worker
from worker.errors import BrigadeError, StageLost, Unanswered
from worker.node.network import Network
from worker.process.printable import printable

_WITHIN_S = 60.0
_AT_ONCE_S = 1.0
_LOG_LINES = 3


async def incarnation(worker: Worker, network: Network) -> str:
    """Of the process that answers at its addresses now; "" if none does."""
    try:
        reply = await _ask(worker, network, _AT_ONCE_S, waits=False)
    except BrigadeError:
        return ""
    return reply[1]


async def wait_answer(worker: Worker, network: Network, remote: Remote, values: dict[str, str], before: str) -> str:
    """The address at which it answers, once it does.

    Args:
        before: the incarnation that answered there before it was started, and is thus another process's.
    Raises:
        BrigadeError: it has ended, or does not answer, or another process does.
    """
    watching = asyncio.create_task(remote.run("watch", values, 2 * _WITHIN_S))
    asking = asyncio.create_task(_ask(worker, network, _WITHIN_S, waits=True))
    try:
        await asyncio.wait({watching, asking}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            await watching  # which may have failed instead of ending
            raise BrigadeError(f"ended when it was started; its log: {await _last_words(remote, values)}")
        address, found, node = await asking
    except StageLost as error:
        raise BrigadeError(f"runs, but {_why(error)} Its log: {await _last_words(remote, values)}") from None
    finally:
        for task in (watching, asking):
            task.cancel()
        await asyncio.gather(watching, asking, return_exceptions=True)
    if node != worker.name or found == before:
        shown = printable(node)
        raise BrigadeError(f"another process answers at {address} as worker {shown}: end that one, or use another port")
    return address


def _why(error: StageLost) -> str:
    """One sentence or two of the worker that was started just now."""
    if isinstance(error, Unanswered):
        asked = "is that its address, and may it accept connections (System Settings, Network, Firewall)?"
        return f"{error.found}: {asked}"
    return f"{error.message}."


async def _ask(worker: Worker, network: Network, within_s: float, *, waits: bool) -> tuple[str, str, str]:
    """Address, incarnation and name of who answers."""
    ways = Ways(worker.name, worker.addresses, network, lambda line: None)
    try:
        reply = await ways.ask(within_s, waits=waits)
        return ways.address, reply.incarnation, reply.node
    finally:
        await ways.close()


async def _last_words(remote: Remote, values: dict[str, str]) -> str:
    """Of this start: what is older was about something else."""
    lines: deque[str] = deque(maxlen=_LOG_LINES)
    asked = {"lines": str(_LOG_LINES), "follow": "no", "since_start": "yes"}
    await remote.output("log", values | asked, lines.append)
    return "; ".join(printable(line) for line in lines if line) or "empty"
