"""The server in this process, with the memory, time limits and workers that each test chooses."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvloop

from coordinator.api import serve as serve_module
from coordinator.api.serve import ServeOptions, serve
from coordinator.api.server import RequestLimits
from coordinator.cluster.open import read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.planning.recovery import Limits
from tests.cluster.processes import Starter, write_cluster
from tools.worker_process import free_port
from worker.config import ClusterConfig, load_cluster

ENDLESS: dict[str, Any] = {"prompt": "the", "max_tokens": 30_000, "ignore_eos": True}
REFUSED = {"ContextExceeded": 1, "QueueFull": 1, "WaitedTooLong": 1}
CUT_OFF = "the answer was cut off: the server was shut down"
PATIENCE_S = 30.0


@asynccontextmanager
async def served(options: ClusterOptions, **more: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a server that answers."""
    serving = ServeOptions("127.0.0.1", free_port(), names=("talker",), **more)
    running = asyncio.create_task(serve(options, serving))
    try:
        async with httpx2.AsyncClient(base_url=serving.url(serving.port), timeout=PATIENCE_S) as client:
            await wait_health(client, 200, running)
            yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def wait_health(client: httpx2.AsyncClient, status: int, running: "asyncio.Task[None] | None" = None) -> str:
    """What it says once it has this status."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                found = await client.get("/health")
            except httpx2.ConnectError:
                assert running is None or not running.done(), running.exception()
            else:
                if found.status_code == status:
                    return str(found.json()["status"])
            await asyncio.sleep(0.02)


async def lines_of(answer: httpx2.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line:
            yield line


def test_a_full_queue_is_refused_at_once_and_a_long_wait_in_the_end(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(serve_module, "say", said.append)

    async def check() -> None:
        _, spec = await read_model(str(talker))
        memory = spec.shard_bytes(0, spec.num_layers) + spec.reserved_bytes(0, spec.num_layers, 6000)
        cluster = ClusterConfig.model_validate({"coordinator": {"memory": memory}})
        options = ClusterOptions(cluster, str(talker), 0, 4096)
        limits = RequestLimits(queue_timeout_s=2.0, heartbeat_s=1.5)  # the second is the time to begin to wait in
        async with served(options, max_waiting=1, limits=limits) as client:
            assert any("up to 6144 tokens per request" in line for line in said), said
            card = (await client.get("/v1/models/talker")).json()
            assert card["max_model_len"] == 6144
            exceeding = await client.post("/v1/completions", json=ENDLESS | {"prompt": [5] * 6200})
            assert (exceeding.status_code, exceeding.json()["error"]["code"]) == (400, "context_length_exceeded")
            hog = {**ENDLESS, "prompt": [5] * 4900, "max_tokens": 1200, "stream": True}
            async with client.stream("POST", "/v1/completions", json=hog) as running:
                lines = lines_of(running)  # kept: without it the answer is closed
                while not (await anext(lines)).startswith("data"):  # its prompt is fed
                    pass
                ask = {**ENDLESS, "max_tokens": 600, "stream": True}
                both = [client.post("/v1/completions", json=ask) for _ in range(2)]
                full, late = sorted(await asyncio.gather(*both), key=lambda found: found.status_code)
                assert (full.status_code, full.json()["error"]["code"]) == (429, "rate_limit_exceeded")
                assert full.headers["retry-after"] == "1" and "x-should-retry" not in full.headers
                assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
                assert late.headers["retry-after"] == "5"
                assert (await client.get("/cluster")).json()["totals"]["refused"] == REFUSED
                metrics = (await client.get("/metrics")).text
                for reason in REFUSED:
                    assert f'brigade_requests_rejected_total{{model_name="talker",reason="{reason}"}} 1.0' in metrics

    uvloop.run(check())


@pytest.mark.parametrize(("shutdown_s", "num_signals"), [(0.05, 1), (600.0, 2)])
def test_a_server_without_a_queue_answers_all_that_fit_and_cuts_streams_off_with_the_reason(
    talker: Path, shutdown_s: float, num_signals: int
) -> None:
    async def check() -> None:
        options = ClusterOptions(ClusterConfig(), str(talker), 0, 4096)
        serving = ServeOptions("127.0.0.1", free_port(), max_waiting=0, shutdown_timeout_s=shutdown_s)
        running = asyncio.create_task(serve(options, serving))
        async with httpx2.AsyncClient(base_url=serving.url(serving.port), timeout=PATIENCE_S) as client:
            await wait_health(client, 200, running)
            asked = [client.post("/v1/completions", json={"prompt": "the", "max_tokens": 2}) for _ in range(12)]
            answers = await asyncio.gather(*asked)
            async with client.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as stream:
                lines = lines_of(stream)
                await anext(lines)
                running.cancel()
                if num_signals == 2:
                    await wait_health(client, 503)
                    running.cancel()
                rest = [line async for line in lines]
        await asyncio.gather(running, return_exceptions=True)
        assert {answer.status_code for answer in answers} == {200}
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == ("draining", CUT_OFF)

    uvloop.run(check())


def test_a_server_goes_without_a_missing_worker_and_takes_it_in_under_endless_streams(
    start: Starter, talker: Path, tmp_path: Path
) -> None:
    config = write_cluster(tmp_path / "cluster.yaml", ("last", f"127.0.0.1:{free_port()}"), model=str(talker))

    async def check() -> None:
        options = ClusterOptions(load_cluster(config), str(talker), None, 4096)
        async with served(options) as client:

            async def ask(prompt: str) -> str:
                body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as stream:
                    *events, _ = [line[6:] async for line in lines_of(stream) if line.startswith("data: ")]
                return "".join(json.loads(event)["choices"][0]["text"] for event in events)

            async def ask_on(prompt: str) -> None:
                while not is_over:
                    answers.append((prompt, await ask(prompt)))

            health = (await client.get("/health")).json()
            assert health["status"] == "degraded" and "last" in str(health)
            expected = {prompt: await ask(prompt) for prompt in ("the", "a longer prompt than the other one")}
            is_over, answers = False, list[tuple[str, str]]()
            asking = asyncio.gather(*map(ask_on, expected))
            start.worker("last", "--config", config)
            async with asyncio.timeout(2 * PATIENCE_S):  # the promise: it is used within a minute
                nodes: list[str] = []
                while nodes != ["coordinator", "last"] and not asking.done():
                    state = (await client.get("/cluster")).json()
                    nodes = [node["name"] for node in state["nodes"] if node["state"] == "active"]
                    await asyncio.sleep(0.05)
                num_answers = len(answers)
                while len(answers) < num_answers + 4 and not asking.done():  # noqa: ASYNC110 - streams of others
                    await asyncio.sleep(0.05)
            is_over = True
            await asking
            assert nodes == ["coordinator", "last"]
            assert all(text == expected[prompt] for prompt, text in answers)

    uvloop.run(check())


def test_a_worker_that_stays_away_closes_the_server_and_its_return_opens_it(
    start: Starter, talker: Path, tmp_path: Path
) -> None:
    worker_address = ("last", f"127.0.0.1:{free_port()}")
    config = write_cluster(tmp_path / "cluster.yaml", worker_address, model=str(talker))
    worker = start.worker("last", "--config", config)
    assert worker.address

    async def check() -> None:
        _, spec = await read_model(str(talker))
        whole = spec.shard_bytes(0, spec.num_layers) + spec.reserved_bytes(0, spec.num_layers, 4096)
        keys = {"model": str(talker), "coordinator": f"{{memory: {whole - 1}}}"}
        cluster = load_cluster(write_cluster(config, worker_address, **keys))
        options = ClusterOptions(cluster, str(talker), None, 4096, limits=Limits(0.4, 0.5))
        async with served(options, limits=RequestLimits(heartbeat_s=0.05), reopen_s=0.1) as client:
            async with client.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as stream:
                lines = lines_of(stream)
                await anext(lines)
                worker.send_signal(signal.SIGSTOP)
                async with asyncio.timeout(PATIENCE_S):
                    while await anext(lines) != ": still at it":
                        pass
                worker.send_signal(signal.SIGKILL)
                rest = [line async for line in lines]
                error = json.loads(rest[-1].removeprefix("data: "))["error"]
                assert error["code"] == "cluster_failed" and "last" in error["message"]
                assert "data: [DONE]" not in rest
            assert await wait_health(client, 503) == "recovering"
            refused = await client.post("/v1/completions", json={"prompt": "the"})
            assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
            assert refused.json()["error"]["code"] == "recovering"
            start.worker("last", "--config", config)
            assert await wait_health(client, 200) == "ready"
            answered = await client.post("/v1/completions", json={"prompt": "the", "max_tokens": 2})
            assert answered.status_code == 200

    uvloop.run(check())
