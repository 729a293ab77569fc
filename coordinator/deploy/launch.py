"""Bringing workers up and down over ssh, all nodes at once; a failure of one node does not stop the others."""

import asyncio
import re
import sys
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from coordinator.cluster.addresses import AddressRace
from coordinator.deploy.install import (
    LaunchMode,
    RemoteState,
    Target,
    choose_python,
    read_pythons,
    read_state,
    require_space,
    steps_for,
    uv_request,
    version_folder,
)
from coordinator.deploy.package import Package
from coordinator.deploy.ssh import Remote
from worker.config import WorkerConfig
from worker.errors import BrigadeError, ConfigError, StageLost, Unanswered
from worker.node.network import Network, has_succeeded
from worker.platform.tasks import cancel_all, together
from worker.platform.text import printable

_LOOK_S = 60.0
_SEND_S = 600.0
_INSTALL_S = 1800.0
_SETTLE_S = 90.0
ANSWER_S = 60.0
ENDS_S = 10.0  # for a worker to come as far as its port
_LOG_LINES = 3
_PYTHON = sys.version_info[:2]
_IMPORT_FAILED = re.compile(r"ModuleNotFoundError|ImportError|No module named")  # of a damaged installation

SayOf = Callable[[str, str], None]  # takes a node and its present phase


@dataclass(frozen=True)
class Outcome:
    """What was done on a node and where its worker answers, or the error that prevented it."""

    name: str
    place: str  # of ssh
    done: str = ""
    kind: str = ""  # of service
    address: str = ""
    error: BrigadeError | None = None


@dataclass(frozen=True)
class Launch:
    """How to bring up the workers of a configuration.

    Args:
        raw: the keys of cluster.yaml.
        keys: the certificate files by node name.
    """

    raw: Mapping[str, Any]
    package: Package
    keys: Mapping[str, bytes]
    network: Network
    action: LaunchMode
    accounts: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    async def run(self, workers: Iterable[WorkerConfig], report: SayOf) -> list[Outcome]:
        """Bring all of them up at once."""
        return await _on_each(workers, report, self._bring_up)

    async def _bring_up(self, worker: WorkerConfig, remote: Remote, outcome: Outcome) -> Outcome:
        async with self.accounts[remote.place]:  # workers of one account take turns
            remote.report("looking")
            state = read_state(await remote.run("look", _LOOK_S))
            version = version_folder(self.package.id, state.versions, self.action)
            target = Target.of(worker.name, self.raw, version, self.keys.get(worker.name), state)
            steps = steps_for(target, state, self.action)
            before = await _incarnation(worker, self.network) if steps.restarts else ""
            if steps.installs:
                await self._install(remote, version, state)
            if steps.files:
                await remote.send(steps.files, _SEND_S)
            if not steps.are_none:
                wanted = {"kind": state.kind, "version": version, "started": target.started, "seen": state.turn}
                restarts = "yes" if steps.restarts else "no"
                lines = await remote.run("settle", _SETTLE_S, restarts=restarts, **wanted)
                before = "" if "settled" in lines else before  # another launch has started this worker meanwhile
        remote.report("waiting for its answer")
        address = await wait_answer(worker, self.network, remote, before, is_new=steps.restarts)
        return replace(outcome, done=steps.summary, kind=state.kind, address=address)

    async def _install(self, remote: Remote, version: str, state: RemoteState) -> None:
        require_space(state)
        wanted, python = ".".join(map(str, _PYTHON)), ""
        if not state.uv:
            lines = await remote.run("pythons", _LOOK_S, wanted=wanted)
            python = choose_python(read_pythons(lines.get("python", ())), _PYTHON).path
        remote.report("sending this version")
        wheel_name, constraints = self.package.wheel_name, self.package.constraints.encode()
        await remote.send({wheel_name: self.package.wheel, "constraints.txt": constraints}, _SEND_S)
        how = {"version": version, "wheel_name": wheel_name, "uv": state.uv, "python": python}
        how["wanted"] = uv_request(_PYTHON)
        await remote.run("install", _INSTALL_S, **how)


async def stop(workers: Iterable[WorkerConfig], report: SayOf) -> list[Outcome]:
    """Stop them all at once; their sessions move to other nodes, or get ten seconds to end."""

    async def stop_one(worker: WorkerConfig, remote: Remote, outcome: Outcome) -> Outcome:
        remote.report("stopping")
        lines = await remote.run("stop", _SETTLE_S)
        done = {"running": "stopped", "stopped": "was not running", "absent": "was never launched"}
        return replace(outcome, done=done.get(lines.get("was", [""])[-1], "stopped"))

    return await _on_each(workers, report, stop_one)


async def _on_each(
    workers: Iterable[WorkerConfig], report: SayOf, act: Callable[[WorkerConfig, Remote, Outcome], Awaitable[Outcome]]
) -> list[Outcome]:
    async def act_on(worker: WorkerConfig) -> Outcome:
        assert worker.ssh is not None
        outcome = Outcome(worker.name, worker.ssh)
        try:
            outcome = await act(worker, Remote(worker.name, worker.ssh, partial(report, worker.name)), outcome)
        except BrigadeError as error:
            outcome = replace(outcome, error=error.at(worker.name))
        report(worker.name, outcome.done or "failed")
        return outcome

    return await together(*map(act_on, workers))


async def wait_answer(
    worker: WorkerConfig, network: Network, remote: Remote, before: str = "", *, is_new: bool = True
) -> str:
    """Wait until the worker answers where the chain will call it, and return that address.

    Args:
        before: the incarnation that answered there before the start, and thus belongs to another process.
        is_new: whether the worker was started just now; else it may have hung for long.
    Raises:
        BrigadeError: the worker ended or does not answer, or another process answers. ConfigError: TLS fails.
    """
    watching = asyncio.create_task(remote.run("watch", 2 * ANSWER_S))
    asking = asyncio.create_task(_ask(worker, network, ANSWER_S, waits=True))
    try:
        await asyncio.wait({watching, asking}, return_when=asyncio.FIRST_COMPLETED)
        if not has_succeeded(asking):  # the worker may be about to end, as where its port is taken
            await asyncio.wait({watching}, timeout=ENDS_S)
            if watching.done():
                await watching  # raises if watching failed; else the worker has ended
                log = await _last_lines(remote)
                fix = "; brigade launch --update installs it anew" if _IMPORT_FAILED.search(log) else ""
                raise BrigadeError(f"ended when it was started; its log: {log}{fix}")
        address, incarnation, node = await asking
    except StageLost as error:
        why = f"{error.message}."
        if isinstance(error, Unanswered):
            fix = "is that its address, and may it accept connections (System Settings, Network, Firewall)?"
            hangs = "" if is_new else f" If it hangs, {network.start_hint(worker.name)} --restart."
            why = f"{error.found}: {fix}{hangs}"
        raise BrigadeError(f"runs, but {why} Its log: {await _last_lines(remote)}") from None
    except ConfigError as error:  # though its certificate and its configuration were just written
        found = error.message.removesuffix(f"; {network.launch_hint(worker.name)}")
        why = f"{found}; or another process answers at its address."
        raise ConfigError(f"{why} Its log: {await _last_lines(remote)}") from None
    finally:
        await cancel_all(watching, asking)
    if node != worker.name or incarnation == before:
        name = printable(node)
        raise BrigadeError(f"another process answers at {address} as worker {name}: end that one, or use another port")
    return address


async def _incarnation(worker: WorkerConfig, network: Network) -> str:
    """Return the incarnation of the process that answers at the worker's addresses now; "" if none does."""
    try:
        return (await _ask(worker, network, 1.0, waits=False))[1]
    except BrigadeError:
        return ""


async def _ask(worker: WorkerConfig, network: Network, within_s: float, *, waits: bool) -> tuple[str, str, str]:
    """Return address, incarnation and name of the process that answers."""
    addresses = AddressRace(worker.name, worker.addresses, network, lambda line: None)
    try:
        reply = await addresses.ask(within_s, waits=waits)
        return addresses.address, reply.incarnation, reply.node
    finally:
        await addresses.close()


async def _last_lines(remote: Remote) -> str:
    """Return the end of the worker's log since this start."""
    lines: deque[str] = deque(maxlen=_LOG_LINES)
    await remote.log(_LOG_LINES, lines.append, since_start=True)
    return "; ".join(printable(line) for line in lines if line) or "empty"
