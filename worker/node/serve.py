"""A worker process: binds, serves, drains on SIGTERM. Holds no decisions of the protocol."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial

import mlx.core as mx
import uvloop

from worker.config import Cluster
from worker.node.announce import about, announcing
from worker.node.configuration import configuration_of
from worker.node.listening import listening, wait_last_calls
from worker.node.log import Log
from worker.node.network import MOST_CONNECTIONS, Network
from worker.node.own_models import OwnModels
from worker.node.service import NodeService
from worker.process.dated import dated
from worker.process.interrupts import INTERRUPTED
from worker.process.machine import allow_connections, kept_awake
from worker.process.mlx_thread import MlxThread
from worker.process.own_code import running
from worker.store.store import Store

_DRAIN_S = 10.0  # how long sessions in progress may take to end
_LAST_WORD_S = 1.0  # for what the coordinator of the drained sessions still reads and asks


def serve(
    name: str,
    binds: Sequence[str],
    network: Network,
    *,
    cluster: Cluster | None,
    models: OwnModels,
    memory_bytes: int | None,
    announces: bool,
    keep_alive_s: float | None = None,
    follow_parent: bool,
    store: Store | None = None,
) -> None:
    """Serve as one node until SIGTERM or SIGINT; `binds` are HOST:PORT, port 0 takes a free one.

    With `follow_parent` the process also ends when its standard input closes, and says where it listens as one line
    of JSON on standard output, and nothing else: how the coordinator keeps workers of its own.

    Args:
        cluster: the node's own configuration, of which coordinators are told.
        models: those that they may have it load.
        keep_alive_s: how long a shard that nobody uses is held; None: for ever.
        announces: whether it tells its network that it is there; one that follows its parent does not.
        store: takes what they send of others.
    Raises:
        ConfigError: the network allows none of them, or none can be had.
    """
    sys.stderr = dated(sys.stderr)
    allow_connections(MOST_CONNECTIONS)
    running()  # its code as it is now
    thread = MlxThread()
    configuration = configuration_of(cluster) if cluster else None
    log = Log(name, None if follow_parent else sys.stderr)
    service = NodeService(name, thread, network, models, memory_bytes, configuration, log, store)
    try:
        with kept_awake():
            serving = _serve(
                service,
                binds,
                network,
                announces=announces and not follow_parent,
                keep_alive_s=keep_alive_s,
                follow_parent=follow_parent,
            )
            uvloop.run(serving)
    finally:
        thread.close()
        mx.clear_streams()


async def _serve(
    service: NodeService,
    binds: Sequence[str],
    network: Network,
    *,
    announces: bool,
    keep_alive_s: float | None,
    follow_parent: bool,
) -> None:
    stop = _stop_event(follow_parent=follow_parent)
    async with listening(service, binds, network, service.log) as found:
        if follow_parent:
            print(json.dumps({"name": service.name, "address": found.addresses[0]}), flush=True)
        for address in found.addresses:
            service.log.listens(address)
        async with service.letting_go(keep_alive_s), contextlib.AsyncExitStack() as stack:
            if announces:
                say = partial(about, service.name, network)
                await stack.enter_async_context(announcing(say, found.addresses, service.log))
            await stop.wait()
        await found.say_ending()
        if not follow_parent:
            await drain(service)
    await wait_last_calls()


async def drain(service: NodeService) -> None:
    """Let sessions in progress end, for `_DRAIN_S` at most; those whom it concerns are told."""
    if service.num_slots:
        service.log.draining(service.num_slots, _DRAIN_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            await service.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.wait_detached(), _LAST_WORD_S)
            await service.wait_idle()  # a session may have been on its way here when the coordinator was told
    service.log.drained(service.num_slots)


def _stop_event(*, follow_parent: bool) -> asyncio.Event:
    """Set at the first SIGTERM or SIGINT, or when the parent is gone. A second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if follow_parent:
        loop.add_reader(sys.stdin.fileno(), on_input)
    return stop
