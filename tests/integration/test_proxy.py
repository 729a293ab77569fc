"""The fault proxy between two ends of a TCP connection: each thing that it does, one way, while bytes pass."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.integration.many import until
from tools.proxy import Proxy, Way

LONG = bytes(range(256)) * 20


class End:
    """One end of a connection: what it has received so far, and how."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.pieces: list[bytes] = []
        self.error: OSError | None = None
        self.is_over = False
        self._reader = reader
        self.task = asyncio.create_task(self._read())

    @property
    def received(self) -> bytes:
        return b"".join(self.pieces)

    async def wait_received(self, num_bytes: int) -> bytes:
        await until(lambda: len(self.received) >= num_bytes)
        return self.received

    async def _read(self) -> None:
        try:
            while piece := await self._reader.read(1 << 20):
                self.pieces.append(piece)
        except OSError as error:
            self.error = error
        self.is_over = True


@dataclass
class Line:
    """A connection through a proxy; `near` has opened it."""

    proxy: Proxy
    near: End
    far: End

    @property
    def there(self) -> Way:
        return self.proxy.there


@asynccontextmanager
async def line() -> AsyncIterator[Line]:
    async with taking() as (address, taken), Proxy(address).serving() as proxy:
        near = End(*await asyncio.open_connection(*proxy.address.split(":")))
        yield Line(proxy, near, await taken.get())
        near.writer.close()
        near.task.cancel()


@asynccontextmanager
async def taking() -> AsyncIterator[tuple[str, "asyncio.Queue[End]"]]:
    """A server's address, and the ends of its connections."""
    taken: asyncio.Queue[End] = asyncio.Queue()
    ends: list[End] = []

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(End(reader, writer))
        taken.put_nowait(ends[-1])

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}", taken
    for end in ends:
        end.writer.close()
        end.task.cancel()
    server.close()


async def test_bytes_pass_both_ways_late_and_slowly_as_is_set_and_so_does_an_end() -> None:
    loop = asyncio.get_running_loop()
    async with line() as each:
        each.near.writer.write(LONG)
        each.far.writer.write(b"back")
        assert await each.far.wait_received(len(LONG)) == LONG
        assert await each.near.wait_received(4) == b"back"
        each.near.writer.close()
        await until(lambda: each.far.is_over)
    async with line() as each:
        each.there.latency_s = 0.05
        began = loop.time()
        each.near.writer.write(b"a")
        each.far.writer.write(b"b")
        await each.near.wait_received(1)
        assert await each.far.wait_received(1) == b"a"
        assert loop.time() - began >= 0.05
    async with line() as each:
        each.there.bytes_per_s = 50_000
        began = loop.time()
        each.near.writer.write(b"x" * 5000)
        await each.near.writer.drain()
        await each.far.wait_received(5000)
        each.near.writer.write(b"y")
        await each.far.wait_received(5001)
        assert loop.time() - began >= 0.1


async def test_a_black_hole_keeps_what_is_sent_one_way_until_it_is_healed() -> None:
    async with line() as each:
        each.there.is_blackhole = True
        each.near.writer.write(b"lost?")
        each.far.writer.write(b"heard")
        assert await each.near.wait_received(5) == b"heard"
        each.near.writer.write(b" no")
        each.near.writer.write_eof()
        each.far.writer.write(b"!")  # a round trip more
        await each.near.wait_received(6)
        assert (each.far.received, each.far.is_over) == (b"", False)
        assert not each.proxy.is_blackhole
        each.there.is_blackhole = False
        assert await each.far.wait_received(8) == b"lost? no"
        await until(lambda: each.far.is_over)


async def test_a_black_hole_both_ways_keeps_the_connection_open() -> None:
    async with line() as each:
        each.proxy.is_blackhole = True
        each.near.writer.write(b"a")
        each.far.writer.write(b"b")
        async with taking() as (address, taken), Proxy(address).serving() as other:  # meanwhile another one passes
            near = End(*await asyncio.open_connection(*other.address.split(":")))
            near.writer.write(LONG)
            await (await taken.get()).wait_received(len(LONG))
            near.writer.close()
            near.task.cancel()
        assert (each.near.received, each.far.received) == (b"", b"")
        assert not each.near.is_over and not each.far.is_over
        each.proxy.is_blackhole = False
        assert (await each.far.wait_received(1), await each.near.wait_received(1)) == (b"a", b"b")


async def test_a_reset_is_one_at_both_ends_and_new_connections_pass() -> None:
    async with taking() as (address, taken), Proxy(address).serving() as proxy:
        near = End(*await asyncio.open_connection(*proxy.address.split(":")))
        far = await taken.get()
        near.writer.write(b"a")
        await far.wait_received(1)
        proxy.reset()
        await until(lambda: near.is_over and far.is_over)
        assert isinstance(near.error, ConnectionResetError) and isinstance(far.error, ConnectionResetError)
        again = End(*await asyncio.open_connection(*proxy.address.split(":")))
        again.writer.write(b"b")
        assert await (await taken.get()).wait_received(1) == b"b"
        again.writer.close()
        again.task.cancel()


async def test_slices_a_flipped_bit_and_a_piece_that_comes_twice() -> None:
    async with line() as each:
        each.there.slice_bytes = 7
        each.near.writer.write(LONG)
        assert await each.far.wait_received(len(LONG)) == LONG
        assert len(each.far.pieces) > 10
    async with line() as each:
        each.there.flips = 1
        each.near.writer.write(LONG)
        found = await each.far.wait_received(len(LONG))
        changed = [(was, now) for was, now in zip(LONG, found, strict=True) if was != now]
        assert [(was ^ now).bit_count() for was, now in changed] == [1]
        assert (each.there.flips, each.there.num_flipped) == (0, 1)
        each.near.writer.write(b"whole")
        assert (await each.far.wait_received(len(LONG) + 5))[-5:] == b"whole"


@pytest.mark.parametrize("way", ["there", "back"])
async def test_the_next_piece_of_one_way_comes_twice_and_none_after_it(way: str) -> None:
    async with line() as each:
        getattr(each.proxy, way).duplicates = 1
        each.near.writer.write(b"a")
        each.far.writer.write(b"b")
        expected = {"there": (b"aa", b"b"), "back": (b"a", b"bb")}[way]
        found = await each.far.wait_received(len(expected[0])), await each.near.wait_received(len(expected[1]))
        assert found == expected
        each.near.writer.write(b"d")
        assert await each.far.wait_received(len(expected[0]) + 1) == expected[0] + b"d"
