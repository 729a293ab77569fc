"""A TCP proxy between two nodes: whatever a network does to bytes, made on loopback and changed while it runs."""

import asyncio
import contextlib
import math
import random
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from worker.config import join_address, split_address
from worker.node.network import hop_address
from worker.platform.tasks import cancel_all

_PIECE_BYTES = 65536
_BUFFER_S = 0.1  # of a network at `bytes_per_s`
_SHORTEST_S = 0.002  # that the loop can wait with some precision
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is closed so is reset


class Way:
    """One direction, and what the network does to it. Any thread may change it at any time.

    `latency_s` delays each piece, without holding up those behind it; `bytes_per_s`, of all connections together, does
    hold them up. `is_blackhole` keeps every connection open and delivers nothing, an end neither, as a pulled cable
    does: once it is plugged in again, what was sent arrives. `slice_bytes` cuts what is sent into pieces of so many
    bytes. `flips` and `duplicates` are how many of the next pieces have a bit flipped (`num_flipped`
    had), and how many come twice; `hop_flips` counts pieces of frames and results only.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        self.latency_s = latency_s
        self.bytes_per_s: float | None = None
        self.slice_bytes: int | None = None
        self.flips = self.hop_flips = 0
        self.duplicates = 0
        self.num_flipped = 0
        self._free_at = 0.0  # when what was sent has passed at `bytes_per_s`, seconds on the monotonic clock
        self._is_blackhole = False
        self._healed: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = random.Random(7)

    @property
    def is_blackhole(self) -> bool:
        return self._is_blackhole

    @is_blackhole.setter
    def is_blackhole(self, value: bool) -> None:
        self._is_blackhole = value
        if not value and self._loop is not None and self._healed is not None:
            self._loop.call_soon_threadsafe(self._healed.set)

    @property
    def holds_bytes(self) -> float:
        """How many bytes may be on the way: more wait at their sender."""
        return math.inf if self.bytes_per_s is None else self.bytes_per_s * (self.latency_s + _BUFFER_S)

    def begin(self) -> None:
        """From now on it is used by this thread's event loop."""
        self._loop, self._healed = asyncio.get_running_loop(), asyncio.Event()

    async def wait_healed(self) -> None:
        """Return at once unless it is a black hole."""
        assert self._healed is not None
        while self._is_blackhole:
            self._healed.clear()
            await self._healed.wait()

    async def deliver(self, piece: bytes, writer: asyncio.StreamWriter, *, is_hop: bool) -> None:
        """What becomes of a piece that has come through, on a connection of hops or of anything else."""
        for part in self._sliced(self._altered(piece, is_hop=is_hop)):
            await self.wait_healed()
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(self._occupied_s(len(part)))  # 0: a piece of its own

    def _occupied_s(self, num_bytes: int) -> float:
        """Return how long to wait for these bytes to have passed; short waits, which would last longer, add up."""
        if not self.bytes_per_s:
            return 0.0
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + num_bytes / self.bytes_per_s
        return left_s if (left_s := self._free_at - now) > _SHORTEST_S else 0.0

    def _altered(self, piece: bytes, *, is_hop: bool) -> bytes:
        if self.flips or (is_hop and self.hop_flips):
            if self.flips:
                self.flips -= 1
            else:
                self.hop_flips -= 1
            self.num_flipped += 1
            flipped = bytearray(piece)
            flipped[self._numbers.randrange(len(piece))] ^= 1 << self._numbers.randrange(8)
            piece = bytes(flipped)
        if self.duplicates:
            self.duplicates -= 1
            piece += piece
        return piece

    def _sliced(self, piece: bytes) -> list[bytes]:
        size = self.slice_bytes or len(piece)
        return [piece[first : first + size] for first in range(0, len(piece), size)]


class Proxy:
    """Passes bytes between its callers and the node at `target`, each way in its order; and so for the node's hops."""

    def __init__(self, target: str, *, latency_s: float = 0.0) -> None:
        """`target` is HOST:PORT."""
        self.there, self.back = self.ways = Way(latency_s), Way(latency_s)
        self.address = ""
        self._target = target
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def is_blackhole(self) -> bool:
        """Whether nothing comes through, either way."""
        return self.there.is_blackhole and self.back.is_blackhole

    @is_blackhole.setter
    def is_blackhole(self, value: bool) -> None:
        for way in self.ways:
            way.is_blackhole = value

    def reset(self) -> None:
        """Reset every connection, as a firewall does that has forgotten it; new ones pass. Any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._reset)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Proxy"]:
        """Listen on two loopback ports of a node for as long as the context is open; its end cuts every connection."""
        self._loop = asyncio.get_running_loop()
        for way in self.ways:
            way.begin()
        async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:

            async def listen(address: str, target: str) -> asyncio.Server:
                def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    connection = group.create_task(self._connect(reader, writer, target))
                    connections.add(connection)
                    connection.add_done_callback(connections.discard)

                return await asyncio.start_server(accept, *split_address(address))

            connections: set[asyncio.Task[None]] = set()
            stack.callback(lambda: [task.cancel() for task in connections])
            self.address = ""
            while not self.address:
                server = await listen("127.0.0.1:0", self._target)
                address = join_address("127.0.0.1", server.sockets[0].getsockname()[1])
                try:
                    hops = await listen(hop_address(address), hop_address(self._target))
                except OSError:
                    server.close()
                    continue
                self.address = address
            stack.callback(server.close)
            stack.callback(hops.close)
            yield self

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str) -> None:
        """One connection, until either side ends it."""
        with contextlib.closing(writer), contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(*split_address(target))
            with contextlib.closing(back), self._noted(writer, back):
                is_hop = target == hop_address(self._target)
                await _until_one_ends(
                    _carry(reader, back, self.there, is_hop=is_hop), _carry(there, writer, self.back, is_hop=is_hop)
                )

    @contextlib.contextmanager
    def _noted(self, *writers: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.update(writers)
        try:
            yield
        finally:
            self._writers.difference_update(writers)

    def _reset(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):  # its other end has closed it by now
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way, *, is_hop: bool) -> None:
    """One way of one connection, until its sender ends it."""
    loop = asyncio.get_running_loop()
    due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            at, piece = await due.get()
            await asyncio.sleep(at - loop.time())
            await way.deliver(piece, writer, is_hop=is_hop)
            due.task_done()

    async def read() -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                due.put_nowait((loop.time() + way.latency_s, piece))
                while due.qsize() * _PIECE_BYTES > way.holds_bytes:  # noqa: ASYNC110 - the rate decides
                    await asyncio.sleep(_SHORTEST_S)
        await due.join()
        await way.wait_healed()  # the other side does not hear of the end either

    await _until_one_ends(deliver(), read())  # delivery ends where nobody takes it


async def _until_one_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until one of them ends, in whatever way."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(*tasks)


@contextlib.contextmanager
def proxy_to(target: str, *, latency_s: float = 0.0) -> Iterator[Proxy]:
    """A proxy that runs in a thread of its own, with an event loop of its own."""
    proxy = Proxy(target, latency_s=latency_s)
    is_up, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with proxy.serving():
            is_up.set()
            await stop.wait()

    def work() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    thread = threading.Thread(target=work, name="proxy")
    thread.start()
    try:
        assert is_up.wait(10.0), "the proxy did not start"
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10.0)
        assert not thread.is_alive(), "the proxy did not end"
