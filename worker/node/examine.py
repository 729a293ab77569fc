"""What a node tells of its machine and its links. The coordinator draws the conclusions."""

import asyncio
import platform
import shutil
import time
from collections.abc import AsyncIterator
from functools import partial
from logging import Logger

import mlx.core as mx
import psutil

from protos.brigade_pb2 import (
    ExamineRequest,
    Facts,
    LinkReply,
    LinkRequest,
    ListenRequest,
    ProbePart,
    ProbeReply,
)
from worker.node.links import answer_probe, measure_link, open_port
from worker.node.network import Network
from worker.node.rpc_errors import Context, Servicer
from worker.platform import linux, mac
from worker.platform.commands import Ask, Commands
from worker.platform.installation import cache_folder, code_on_disk, running_code
from worker.platform.machine import memory_budget
from worker.platform.threads import run_in_thread


async def read_facts(name: str, network: Network, memory_bytes: int | None = None) -> Facts:
    """Return what can be found out within seconds about this machine.

    Args:
        memory_bytes: what the node was told to offer; by default its memory budget.
    """
    commands = Commands()
    facts = Facts(
        node=name,
        system=platform.system(),
        system_version=platform.mac_ver()[0] or platform.release(),
        chip=str(mx.device_info().get("device_name", platform.processor())),
        memory_bytes=psutil.virtual_memory().total,
        budget_bytes=memory_bytes or memory_budget(),
        working_set_bytes=int(mx.device_info().get("max_recommended_working_set_size", 0)),
        versions=running_code().versions,
        code=running_code().code,
        certificate_expires=network.expires,
    )
    readings = mac.READINGS if platform.system() == "Darwin" else linux.READINGS
    for found in await asyncio.gather(*(run_in_thread(partial(read, commands)) for read in (_read_files, *readings))):
        facts.MergeFrom(found)
    facts.unread.extend(sorted(set(commands.unread)))
    facts.time = time.time_ns()
    return facts


def _read_files(ask: Ask) -> Facts:
    folder = cache_folder()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    return Facts(
        cache_folder=str(folder),
        free_disk_bytes=shutil.disk_usage(existing).free,
        is_outdated=code_on_disk() != running_code().code,
    )


class Examinee(Servicer):
    """The RPCs about a node's machine and links; those about models and chains are NodeService's."""

    def __init__(self, name: str, network: Network, log: Logger, memory_bytes: int | None) -> None:
        """`memory_bytes` is what the node was told to offer."""
        super().__init__(name, network, log)
        self._memory_bytes = memory_bytes

    async def MeasureLink(self, request: LinkRequest, context: Context) -> LinkReply:
        async with self._reporting(context):
            self._network.require_coordinator(context)
            return await measure_link(self._network, request)

    async def Probe(self, parts: AsyncIterator[ProbePart], context: Context) -> AsyncIterator[ProbeReply]:
        async with self._reporting(context):
            async for reply in answer_probe(parts):
                yield reply

    async def Examine(self, request: ExamineRequest, context: Context) -> Facts:
        async with self._reporting(context):
            self._network.require_coordinator(context)
            if request.only_time:
                return Facts(node=self.name, time=time.time_ns())
            return await read_facts(self.name, self._network, self._memory_bytes)

    async def Listen(self, request: ListenRequest, context: Context) -> None:
        async with self._reporting(context):
            self._network.require_coordinator(context)
            async with open_port(self._network, request) as port:
                await context.write(port.listener)
                await port.answer()
