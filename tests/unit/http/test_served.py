"""What is served while a model that was let go is read again."""

import asyncio

import pytest

from coordinator.http.errors import Refusal
from coordinator.http.served import Served
from coordinator.resident.model import ResidentModel, Standing, State
from tests.unit.http import answers
from tests.unit.http.servers import served
from worker.errors import QueueFull


class Ready:
    standing = Standing(State.READY)


MODEL = answers.model(Ready())


async def waiting(shared: Served, count: int) -> list["asyncio.Task[ResidentModel]"]:
    """So many requests that ask for the model; they have come as far as they can."""
    asked = [asyncio.create_task(shared.wake_model()) for _ in range(count)]
    await asyncio.wait(asked, timeout=0)
    return asked


def asleep(most_waking: int) -> Served:
    shared = served(model=MODEL, most_waking=most_waking)
    shared.fall_asleep("nobody asked")
    return shared


@pytest.mark.parametrize("most_waking", [0, 1])
def test_one_request_may_always_wait_and_no_more_than_may(most_waking: int) -> None:
    async def check() -> None:
        shared = asleep(most_waking)
        assert shared.standing.state is State.ASLEEP and not shared.wanted.is_set()
        first, second = await waiting(shared, 2)
        assert shared.wanted.is_set() and not first.done()
        with pytest.raises(QueueFull, match="1 requests wait"):
            await second
        shared.take(MODEL)
        assert await first is MODEL and await shared.wake_model() is MODEL

    asyncio.run(check())


def test_who_waits_is_refused_once_it_turns_out_that_there_will_be_none() -> None:
    async def check() -> None:
        shared = asleep(9)
        asked = await waiting(shared, 2)
        shared.lose(Standing(State.RECOVERING, "worker mini is away"))
        for each in asked:
            with pytest.raises(Refusal, match="recovering: worker mini is away"):
                await each

    asyncio.run(check())


def test_while_it_loads_for_the_first_time_nobody_waits() -> None:
    with pytest.raises(Refusal, match="loading"):
        asyncio.run(served().wake_model())
