"""A node's report on its machine. The coordinator draws the conclusions."""

import asyncio
import platform
import shutil
import time
from functools import partial

import mlx.core as mx
import psutil

from protos.brigade_pb2 import Facts
from worker.node.network import Network
from worker.platform import linux, mac
from worker.platform.commands import Commands, RunProgram
from worker.platform.installation import cache_folder, code_on_disk, running_code
from worker.platform.machine import memory_budget
from worker.platform.threads import run_in_thread


async def read_facts(name: str, network: Network, memory_bytes: int | None = None) -> Facts:
    """Return the facts about this machine that can be read within seconds.

    Args:
        memory_bytes: the memory that the node was told to offer; by default its memory budget.
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


def _read_files(ask: RunProgram) -> Facts:
    folder = cache_folder()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    return Facts(
        cache_folder=str(folder),
        free_disk_bytes=shutil.disk_usage(existing).free,
        is_outdated=code_on_disk() != running_code().code,
    )
