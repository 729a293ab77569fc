"""Examine: what this node knows of itself and of its machine. Judging it is the coordinator's affair."""

import asyncio
import platform
import shutil
import time
from functools import partial

import mlx.core as mx
import psutil

from protos.brigade_pb2 import Facts
from worker.node.network import Network
from worker.process.call_thread import run_aside
from worker.process.commands import Ask, Commands
from worker.process.folders import cache_folder
from worker.process.linux import facts as linux
from worker.process.mac import facts as mac
from worker.process.machine import memory_budget
from worker.process.own_code import code_on_disk, running


async def examine(name: str, network: Network, memory_bytes: int | None = None) -> Facts:
    """What can be found out within seconds; `memory_bytes` is what the node was told to offer."""
    commands = Commands()
    known = Facts(
        node=name,
        system=platform.system(),
        system_version=platform.mac_ver()[0] or platform.release(),
        chip=str(mx.device_info().get("device_name", platform.processor())),
        memory_bytes=psutil.virtual_memory().total,
        budget_bytes=memory_bytes or memory_budget(),
        working_set_bytes=int(mx.device_info().get("max_recommended_working_set_size", 0)),
        versions=running().versions,
        code=running().code,
        certificate_expires=network.expires,
    )
    readings = mac.READINGS if platform.system() == "Darwin" else linux.READINGS
    for found in await asyncio.gather(*(run_aside(partial(read, commands)) for read in (_of_files, *readings))):
        known.MergeFrom(found)
    known.unread.extend(sorted(set(commands.unread)))
    known.time = time.time_ns()
    return known


def _of_files(ask: Ask) -> Facts:
    folder = cache_folder()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return Facts(
        cache_folder=str(folder),
        free_disk_bytes=shutil.disk_usage(there).free,
        is_outdated=code_on_disk() != running().code,
    )
