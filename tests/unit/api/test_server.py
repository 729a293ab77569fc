"""The record of a server: which state follows which, and requests that wait for a model that is loaded again."""

import asyncio

import httpx2
import pytest

from coordinator.api.app import make_app
from coordinator.api.errors import HttpError
from coordinator.api.metrics import metrics_text
from coordinator.api.server import Server
from coordinator.engine.engine import Engine, ServerState, ServerStatus
from coordinator.engine.status import StatusSnapshot
from tests.unit.api import answers
from tests.unit.api.servers import served
from worker.errors import InternalError, QueueFull


class Ready:
    status = ServerStatus(ServerState.READY)


MODEL = answers.model(Ready())


async def waiting(shared: Server, count: int) -> list["asyncio.Task[Engine]"]:
    """So many requests that ask for the model; they have come as far as they can."""
    asked = [asyncio.create_task(shared.wake_engine()) for _ in range(count)]
    await asyncio.wait(asked, timeout=0)
    return asked


def asleep(max_waking: int) -> Server:
    shared = served(model=MODEL, max_waking=max_waking)
    shared.sleep("nobody asked")
    return shared


@pytest.mark.parametrize("max_waking", [0, 1])
def test_one_request_may_always_wait_and_no_more_than_may(max_waking: int) -> None:
    async def check() -> None:
        shared = asleep(max_waking)
        assert shared.state is ServerState.ASLEEP
        first, second = await waiting(shared, 2)
        assert shared.state is ServerState.WAKING and not first.done()
        with pytest.raises(QueueFull, match="1 requests wait"):
            await second
        shared.open(MODEL)
        assert await first is MODEL and await shared.wake_engine() is MODEL
        shared.sleep("nobody asked")
        assert shared.state is ServerState.ASLEEP, "who waited before counts no more"
        [again] = await waiting(shared, 1)
        shared.open(MODEL)
        assert await again is MODEL

    asyncio.run(check())


def test_who_waits_is_refused_once_it_turns_out_that_there_will_be_none() -> None:
    async def check() -> None:
        shared = asleep(9)
        asked = await waiting(shared, 2)
        shared.fail("worker mini is away")
        for each in asked:
            with pytest.raises(HttpError, match="recovering: worker mini is away"):
                await each

    asyncio.run(check())


def test_a_request_that_leaves_has_woken_the_model_all_the_same() -> None:
    async def check() -> None:
        shared = asleep(9)
        wanted = asyncio.create_task(shared.wait_wanted())
        await asyncio.wait([wanted], timeout=0)
        assert not wanted.done()
        [asked] = await waiting(shared, 1)
        asked.cancel()
        await wanted
        assert shared.state is ServerState.WAKING and shared.engine is None

    asyncio.run(check())


def test_who_has_waited_wakes_a_model_again_that_fell_asleep_before_it_was_asked() -> None:
    async def check() -> None:
        shared = asleep(9)
        [asked] = await waiting(shared, 1)
        shared.open(MODEL)
        shared.sleep("nobody asked")
        await asyncio.wait([asked], timeout=0)
        assert not asked.done() and shared.state is ServerState.WAKING
        shared.open(MODEL)
        assert await asked is MODEL

    asyncio.run(check())


def test_clients_are_told_that_a_model_is_loading_while_it_is_read_again() -> None:
    async def check() -> None:
        shared = asleep(9)
        await waiting(shared, 1)
        app = make_app(shared)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
            for path in ("/health", "/health?deep=1"):
                found = await client.get(path)
                assert found.status_code == 503 and found.json()["status"] == "loading"
        told = {
            line
            for line in metrics_text(shared, StatusSnapshot()).decode().splitlines()
            if line.startswith("brigade_standing{")
        }
        assert 'brigade_standing{model_name="talker",state="loading"} 1.0' in told
        assert not [line for line in told if "waking" in line]
        with pytest.raises(HttpError, match=r"^loading: a request came") as refused:
            shared.require_engine()
        assert refused.value.code == "loading"

    asyncio.run(check())


def test_a_server_whose_engine_has_failed_is_recovering_from_the_start() -> None:
    class Failed(Ready):
        status = ServerStatus(ServerState.FAILED, "worker mini is away")

    shared = served(model=answers.model(Failed()))
    assert (shared.state, shared.why) == (ServerState.RECOVERING, "worker mini is away")
    with pytest.raises(HttpError) as refused:
        shared.require_engine()
    assert (refused.value.status, refused.value.code) == (503, "recovering")


def test_a_state_that_cannot_follow_is_a_bug() -> None:
    with pytest.raises(InternalError):
        served().sleep("nobody asked")


def test_a_server_that_was_told_to_stop_stays_so() -> None:
    shared = served(model=MODEL)
    shared.stop()
    shared.stop()
    assert shared.state is ServerState.DRAINING and not shared.takes_requests and shared.engine is None
    with pytest.raises(InternalError):
        shared.open(MODEL)


def test_while_it_loads_for_the_first_time_nobody_waits() -> None:
    with pytest.raises(HttpError, match="loading"):
        asyncio.run(served().wake_engine())
