"""Thousands of requests leave nothing behind: no memory, no slots, no tasks."""

import asyncio
import ctypes
import gc
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import psutil
import pytest

from coordinator.cluster.runner import Runner
from coordinator.sessions.request import Request
from tests.integration.conftest import CHUNK, Models, running
from tests.integration.many import request, solo, wait_freed, wait_slots

NUM_REQUESTS = 2000
AT_ONCE = 16
FIRST = 500  # after these everything has been seen once: kept slots are full, pools and caches warm
MOST_KEPT = 64  # slots that keep the prefixes of ended requests
RSS_MIB = 6  # what is measured anew after every 500 requests of 4000 differs by up to 1.7 MiB (Linux)
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

    rss_mib: float
    active_bytes: int  # of MLX
    num_tasks: int


def held() -> Held:
    gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # else what glibc keeps for later differs by tens of MiB
    rss_mib = psutil.Process().memory_info().rss / 2**20
    return Held(rss_mib, mx.get_active_memory(), len(asyncio.all_tasks()))


@pytest.mark.timeout(240)
async def test_two_thousand_requests_leave_nothing_behind(models: Models) -> None:
    """Kept slots are as many after 500 as after 2000, each of one block of rows: MLX holds the very same."""
    waiting, seen = requests(NUM_REQUESTS), []

    async def serve(runner: Runner, count: int) -> None:
        for _ in range(count):
            each = next(waiting)
            answer = await runner.answer(each, chunk=CHUNK)
            assert len(answer.tokens) == each.max_tokens
            seen.append((len(asyncio.all_tasks()), runner.scheduler.slots.num_kept))

    async with running(models("qwen3", config={"num_hidden_layers": 2}).folder, (1, 1)) as chain:
        await solo(chain, [request([88, 88, 88], 3, temperature=1.0)])
        await wait_freed(chain)
        before = held()
        async with Runner(chain) as runner:
            for num_requests in (FIRST, NUM_REQUESTS - FIRST):
                parts = [num_requests // AT_ONCE + (i < num_requests % AT_ONCE) for i in range(AT_ONCE)]
                await asyncio.gather(*(serve(runner, part) for part in parts))
                await wait_slots(chain, MOST_KEPT)  # on every stage, once the last one was evicted
                if num_requests == FIRST:
                    first = held()
            last = held()
        await wait_freed(chain)
        after = held()
    assert len(seen) == NUM_REQUESTS
    assert max(num_kept for _, num_kept in seen) == MOST_KEPT
    assert abs(last.active_bytes - first.active_bytes) < SLOT_BYTES
    assert after.active_bytes - before.active_bytes < SLOT_BYTES  # much less where earlier tests left something
    assert max(num_tasks for num_tasks, _ in seen) <= before.num_tasks + 1 + 2 * AT_ONCE
    assert after.num_tasks <= before.num_tasks and last.num_tasks <= before.num_tasks + 1
    assert last.rss_mib - first.rss_mib < RSS_MIB, (before, first, last, after)
