"""What becomes of a server whose model cannot be loaded, and what it says of one that is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.cluster.options import ClusterOptions
from coordinator.http import life
from coordinator.http.life import keep_serving, room_said
from coordinator.http.served import Served
from coordinator.http.serving import Serving
from coordinator.resident.frontend import Frontend
from coordinator.resident.model import ResidentModel, State
from tests.unit.virtual_time import VirtualTime
from worker.config import Cluster
from worker.errors import StageLost


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[State]:
    """How the model stood whenever it was to be opened, which never works."""
    stood: list[State] = []

    @asynccontextmanager
    async def fail(frontend: Any, *given: Any, **named: Any) -> AsyncIterator[ResidentModel]:
        stood.append(frontend.served.standing.state)
        raise StageLost("gone", node="mini")
        yield

    monkeypatch.setattr(life, "open_resident", fail)
    return stood


def lived(begin: Any, for_s: float) -> Served:
    """What is served after so many seconds of a life that begins like this."""

    async def live() -> Served:
        frontend = SimpleNamespace(spec=SimpleNamespace(context=64))
        frontend.served = served = Served(cast(Frontend, frontend), ("talker",), 0)
        begin(served)
        answers = asyncio.ensure_future(asyncio.Event().wait())
        options, serving = ClusterOptions(Cluster(), "talker", 0, 4096), Serving("127.0.0.1", 0)
        living = asyncio.create_task(keep_serving(options, serving, served, "http://here", cast(Any, answers)))
        await asyncio.wait([living], timeout=for_s)
        for task in (living, answers):
            task.cancel()
        [ended, _] = await asyncio.gather(living, answers, return_exceptions=True)
        if isinstance(ended, StageLost):
            raise ended
        return served

    virtual = VirtualTime()
    try:
        return virtual.run(live())
    finally:
        assert not virtual.close()


def test_a_server_ends_whose_first_model_cannot_be_loaded(opened: list[State]) -> None:
    with pytest.raises(StageLost, match="gone"):
        lived(lambda served: None, 60.0)
    assert opened == [State.LOADING]


def test_a_model_that_cannot_be_read_again_is_tried_anew_and_nobody_waits_for_it(opened: list[State]) -> None:
    def wake(served: Served) -> None:
        served.fall_asleep("nobody asked")
        served.wake()

    served = lived(wake, 12.0)
    assert opened == [State.WAKING, State.RECOVERING, State.RECOVERING]
    assert served.standing.state is State.RECOVERING and not served.is_waited_for


@pytest.mark.parametrize(
    ("wished", "said"), [(None, "request"), (2048, "request"), (10**6, "request: the model has no room for 1000000")]
)
def test_a_context_beyond_the_models_is_told_as_such(wished: int | None, said: str) -> None:
    assert room_said(2048, wished) == f"up to 2048 tokens per {said}"
