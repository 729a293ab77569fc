"""A TCP proxy between two nodes that can be slow or swallow everything: a bad network, made on loopback."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator


class Proxy:
    """Passes bytes between its callers and `target`, each way in its order; what the network does is set while it runs.

    `latency_s` delays each piece, without holding up those behind it. `is_blackhole` keeps every connection open and
    loses what is sent from then on, an end too, as a pulled cable does.
    """

    def __init__(self, target: str, *, latency_s: float = 0.0) -> None:
        """`target` is HOST:PORT."""
        self.latency_s = latency_s
        self.is_blackhole = False
        self.address = ""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._connections: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Proxy"]:
        """Listen on a free loopback port for as long as the context is open; its end cuts every connection."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                connection = group.create_task(self._connect(reader, writer))
                self._connections.add(connection)
                connection.add_done_callback(self._connections.discard)

            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            host, port = server.sockets[0].getsockname()
            self.address = f"{host}:{port}"
            stack.callback(self._cut)
            stack.callback(server.close)
            yield self

    def reset(self) -> None:
        """End every connection; new ones pass. Any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for connection in self._connections:
            connection.cancel()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        with contextlib.closing(writer), contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(self._host, self._port)
            with contextlib.closing(back):
                ways = [
                    asyncio.create_task(self._carry(reader, back, is_back=False)),
                    asyncio.create_task(self._carry(there, writer, is_back=True)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    def passed(self, piece: bytes, *, is_back: bool) -> bytes:
        """What becomes of a piece on its way to the target, or back."""
        return piece

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_back: bool) -> None:
        """One way of one connection."""
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                at, piece = await due.get()
                await asyncio.sleep(at - loop.time())
                if not self.is_blackhole:
                    writer.write(self.passed(piece, is_back=is_back))
                    await writer.drain()
                due.task_done()

        delivery = asyncio.create_task(deliver())
        try:
            with contextlib.suppress(OSError):
                while piece := await reader.read(65536):
                    due.put_nowait((loop.time() + self.latency_s, piece))
                await due.join()
            if self.is_blackhole:
                await asyncio.Event().wait()  # the other side does not hear of the end either
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)


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
