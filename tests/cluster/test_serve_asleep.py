"""A server that unloads its model while it is unused, and loads it again for the next request."""

import asyncio
import json
import weakref
from pathlib import Path

import httpx2
import pytest
import uvloop

from coordinator.api import serve as serve_module
from coordinator.api.serve import ServeOptions, serve
from coordinator.api.server import RequestLimits
from coordinator.cluster import deployment
from coordinator.cluster.options import ClusterOptions
from coordinator.engine.engine import Engine
from tests.cluster.processes import Starter, write_cluster
from tests.cluster.test_serve_here import PATIENCE_S, lines_of, served, wait_health
from tools.worker_process import free_port
from worker.compute.shard import Shard
from worker.config import ClusterConfig, load_cluster
from worker.platform.tasks import Use

ASK = {"prompt": "the", "max_tokens": 4}
LIVES = ": still at it\n\n"


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Shard]]:
    """Record the shards that the coordinator loads."""
    loaded: list[weakref.ref[Shard]] = []
    load = deployment.load_shard

    async def note(*given: object, **named: object) -> Shard:
        shard = await load(*given, **named)  # type: ignore[arg-type]
        loaded.append(weakref.ref(shard))
        return shard

    monkeypatch.setattr(deployment, "load_shard", note)
    return loaded


@pytest.mark.usefixtures("without_collector")
def test_an_unused_model_is_unloaded_on_all_nodes_and_loaded_again_for_the_next_request(
    start: Starter, talker: Path, tmp_path: Path, shards: list[weakref.ref[Shard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(serve_module, "say", said.append)
    config = write_cluster(tmp_path / "cluster.yaml", ("last", f"127.0.0.1:{free_port()}"), model=str(talker))
    worker = start.worker("last", "--config", config)
    assert worker.address
    options = ClusterOptions(load_cluster(config), str(talker), None, 4096)

    async def check() -> None:
        often = RequestLimits(heartbeat_s=0.001)
        async with served(options, keep_alive_s=0.1, max_waiting=2, limits=often) as client:

            async def wait_asleep() -> None:
                async with asyncio.timeout(PATIENCE_S):
                    while (await client.get("/health?deep=1")).json()["status"] != "asleep":
                        await client.get("/cluster")  # does not count as use
                    while (await asyncio.to_thread(worker.status)).weight_bytes:
                        pass

            first = (await client.post("/v1/completions", json=ASK)).json()
            await wait_asleep()
            async with asyncio.timeout(PATIENCE_S):
                while any(shard() for shard in shards):
                    await client.get("/cluster")
            num_loaded = len(shards)  # more than one if it fell asleep before the first request came
            assert (await client.get("/cluster")).json()["nodes"] == []
            asked = (client.post("/v1/completions", json=ASK | more) for more in ({}, {"stream": True}))
            again, stream = await asyncio.gather(*asked)
            assert again.json()["choices"] == first["choices"] and len(shards) > num_loaded
            assert stream.text.startswith(LIVES)
            *events, _ = [line.removeprefix("data: ") for line in stream.text.replace(LIVES, "").splitlines() if line]
            texts = [json.loads(event)["choices"][0]["text"] for event in events]
            assert "".join(texts) == first["choices"][0]["text"]

    uvloop.run(check())
    assert [line.partition(":")[0] for line in said[1:4]] == [
        "asleep", "a request came", "serving talker at http",
    ]  # fmt: skip


def test_a_request_to_a_server_about_to_fall_asleep_is_answered_though_the_server_is_told_to_stop(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_probing, unused, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    wait_unused = Use.wait_unused

    async def probe(model: Engine) -> None:
        is_probing.set()
        await may_end.wait()

    async def note_unused(use: Use, for_s: float | None) -> None:
        await is_probing.wait()
        await wait_unused(use, for_s)
        unused.set()

    monkeypatch.setattr(Engine, "probe", probe)
    monkeypatch.setattr(Use, "wait_unused", note_unused)

    async def check() -> None:
        serving = ServeOptions("127.0.0.1", free_port(), names=("talker",), keep_alive_s=0.0)
        running = asyncio.create_task(serve(ClusterOptions(ClusterConfig(), str(talker), 0, 4096), serving))
        async with httpx2.AsyncClient(base_url=serving.url(serving.port), timeout=PATIENCE_S) as client:
            await wait_health(client, 200, running)
            probing = asyncio.create_task(client.get("/health?deep=1"))
            await unused.wait()
            ask = {"prompt": "the", "max_tokens": 300, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=ask) as stream:
                lines = lines_of(stream)
                await anext(lines)
                running.cancel()
                rest = [line async for line in lines]
            may_end.set()
            await probing
        await asyncio.gather(running, return_exceptions=True)
        assert rest[-1] == "data: [DONE]" and not any('"error"' in line for line in rest)

    uvloop.run(check())
