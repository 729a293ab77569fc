"""The record of a server: which state follows which, and requests that wait for a model that is loaded again."""

import asyncio
from types import SimpleNamespace

import pytest

from coordinator.api import server
from coordinator.api.app import make_app
from coordinator.api.errors import HttpError
from coordinator.api.metrics import metrics_text
from coordinator.api.server import Server
from coordinator.engine.engine import Engine, ServerState, ServerStatus
from coordinator.engine.status import StatusSnapshot
from tests.unit.api.fakes import FakeEngine, ask, served
from worker.errors import InternalError, QueueFull, StageLost

MODEL = FakeEngine()


async def waiting(shared: Server, count: int) -> list["asyncio.Task[Engine]"]:
    """Requests that ask for the model and have come as far as they can."""
    asked = [asyncio.create_task(shared.wake_engine()) for _ in range(count)]
    await asyncio.wait(asked, timeout=0)
    return asked


def asleep(max_waking: int = 9) -> Server:
    shared = served(model=MODEL, max_waking=max_waking)
    shared.sleep("nobody asked")
    return shared


@pytest.mark.parametrize("max_waking", [0, 1])
async def test_one_request_may_always_wait_and_no_more_than_may(max_waking: int) -> None:
    shared = asleep(max_waking)
    assert shared.state is ServerState.ASLEEP
    first, second = await waiting(shared, 2)
    assert shared.state is ServerState.WAKING and not first.done()
    with pytest.raises(QueueFull, match="1 request waits for"):
        await second
    assert shared.stats.counts("requests_rejected") == {"QueueFull": 1}
    shared.open(MODEL)
    assert await first is MODEL and await shared.wake_engine() is MODEL
    shared.sleep("nobody asked")
    assert shared.state is ServerState.ASLEEP, "requests that waited before count no more"
    [again] = await waiting(shared, 1)
    shared.open(MODEL)
    assert await again is MODEL


async def test_waiting_requests_are_refused_if_loading_fails_or_the_server_stops() -> None:
    failing, stopping = asleep(), asleep()
    refused, drained = await waiting(failing, 2), await waiting(stopping, 2)
    failing.fail("worker mini is away")
    stopping.stop()
    for each, why in [(refused, "recovering: worker mini is away"), (drained, "draining: the server was told")]:
        for request in each:
            with pytest.raises(HttpError, match=why):
                await asyncio.wait_for(request, 5)


async def test_waiting_requests_wait_on_if_the_model_sleeps_again() -> None:
    shared = asleep()
    [again] = await waiting(shared, 1)
    shared.open(MODEL)
    shared.sleep("nobody asked")
    await asyncio.wait([again], timeout=0)
    assert not again.done() and shared.state is ServerState.WAKING
    shared.open(MODEL)
    assert await again is MODEL


async def test_requests_that_wait_for_the_model_are_waiting_in_the_metrics() -> None:
    shared = asleep()
    requests = await waiting(shared, 2)
    assert 'brigade_num_requests_waiting{model_name="talker"} 2.0' in metrics_text(shared, StatusSnapshot()).decode()
    shared.open(MODEL)
    await asyncio.gather(*requests)
    assert 'brigade_num_requests_waiting{model_name="talker"} 0.0' in metrics_text(shared, StatusSnapshot()).decode()


async def test_a_request_that_leaves_has_woken_the_model_all_the_same() -> None:
    shared = asleep()
    wanted = asyncio.create_task(shared.wait_wanted())
    await asyncio.wait([wanted], timeout=0)
    assert not wanted.done()
    [asked] = await waiting(shared, 1)
    asked.cancel()
    await wanted
    assert shared.state is ServerState.WAKING and shared.engine is None


def test_clients_are_told_that_a_model_is_loading_while_it_is_read_again() -> None:
    async def woken() -> Server:
        shared = asleep()
        await waiting(shared, 1)
        return shared

    shared = asyncio.run(woken())
    for path in ("/health", "/health?deep=1"):
        found = ask(make_app(shared), "GET", path)
        assert found.status_code == 503 and found.json()["status"] == "loading"
    told = metrics_text(shared, StatusSnapshot()).decode()
    assert 'brigade_standing{model_name="talker",state="loading"} 1.0' in told and 'state="waking"' not in told
    with pytest.raises(HttpError, match=r"^loading: a request came") as refused:
        shared.require_engine()
    assert refused.value.code == "loading"


async def test_requests_wait_in_an_engine_that_replaces_its_chain_while_health_checks_fail() -> None:
    class Recovering(FakeEngine):
        status = ServerStatus(ServerState.RECOVERING, "worker mini is away")

    engine = Recovering()
    shared = served(model=engine)
    assert await shared.wake_engine() is engine and not shared.answers_now


def test_what_other_nodes_said_is_not_told_to_those_without_a_key() -> None:
    class Without(FakeEngine):
        status = ServerStatus(ServerState.DEGRADED, "without mini", "worker mini: cannot read /Users/anna/model")

    shared = served(model=Without())
    assert shared.why_in_full == "without mini; worker mini: cannot read /Users/anna/model"
    found = ask(make_app(shared), "GET", "/health")
    assert (found.status_code, found.json()) == (200, {"status": "degraded", "why": "without mini"})


def test_an_engine_that_has_failed_is_given_no_request() -> None:
    class Failed(FakeEngine):
        status, failure = ServerStatus(ServerState.RECOVERING, "worker mini is away"), StageLost("is away", node="mini")

    shared = served(model=Failed())
    with pytest.raises(HttpError) as refused:
        shared.require_engine()
    assert (refused.value.status, refused.value.code) == (503, "recovering")


def test_a_server_that_was_told_to_stop_stays_so_and_a_state_that_cannot_follow_is_a_bug() -> None:
    shared = served(model=MODEL)
    shared.stop()
    shared.stop()
    assert shared.state is ServerState.DRAINING and not shared.answers_now and shared.engine is None
    with pytest.raises(InternalError):
        shared.open(MODEL)
    with pytest.raises(InternalError):
        served().sleep("nobody asked")


class Stuck:
    """No token comes back from the stages; or, where it `is_deaf`, nothing is tokenized."""

    status, failure = ServerStatus(ServerState.READY), None

    def __init__(self, *, is_deaf: bool = False) -> None:
        self.is_deaf = is_deaf
        self.num_sent = 0
        self.inputs = SimpleNamespace(token_texts=self.token_texts)

    async def token_texts(self, tokens: list[int]) -> list[str]:
        if self.is_deaf:
            await asyncio.get_running_loop().create_future()
        return [""]

    async def probe(self) -> None:
        self.num_sent += 1
        if not self.is_deaf:
            await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_deep_check_goes_as_requests_with_a_deadline(monkeypatch: pytest.MonkeyPatch, *, is_deaf: bool) -> None:
    monkeypatch.setattr(server, "DEEP_S", 0.02)
    app = make_app(served(model=Stuck(is_deaf=is_deaf)))
    found = ask(app, "GET", "/health?deep=1")
    assert (found.status_code, found.headers["retry-after"]) == (503, "5")
    assert found.json()["error"]["code"] == "too_slow"
    assert ask(app, "GET", "/live").status_code == 200


def test_a_health_check_that_may_be_meant_as_a_deep_one_is_refused() -> None:
    for query in ("deep=true", "deep=", "deep"):
        found = ask(make_app(served()), "GET", f"/health?{query}")
        assert found.status_code == 400 and found.json()["error"]["param"] == "deep"


async def test_one_deep_look_is_taken_at_a_time() -> None:
    stuck = Stuck()
    shared = served(model=stuck)
    looks = [asyncio.create_task(shared.probe()) for _ in range(3)]
    for _ in range(20):
        await asyncio.sleep(0)
    for look in looks:
        look.cancel()
    await asyncio.gather(*looks, return_exceptions=True)
    assert stuck.num_sent == 1
