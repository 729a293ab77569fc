"""Thousands of requests leave nothing behind: no memory, no slots, no tasks."""

import asyncio
import ctypes
import gc
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import pytest

from coordinator.engine.engine import Engine
from coordinator.sessions.request import Request
from tests.integration.conftest import CHUNK, Models, running
from tests.integration.many import request, solo, wait_freed, wait_slots

AT_ONCE = 16
ENGINE_TASKS = 2  # its loop, and the one that waits for a node to drain
FIRST = 300  # after these everything has been seen once: kept slots are full, pools and caches warm
MOST_KEPT = 64  # slots that keep the prefixes of ended requests
SLOT_BYTES = 2 * 2 * 256 * 64 * 4  # keys and values of two layers, a block of rows, fp32


def requests(count: int) -> Iterator[Request]:
    """Prompts of 2 to 12 tokens, no two of which begin alike: every one of them is kept in a slot of its own."""
    numbers = random.Random(0)
    for number in range(count):
        prompt = [number // 89, number % 89, *(numbers.randrange(89) for _ in range(numbers.randint(0, 10)))]
        yield request(prompt, numbers.randint(2, 4), seed=number, temperature=numbers.choice([0.0, 1.0]))


@dataclass
class Held:
    """What there is while nothing runs."""

    num_blocks: int  # that Python has allocated: a forgotten object is at least one
    heap_bytes: int  # that C and C++ have
    active_bytes: int  # of MLX
    num_tasks: int


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def heap_bytes() -> int:
    """What malloc has given out, however much of the system's memory that takes; 0 where it does not say."""
    if sys.platform != "linux":
        return 0
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def held() -> Held:
    gc.collect()
    mx.clear_cache()
    return Held(sys.getallocatedblocks(), heap_bytes(), mx.get_active_memory(), len(asyncio.all_tasks()))


async def wait_tasks(most: int) -> None:
    """Wait until there are no more tasks than these: that of a message may be running still, and sends no notice."""
    async with asyncio.timeout(60):
        while len(asyncio.all_tasks()) > most:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "count", [pytest.param(600, marks=pytest.mark.long), pytest.param(2000, marks=pytest.mark.matrix)]
)
async def test_hundreds_of_requests_leave_nothing_behind(models: Models, count: int) -> None:
    """Kept slots are as many after the first 300 as in the end, each of one block of rows: MLX holds the very same."""
    waiting, served, most_tasks, most_kept = requests(count), 0, 0, 0

    async def serve(engine: Engine, num_requests: int) -> None:
        nonlocal served, most_tasks, most_kept
        for _ in range(num_requests):
            each = next(waiting)
            answer = await engine.answer(each, chunk=CHUNK)
            assert len(answer.tokens) == each.max_tokens
            served += 1
            most_tasks = max(most_tasks, len(asyncio.all_tasks()))
            most_kept = max(most_kept, await chain.thread.run(lambda: engine.scheduler.slots.num_kept))

    async with running(models("qwen3", config={"num_hidden_layers": 2}).folder, (1, 1)) as chain:
        await solo(chain, [request([88, 88, 88], 3, temperature=1.0)])
        await wait_freed(chain)
        before = held()
        async with Engine(chain) as engine:
            for num_requests in (FIRST, count - FIRST):
                parts = [num_requests // AT_ONCE + (i < num_requests % AT_ONCE) for i in range(AT_ONCE)]
                await asyncio.gather(*(serve(engine, part) for part in parts))
                await wait_slots(chain, MOST_KEPT)  # on every stage, once the last one was evicted
                if num_requests == FIRST:
                    first = held()
            await wait_tasks(before.num_tasks + ENGINE_TASKS)
            last = held()
        await wait_freed(chain)
        await wait_tasks(before.num_tasks)
        after = held()
    assert (served, most_kept) == (count, MOST_KEPT)
    assert abs(last.active_bytes - first.active_bytes) < SLOT_BYTES * (count // 500)  # which slots share packs varies
    assert after.active_bytes - before.active_bytes < SLOT_BYTES  # much less where earlier tests left something
    assert most_tasks <= before.num_tasks + ENGINE_TASKS + 2 * AT_ONCE
    assert last.num_blocks - first.num_blocks < (count - FIRST) / 2, (first, last)
    # over thousands of requests pools breathe by more than a MiB, and do not grow (9,000 were tried)
    assert last.heap_bytes - first.heap_bytes < 64 * (count - FIRST) + 2**21 * (count // 2000), (first, last)
