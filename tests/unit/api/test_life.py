"""What becomes of a server whose model cannot be loaded, and what it says of one that is."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.api import serve
from coordinator.api.serve import ServeOptions, keep_open
from coordinator.api.server import RequestLimits, Server
from coordinator.api.status import cluster_state
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.recovery_record import Recovered
from coordinator.engine.engine import Engine, ServerState
from coordinator.engine.inputs import InputProcessor
from coordinator.engine.status import StatusSnapshot
from tests.unit.virtual_time import VirtualTime
from worker.config import ClusterConfig, TlsConfig, WorkerConfig
from worker.errors import InputError, ModelError, StageLost


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[ServerState]:
    """How the model stood whenever it was to be opened, which never works."""
    stood: list[ServerState] = []

    @asynccontextmanager
    async def fail(frontend: Any, *given: Any, **named: Any) -> AsyncIterator[Engine]:
        stood.append(frontend.served.state)
        raise StageLost("gone", node="mini")
        yield

    monkeypatch.setattr(serve, "open_engine", fail)
    return stood


def lived(begin: Any, for_s: float, config: ClusterConfig | None = None) -> Server:
    """What is served after so many seconds of a life that begins like this."""

    async def live() -> Server:
        frontend = SimpleNamespace(spec=SimpleNamespace(context=64))
        frontend.served = served = Server(cast(InputProcessor, frontend), ("talker",))
        begin(served)
        answers = asyncio.ensure_future(asyncio.Event().wait())
        options, serving = ClusterOptions(config or ClusterConfig(), "talker", None, 4096), ServeOptions("127.0.0.1", 0)
        living = asyncio.create_task(keep_open(served, options, serving, "http://here", cast(Any, answers)))
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


def sleeping(served: Server) -> None:
    served.open(cast(Engine, SimpleNamespace()))
    served.sleep("nobody asked")


def waking(served: Server) -> None:
    sleeping(served)
    served.become(ServerState.WAKING)


def test_a_server_ends_whose_first_model_cannot_be_loaded(opened: list[ServerState]) -> None:
    with pytest.raises(StageLost, match="gone"):
        lived(lambda served: None, 60.0)
    assert opened == [ServerState.LOADING]


def test_a_model_that_cannot_be_read_again_is_tried_anew_and_nobody_waits_for_it(opened: list[ServerState]) -> None:
    served = lived(waking, 12.0)
    assert opened == [ServerState.WAKING, ServerState.RECOVERING, ServerState.RECOVERING]
    assert served.state is ServerState.RECOVERING


def test_a_bug_while_the_server_stops_opens_no_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    num_opened = 0

    @asynccontextmanager
    async def fail_at_the_end(*given: Any, **named: Any) -> AsyncIterator[Engine]:
        nonlocal num_opened
        num_opened += 1
        if num_opened > 1:
            pytest.fail("another engine was opened")  # no Exception, so that it ends the server
        try:
            await asyncio.Event().wait()
        finally:
            raise ZeroDivisionError("a bug")
        yield

    monkeypatch.setattr(serve, "open_engine", fail_at_the_end)

    lived(waking, 1.0)
    assert num_opened == 1


def test_a_server_stays_asleep_whose_certificate_no_longer_lets_it_unload_its_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def sleep(served: Server, *given: Any) -> bool:
        sleeping(served)
        return False

    monkeypatch.setattr(serve, "open_once", sleep)
    worker = WorkerConfig(name="mini", address="192.168.1.7:50070")
    config = ClusterConfig(tls=TlsConfig(keys=str(tmp_path)), workers=(worker,))
    assert lived(lambda served: None, 60.0, config).state is ServerState.ASLEEP
    assert "the workers keep what they hold" in capsys.readouterr().err


def test_the_defaults_of_a_server_are_those_of_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sampling, in the place of the model's own, and the length of an answer that has none given."""
    given: dict[str, Any] = {}

    async def read(options: ClusterOptions, **usual: Any) -> InputProcessor:
        given.update(usual)
        raise ModelError("far enough")

    monkeypatch.setattr(InputProcessor, "read", read)
    serving = ServeOptions("127.0.0.1", 0, sampling={"temperature": 0.5}, limits=RequestLimits(max_tokens=7))
    with pytest.raises(ModelError, match="far enough"):
        asyncio.run(serve.serve(ClusterOptions(ClusterConfig(), "talker", None, 4096), serving))
    assert (given["sampling"], given["max_tokens"]) == ({"temperature": 0.5}, 7)


def test_hosts_and_origins_that_no_browser_names_and_empty_names_are_refused() -> None:
    good = ["https://a.example", "http://localhost:3000", "http://[::1]:80", "app://obsidian.md", "null", "*"]
    ServeOptions(
        "127.0.0.1", 0, cors_origins=good, allowed_hosts=["Mini.local", "::1", "[::1]"], names=["gpt-4"]
    ).check()
    bad = {
        "cors_origins": ("nope", "https://a.example/", "https://A.example", "a:80", "https://", ""),
        "allowed_hosts": ("https://a.example", "a.example/", "a.example:8080", "*", ""),
        "names": ("", " "),
    }
    flags = {"cors_origins": "cors_origin", "allowed_hosts": "allowed_host", "names": "served_model_name"}
    for option, each in ((option, each) for option, values in bad.items() for each in values):
        with pytest.raises(InputError) as refused:
            ServeOptions("127.0.0.1", 0, **{option: [each]}).check()
        assert refused.value.field == flags[option]


def test_a_recovery_has_its_age_though_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: Any = SimpleNamespace(spec=SimpleNamespace(num_layers=8, context=200))
    server = Server(inputs, ("talker",))
    server.stats.recover(Recovered("StageLost", "mini", "worker mini: closed the connection", 1.0, None))
    earlier = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: earlier)
    [found] = cluster_state(server, StatusSnapshot())["recoveries"]
    assert 0 <= found["age_s"] < 60
