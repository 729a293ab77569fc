"""The server in this process, with the memory, time limits and workers that each test chooses."""

import asyncio
import json
import signal
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from coordinator.api import serve as serve_module
from coordinator.api.server import RequestLimits
from coordinator.cluster import deployment
from coordinator.cluster.open import read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.engine.core import EngineCore
from coordinator.engine.engine import Engine
from coordinator.planning.recovery import Limits
from tests.cluster.processes import Starter, Worker, write_cluster
from tests.cluster.servers import PATIENCE_S, TEXTS, served, wait_health
from tools.worker_process import free_port
from worker.compute.shard import Shard
from worker.config import ClusterConfig, load_cluster
from worker.platform.tasks import Use

SHORT: dict[str, Any] = {"prompt": "the", "max_tokens": 4}
ENDLESS: dict[str, Any] = {"prompt": "the", "max_tokens": 30_000, "ignore_eos": True}
LIVES = ": still at it"


@asynccontextmanager
async def streaming(client: httpx2.AsyncClient, **body: Any) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a stream that has begun."""
    async with client.stream("POST", TEXTS, json=body | {"stream": True}) as answer:
        lines = (line async for line in answer.aiter_lines() if line)
        while not (await anext(lines)).startswith("data"):
            pass  # it lives, and its prompt is being fed
        yield lines


def text_of(lines: list[str]) -> str:
    """The text of a whole stream."""
    *events, _ = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def error_of(line: str) -> Any:
    return json.loads(line.removeprefix("data: "))["error"]


def options_of(talker: Path, cluster: ClusterConfig | None = None, **more: Any) -> ClusterOptions:
    local = None if cluster and cluster.workers else 0
    return ClusterOptions(cluster or ClusterConfig(), str(talker), local, 4096, **more)


async def bytes_for(talker: Path, rows: int) -> int:
    """What the whole model and so many rows of its caches take."""
    _, spec = await read_model(str(talker))
    return spec.shard_bytes(0, spec.num_layers) + spec.reserved_bytes(0, spec.num_layers, rows)


@pytest.fixture(scope="module")
def worker_file(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster.yaml with a worker, which runs once a test has asked for it."""
    path = tmp_path_factory.mktemp("last") / "cluster.yaml"
    return write_cluster(path, ("last", f"127.0.0.1:{free_port()}"), model=str(talker))


@pytest.fixture(scope="module")
def last(module_start: Starter, worker_file: Path) -> Worker:
    return module_start.worker("last", "--config", worker_file)


async def test_a_full_queue_is_refused_at_once_and_a_long_wait_in_the_end(talker: Path) -> None:
    cluster = ClusterConfig.model_validate({"coordinator": {"memory": await bytes_for(talker, 2048)}})
    limits = RequestLimits(queue_timeout_s=0.8, heartbeat_s=0.5)  # the second is the time to begin to wait in
    async with served(replace(options_of(talker, cluster), context=2048), max_waiting=1, limits=limits) as (client, _):
        assert (await client.get("/v1/models/talker")).json()["max_model_len"] == 2048
        exceeding = await client.post(TEXTS, json=ENDLESS | {"prompt": [5] * 2052})
        assert (exceeding.status_code, exceeding.json()["error"]["code"]) == (400, "context_length_exceeded")
        async with streaming(client, **ENDLESS | {"prompt": [5] * 1026, "max_tokens": 1000}):  # its prompt is fed
            both = [client.post(TEXTS, json=ENDLESS | {"max_tokens": 300, "stream": True}) for _ in range(2)]
            full, late = sorted(await asyncio.gather(*both), key=lambda found: found.status_code)
            assert (full.status_code, full.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert full.headers["retry-after"] == "1" and "x-should-retry" not in full.headers
            assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
            assert late.headers["retry-after"] == "5"
            refused = dict.fromkeys(("ContextExceeded", "QueueFull", "WaitedTooLong"), 1)
            assert (await client.get("/cluster")).json()["totals"]["refused"] == refused
            metrics = (await client.get("/metrics")).text
            for reason in refused:
                assert f'brigade_requests_rejected_total{{model_name="talker",reason="{reason}"}} 1.0' in metrics


@pytest.mark.parametrize(("shutdown_s", "num_signals"), [(0.05, 1), (600.0, 2)])
async def test_a_server_without_a_queue_answers_all_that_fit_and_cuts_streams_off_with_the_reason(
    talker: Path, shutdown_s: float, num_signals: int
) -> None:
    async with served(options_of(talker), max_waiting=0, shutdown_timeout_s=shutdown_s) as (client, running):
        answers = await asyncio.gather(*(client.post(TEXTS, json=SHORT) for _ in range(12)))
        assert {answer.status_code for answer in answers} == {200}
        async with streaming(client, **ENDLESS) as lines:
            running.cancel()
            if num_signals == 2:
                await wait_health(client, 503)
                running.cancel()
            error = error_of([line async for line in lines][-1])
        assert error["code"] == "draining"
        assert error["message"] == "the answer was cut off: the server was shut down"


async def test_a_server_runs_without_a_missing_worker_takes_it_in_under_streams_and_keeps_requests_while_it_restarts(
    request: pytest.FixtureRequest, start: Starter, talker: Path, worker_file: Path
) -> None:
    options = options_of(talker, load_cluster(worker_file), limits=Limits(rejoin_s=PATIENCE_S, arrival_s=0.5))
    async with served(options) as (client, _):

        async def ask(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
            return text_of((await client.post(TEXTS, json=body)).text.splitlines())

        async def ask_on(prompt: str) -> None:
            while not is_over:
                answers.append((prompt, await ask(prompt)))

        health = (await client.get("/health")).json()
        assert health["status"] == "degraded" and "last" in str(health)
        expected = {prompt: await ask(prompt) for prompt in ("the", "a longer prompt than the other one")}
        is_over, answers = False, list[tuple[str, str]]()
        asking = asyncio.gather(*map(ask_on, expected))
        worker = start.worker("last", "--config", worker_file)
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

        worker.send_signal(signal.SIGKILL)
        assert await wait_health(client, 503) == "recovering"
        late = asyncio.gather(*map(ask, expected))
        request.getfixturevalue("last")  # the one that the next tests use
        assert await late == list(expected.values())


async def test_a_bug_of_the_engine_ends_its_requests_and_not_the_server(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, bugs = EngineCore.put_outputs, [ZeroDivisionError("a bug")]

    def put_or_fail(core: EngineCore, *given: Any) -> None:
        if has_answered and bugs:
            raise bugs.pop()
        put(core, *given)

    has_answered = False
    monkeypatch.setattr(EngineCore, "put_outputs", put_or_fail)

    async with served(options_of(talker), reopen_s=0.1) as (client, _):
        first = (await client.post(TEXTS, json=SHORT)).json()["choices"]
        has_answered = True
        failed = await client.post(TEXTS, json=SHORT)
        assert failed.status_code == 500 and "this is a bug" in failed.json()["error"]["message"]
        assert await wait_health(client, 200) == "ready" and not bugs
        assert (await client.post(TEXTS, json=SHORT)).json()["choices"] == first


@pytest.mark.usefixtures("without_collector", "thawed")
async def test_an_unused_model_is_unloaded_on_all_nodes_and_loaded_again_for_the_next_request(
    talker: Path, worker_file: Path, last: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(serve_module, "say", said.append)
    shards: list[weakref.ref[Shard]] = []  # that the coordinator loads
    load = deployment.load_shard

    async def load_and_note(*given: Any, **named: Any) -> Shard:
        shard = await load(*given, **named)
        shards.append(weakref.ref(shard))
        return shard

    monkeypatch.setattr(deployment, "load_shard", load_and_note)

    options, often = options_of(talker, load_cluster(worker_file)), RequestLimits(heartbeat_s=0.001)
    async with served(options, keep_alive_s=0.1, max_waiting=2, limits=often) as (client, _):
        first = (await client.post(TEXTS, json=SHORT)).json()["choices"]
        async with asyncio.timeout(PATIENCE_S):
            while (await client.get("/health?deep=1")).json()["status"] != "asleep":
                await client.get("/cluster")  # does not count as use
            while (await asyncio.to_thread(last.status)).weight_bytes:
                pass
            while any(shard() for shard in shards):
                await client.get("/cluster")
        num_loaded = len(shards)  # more than one if it fell asleep before the first request came
        assert (await client.get("/cluster")).json()["nodes"] == []
        asked = (client.post(TEXTS, json=SHORT | more) for more in ({}, {"stream": True}))
        again, stream = await asyncio.gather(*asked)
        assert again.json()["choices"] == first and len(shards) > num_loaded
        assert stream.text.startswith(LIVES)
        assert text_of(stream.text.splitlines()) == first[0]["text"]
    events = [line.partition(":")[0] for line in said[1:4]]
    assert events == ["asleep", "a request came", "serving talker at http"]


async def test_a_request_to_a_server_about_to_fall_asleep_is_answered_though_the_server_is_told_to_stop(
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

    async with served(options_of(talker), keep_alive_s=0.0) as (client, running):
        probing = asyncio.create_task(client.get("/health?deep=1"))
        await unused.wait()
        async with streaming(client, **ENDLESS | {"max_tokens": 300}) as lines:
            running.cancel()
            rest = [line async for line in lines]
        may_end.set()
        await probing
    assert rest[-1] == "data: [DONE]" and not any('"error"' in line for line in rest)


async def test_a_worker_that_stays_away_closes_the_server_and_its_return_opens_it(
    module_start: Starter, talker: Path, worker_file: Path, last: Worker
) -> None:
    assert last.address
    memory = await bytes_for(talker, 4096) - 1
    cluster = load_cluster(
        write_cluster(
            worker_file.with_name("own.yaml"), ("last", last.address), model=str(talker),
            coordinator=f"{{memory: {memory}}}",
        )
    )  # fmt: skip
    options = options_of(talker, cluster, limits=Limits(0.4, 0.5))
    async with served(options, limits=RequestLimits(heartbeat_s=0.05), reopen_s=0.1) as (client, _):
        async with streaming(client, **ENDLESS) as lines:
            last.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(PATIENCE_S):
                while await anext(lines) != LIVES:
                    pass
            last.send_signal(signal.SIGKILL)
            rest = [line async for line in lines]
        error = error_of(rest[-1])
        assert error["code"] == "cluster_failed" and "last" in error["message"]
        assert "data: [DONE]" not in rest
        assert await wait_health(client, 503) == "recovering"
        refused = await client.post(TEXTS, json=SHORT)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["code"] == "recovering"
        module_start.worker("last", "--config", worker_file)
        assert await wait_health(client, 200) == "ready"
        assert (await client.post(TEXTS, json=SHORT)).status_code == 200
