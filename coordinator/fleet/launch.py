"""Launch: brings the worker of each node up, or down, over ssh. One node's failure is its own."""

import asyncio
import secrets
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from coordinator.fleet.answers import incarnation, wait_answer
from coordinator.fleet.found import Found, choose_python, folder_of, read_found, read_pythons, require_room
from coordinator.fleet.node_part import node_part
from coordinator.fleet.packing import Package
from coordinator.fleet.ssh import Remote
from coordinator.fleet.steps import DEFINITIONS, Action, Steps, Wish, steps_for, version_folder
from worker.config import Worker
from worker.errors import BrigadeError
from worker.node.identity import file_name
from worker.node.network import Network
from worker.process.printable import printable

_LOOK_S = 60.0
_SEND_S = 600.0
_INSTALL_S = 1800.0
_SETTLE_S = 90.0
_HERE = sys.version_info[:2]

Report = Callable[[str, str], None]  # takes a node and what is being done there


@dataclass(frozen=True)
class Outcome:
    """How it went with a node: what was done and where it answers, or why not."""

    name: str
    place: str
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
        """`raw` are the keys of cluster.yaml, `keys` the certificates by name; `report` is told of progress."""
        self._raw = raw
        self._package = package
        self._keys = keys
        self._network = network
        self._action = action
        self._report = report
        self._accounts: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # workers of one take turns

    async def run(self, workers: Iterable[Worker]) -> list[Outcome]:
        """All of them at once."""
        return await asyncio.gather(*(self._outcome(worker) for worker in workers))

    async def _outcome(self, worker: Worker) -> Outcome:
        assert worker.ssh is not None
        blank = Outcome(worker.name, worker.ssh)
        try:
            outcome = await self._bring_up(worker, Remote(worker.name, worker.ssh), blank)
        except BrigadeError as error:
            outcome = replace(blank, error=error.at(worker.name))
        self._report(worker.name, outcome.done or "failed")
        return outcome

    async def _bring_up(self, worker: Worker, remote: Remote, blank: Outcome) -> Outcome:
        values = values_of(worker.name) | {"parcel": f"sent-{secrets.token_hex(8)}"}
        async with self._accounts[remote.place]:
            self._report(worker.name, "looking")
            found = await self._look(remote, values)
            wish = self._wish(worker.name, found)
            steps = steps_for(wish, found, self._action)
            before = await incarnation(worker, self._network) if steps.restarts and not found.is_alive else ""
            if steps.installs:
                await self._install(remote, values, found)
            if not steps.are_none:
                what = {"kind": found.kind, "started": wish.started, "version": found.version, "seen": found.turn}
                told = await self._settle(remote, values | what, steps)
                before = "" if "settled" in told else before  # it is the worker that another launch has started
        self._report(worker.name, "waiting for its answer")
        address = await wait_answer(worker, self._network, remote, values, before)
        return replace(blank, done=steps.story, kind=found.kind, address=address)

    async def _look(self, remote: Remote, values: Mapping[str, str]) -> Found:
        found = read_found(await remote.run("look", values, _LOOK_S))
        return replace(found, version=version_folder(self._package.id, found.versions, self._action))

    def _wish(self, name: str, found: Found) -> Wish:
        config = yaml.safe_dump(node_part(self._raw, name), sort_keys=False, allow_unicode=True)
        return Wish(found.version, config.encode(), self._keys.get(name), DEFINITIONS[found.kind](name, found))

    async def _install(self, remote: Remote, values: Mapping[str, str], found: Found) -> None:
        require_room(found)
        wanted = ".".join(map(str, _HERE))
        python = "" if found.uv else await self._python(remote, {**values, "wanted": wanted})
        self._report(remote.node, "sending this version")
        files = {self._package.wheel_name: self._package.wheel, "constraints.txt": self._package.constraints.encode()}
        await self._send(remote, values, files)
        how = {
            "version": found.version,
            "wheel_name": self._package.wheel_name,
            "uv": found.uv,
            "python": python,
            "wanted": wanted,
        }
        await remote.run("install", {**values, **how}, _INSTALL_S, self._tell(remote.node))

    async def _python(self, remote: Remote, values: Mapping[str, str]) -> str:
        told = await remote.run("pythons", values, _LOOK_S)
        return choose_python(read_pythons(told.get("python", ())), _HERE).path

    async def _settle(self, remote: Remote, values: Mapping[str, str], steps: Steps) -> Mapping[str, Sequence[str]]:
        if steps.files:
            await self._send(remote, values, steps.files)
        restarts = "yes" if steps.restarts else "no"
        return await remote.run("settle", {**values, "restarts": restarts}, _SETTLE_S, self._tell(remote.node))

    async def _send(self, remote: Remote, values: Mapping[str, str], files: Mapping[str, bytes]) -> None:
        await remote.send(f"{folder_of(remote.node)}/{values['parcel']}", files, _SEND_S)

    def _tell(self, node: str) -> Callable[[str, str], None]:
        def tell(word: str, rest: str) -> None:
            if word == "phase":
                self._report(node, printable(rest))

        return tell


async def stop(workers: Iterable[Worker], report: Report) -> list[Outcome]:
    """Stop them all at once; sessions in progress go to other nodes, or get ten seconds to end."""

    async def stop_one(worker: Worker) -> Outcome:
        assert worker.ssh is not None
        blank = Outcome(worker.name, worker.ssh)
        report(worker.name, "stopping")
        try:
            told = await Remote(worker.name, worker.ssh).run("stop", values_of(worker.name), _SETTLE_S)
        except BrigadeError as error:
            return replace(blank, error=error.at(worker.name))
        stories = {"running": "stopped", "stopped": "was not running", "absent": "was never launched"}
        return replace(blank, done=stories.get(told.get("was", [""])[-1], "stopped"))

    return await asyncio.gather(*map(stop_one, workers))


def values_of(name: str) -> dict[str, str]:
    """What every script is told of the worker that it is about."""
    return {"name": name, "key_file": file_name(name)}
