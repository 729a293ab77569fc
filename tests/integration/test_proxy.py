"""The fault proxy between two ends of a TCP connection: each thing that it does, one way, while bytes pass."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.integration.many import until
from tools.proxy import Proxy, Way

LONG = bytes(range(256)) * 20


class End:
    """One end of a connection, and what it has received so far."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.pieces: list[bytes] = []
        self.is_over = False
        self._reader = reader
        self._task = asyncio.create_task(self._read())

    @property
    def received(self) -> bytes:
        return b"".join(self.pieces)

    async def wait_received(self, num_bytes: int) -> bytes:
        await until(lambda: len(self.received) >= num_bytes)
        return self.received

    def close(self) -> None:
        self.writer.close()
        self._task.cancel()

    async def _read(self) -> None:
        while piece := await self._reader.read(1 << 20):
            self.pieces.append(piece)
        self.is_over = True


@dataclass
class Line:
    """A connection through a proxy; `near` has opened it."""

    proxy: Proxy
    near: End
    far: End


@asynccontextmanager
async def line() -> AsyncIterator[Line]:
    taken: asyncio.Queue[End] = asyncio.Queue()
    server = await asyncio.start_server(lambda *stream: taken.put_nowait(End(*stream)), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with Proxy(f"{host}:{port}").serving() as proxy:
        near = End(*await asyncio.open_connection(*proxy.address.split(":")))
        far = await taken.get()
        yield Line(proxy, near, far)
        near.close()
        far.close()
    server.close()


async def test_bytes_pass_both_ways_in_slices_late_and_slowly_as_is_set_and_so_does_an_end() -> None:
    loop = asyncio.get_running_loop()
    async with line() as each:
        each.near.writer.write(LONG)
        each.far.writer.write(b"back")
        assert await each.far.wait_received(len(LONG)) == LONG
        assert await each.near.wait_received(4) == b"back"
        each.near.writer.close()
        await until(lambda: each.far.is_over)
    async with line() as each:
        each.proxy.there.latency_s = 0.05
        began = loop.time()
        each.near.writer.write(b"a")
        assert await each.far.wait_received(1) == b"a"
        assert loop.time() - began >= 0.05
    async with line() as each:
        each.proxy.there.bytes_per_s = 50_000
        began = loop.time()
        each.near.writer.write(b"x" * 5000)
        await each.far.wait_received(5000)
        each.near.writer.write(b"y")
        await each.far.wait_received(5001)
        assert loop.time() - began >= 0.1
    async with line() as each:
        each.proxy.there.slice_bytes = 7
        each.near.writer.write(LONG)
        assert await each.far.wait_received(len(LONG)) == LONG
        assert len(each.far.pieces) > 10


async def test_a_black_hole_keeps_what_is_sent_one_way_until_it_is_healed() -> None:
    async with line() as each:
        each.proxy.there.is_blackhole = True
        each.near.writer.write(b"lost?")
        each.far.writer.write(b"heard")
        assert await each.near.wait_received(5) == b"heard"
        each.near.writer.write(b" no")
        each.near.writer.write_eof()
        each.far.writer.write(b"!")  # a round trip more
        await each.near.wait_received(6)
        assert (each.far.received, each.far.is_over) == (b"", False)
        assert not each.proxy.is_blackhole
        each.proxy.there.is_blackhole = False
        assert await each.far.wait_received(8) == b"lost? no"
        await until(lambda: each.far.is_over)


async def test_what_comes_as_a_healed_way_is_cut_again_waits_and_holds_up_nothing_else() -> None:
    way, loop, turns = Way(), asyncio.get_running_loop(), list[int]()
    way.begin()
    for number in range(3):
        way.is_blackhole = True
        loop.call_soon(turns.append, number)
        loop.call_soon(setattr, way, "is_blackhole", False)
        rescue = threading.Timer(5, setattr, [way, "is_blackhole", False])  # of a loop that is held up
        rescue.start()
        await way.wait_healed()
        rescue.cancel()
        assert turns == list(range(number + 1))


async def test_one_bit_is_flipped_and_what_follows_is_whole() -> None:
    async with line() as each:
        each.proxy.there.flips = 1
        each.near.writer.write(LONG)
        found = await each.far.wait_received(len(LONG))
        assert [(was ^ now).bit_count() for was, now in zip(LONG, found, strict=True) if was != now] == [1]
        assert (each.proxy.there.flips, each.proxy.there.num_flipped) == (0, 1)
        each.near.writer.write(b"whole")
        assert (await each.far.wait_received(len(LONG) + 5))[-5:] == b"whole"


@pytest.mark.parametrize(("way", "there", "back"), [("there", b"aa", b"b"), ("back", b"a", b"bb")])
async def test_the_next_piece_of_one_way_comes_twice_and_none_after_it(way: str, there: bytes, back: bytes) -> None:
    async with line() as each:
        getattr(each.proxy, way).duplicates = 1
        each.near.writer.write(b"a")
        each.far.writer.write(b"b")
        assert (await each.far.wait_received(len(there)), await each.near.wait_received(len(back))) == (there, back)
        each.near.writer.write(b"d")
        assert await each.far.wait_received(len(there) + 1) == there + b"d"
