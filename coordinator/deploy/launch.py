"""Bringing workers up and down over ssh, all nodes at once; a failure of one node does not stop the others."""

import asyncio
import secrets
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.cluster.addresses import Addresses
from coordinator.deploy.install import (
    Action,
    RemoteState,
    Steps,
    Target,
    choose_python,
    read_pythons,
    read_state,
    require_space,
    steps_for,
    version_folder,
    worker_folder,
)
from coordinator.deploy.package import Package
from coordinator.deploy.ssh import Remote
from worker.config import WorkerConfig
from worker.errors import BrigadeError, StageLost, Unanswered
from worker.node.identity import file_name
from worker.node.network import Network
from worker.platform.text import printable

_LOOK_S = 60.0
_SEND_S = 600.0
_INSTALL_S = 1800.0
_SETTLE_S = 90.0
_ANSWER_S = 60.0
_LOG_LINES = 3
_PYTHON = sys.version_info[:2]

Report = Callable[[str, str], None]  # takes a node and its present phase


@dataclass(frozen=True)
class Outcome:
    """What was done on a node and where its worker answers, or the error that prevented it."""

    name: str
    place: str  # of ssh
    done: str = ""
    kind: str = ""
    address: str = ""
    error: BrigadeError | None = None


class Launch:
    """One run over the workers of a configuration."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        package: Package,
        keys: Mapping[str, bytes],
        network: Network,
        action: Action,
        report: Report,
    ) -> None:
        """`raw` are the keys of cluster.yaml, `keys` the certificate files by node name."""
        self._raw = raw
        self._package = package
        self._keys = keys
        self._network = network
        self._action = action
        self._report = report
        self._accounts: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # workers of one account take turns

    async def run(self, workers: Iterable[WorkerConfig]) -> list[Outcome]:
        """Bring all of them up at once."""
        return await asyncio.gather(*(self._run_one(worker) for worker in workers))

    async def _run_one(self, worker: WorkerConfig) -> Outcome:
        assert worker.ssh is not None
        outcome = Outcome(worker.name, worker.ssh)
        try:
            outcome = await self._bring_up(worker, Remote(worker.name, worker.ssh), outcome)
        except BrigadeError as error:
            outcome = replace(outcome, error=error.at(worker.name))
        self._report(worker.name, outcome.done or "failed")
        return outcome

    async def _bring_up(self, worker: WorkerConfig, remote: Remote, outcome: Outcome) -> Outcome:
        values = values_of(worker.name) | {"parcel": f"sent-{secrets.token_hex(8)}"}
        async with self._accounts[remote.place]:
            self._report(worker.name, "looking")
            state = read_state(await remote.run("look", values, _LOOK_S))
            version = version_folder(self._package.id, state.versions, self._action)
            target = Target.of(worker.name, self._raw, version, self._keys.get(worker.name), state)
            steps = steps_for(target, state, self._action)
            before = await _incarnation(worker, self._network) if steps.restarts and not state.is_alive else ""
            if steps.installs:
                await self._install(remote, values | {"version": version}, state)
            if not steps.are_none:
                what = {"kind": state.kind, "started": target.started, "version": version, "seen": state.turn}
                lines = await self._settle(remote, values | what, steps)
                before = "" if "settled" in lines else before  # another launch has started this worker meanwhile
        self._report(worker.name, "waiting for its answer")
        address = await wait_answer(worker, self._network, remote, values, before)
        return replace(outcome, done=steps.summary, kind=state.kind, address=address)

    async def _install(self, remote: Remote, values: Mapping[str, str], state: RemoteState) -> None:
        require_space(state)
        wanted, python = ".".join(map(str, _PYTHON)), ""
        if not state.uv:
            lines = await remote.run("pythons", {**values, "wanted": wanted}, _LOOK_S)
            python = choose_python(read_pythons(lines.get("python", ())), _PYTHON).path
        self._report(remote.node, "sending this version")
        package = self._package
        files = {package.wheel_name: package.wheel, "constraints.txt": package.constraints.encode()}
        await self._send(remote, values, files)
        how = {"wheel_name": package.wheel_name, "uv": state.uv, "python": python, "wanted": wanted}
        await remote.run("install", {**values, **how}, _INSTALL_S, self._tell(remote.node))

    async def _settle(self, remote: Remote, values: Mapping[str, str], steps: Steps) -> Mapping[str, Sequence[str]]:
        if steps.files:
            await self._send(remote, values, steps.files)
        restarts = "yes" if steps.restarts else "no"
        return await remote.run("settle", {**values, "restarts": restarts}, _SETTLE_S, self._tell(remote.node))

    async def _send(self, remote: Remote, values: Mapping[str, str], files: Mapping[str, bytes]) -> None:
        await remote.send(f"{worker_folder(remote.node)}/{values['parcel']}", files, _SEND_S)

    def _tell(self, node: str) -> Callable[[str, str], None]:
        def tell(word: str, rest: str) -> None:
            if word == "phase":
                self._report(node, printable(rest))

        return tell


async def stop(workers: Iterable[WorkerConfig], report: Report) -> list[Outcome]:
    """Stop them all at once; their sessions move to other nodes, or get ten seconds to end."""

    async def stop_one(worker: WorkerConfig) -> Outcome:
        assert worker.ssh is not None
        outcome = Outcome(worker.name, worker.ssh)
        report(worker.name, "stopping")
        try:
            lines = await Remote(worker.name, worker.ssh).run("stop", values_of(worker.name), _SETTLE_S)
        except BrigadeError as error:
            return replace(outcome, error=error.at(worker.name))
        done = {"running": "stopped", "stopped": "was not running", "absent": "was never launched"}
        return replace(outcome, done=done.get(lines.get("was", [""])[-1], "stopped"))

    return await asyncio.gather(*map(stop_one, workers))


def values_of(name: str) -> dict[str, str]:
    """Return the values that every script takes about the worker `name`."""
    return {"name": name, "key_file": file_name(name)}


async def wait_answer(
    worker: WorkerConfig, network: Network, remote: Remote, values: dict[str, str], before: str
) -> str:
    """Wait until the started worker answers where the chain will call it, and return that address.

    Args:
        before: the incarnation that answered there before the start, and thus belongs to another process.
    Raises:
        BrigadeError: the worker ended or does not answer, or another process answers.
    """
    watching = asyncio.create_task(remote.run("watch", values, 2 * _ANSWER_S))
    asking = asyncio.create_task(_ask(worker, network, _ANSWER_S, waits=True))
    try:
        await asyncio.wait({watching, asking}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            await watching  # raises if watching failed; else the worker has ended
            raise BrigadeError(f"ended when it was started; its log: {await _last_lines(remote, values)}")
        address, incarnation, node = await asking
    except StageLost as error:
        why = f"{error.message}."
        if isinstance(error, Unanswered):
            asked = "is that its address, and may it accept connections (System Settings, Network, Firewall)?"
            why = f"{error.found}: {asked}"
        raise BrigadeError(f"runs, but {why} Its log: {await _last_lines(remote, values)}") from None
    finally:
        for task in (watching, asking):
            task.cancel()
        await asyncio.gather(watching, asking, return_exceptions=True)
    if node != worker.name or incarnation == before:
        name = printable(node)
        raise BrigadeError(f"another process answers at {address} as worker {name}: end that one, or use another port")
    return address


async def _incarnation(worker: WorkerConfig, network: Network) -> str:
    """Return the incarnation of the process that answers at the worker's addresses now; "" if none does."""
    try:
        _, incarnation, _ = await _ask(worker, network, 1.0, waits=False)
    except BrigadeError:
        return ""
    return incarnation


async def _ask(worker: WorkerConfig, network: Network, within_s: float, *, waits: bool) -> tuple[str, str, str]:
    """Return address, incarnation and name of the process that answers."""
    addresses = Addresses(worker.name, worker.addresses, network, lambda line: None)
    try:
        reply = await addresses.ask(within_s, waits=waits)
        return addresses.address, reply.incarnation, reply.node
    finally:
        await addresses.close()


async def _last_lines(remote: Remote, values: dict[str, str]) -> str:
    """Return the end of the worker's log since this start."""
    lines: deque[str] = deque(maxlen=_LOG_LINES)
    await remote.output("log", values | {"lines": str(_LOG_LINES), "follow": "no", "since_start": "yes"}, lines.append)
    return "; ".join(printable(line) for line in lines if line) or "empty"
