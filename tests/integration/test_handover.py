"""A worker that is about to end, and one that joins: with `cache_disk` the caches of running sessions go along."""

import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.cluster.chain import Chain
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.open import open_cluster
from coordinator.cluster.options import ClusterOptions
from coordinator.decoding.decode_options import make_cache_choice
from coordinator.engine.engine import Engine
from coordinator.planning.recovery import Limits
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Frame
from tests.integration.conftest import Models, opened_folder, running
from tests.integration.many import Frames, request, solo, tokens_of, until
from tests.integration.many import frames as frames
from tests.integration.windows import MASKED
from tools.worker_process import WorkerProcess
from worker.config import ClusterConfig, CoordinatorConfig, WorkerConfig
from worker.platform.tasks import background

PROMPT = tokens_of(1100)  # two whole pieces, and 76 tokens more
MOST = 64 << 20
MEMORY = 1 << 30


@asynccontextmanager
async def two_workers(model: Path, folder: Path) -> AsyncIterator[list[WorkerProcess]]:
    """Processes with disks of their own."""
    nodes = [
        WorkerProcess(name, ("--model", str(model)), folder / f"{name}.log", {"XDG_CACHE_HOME": str(folder / name)})
        for name in ("first", "last")
    ]
    async with AsyncExitStack() as stack:
        for node in nodes:
            node.start()
            stack.push_async_callback(_ended, node)
        for node in nodes:
            await node.wait_listening()
        yield nodes


async def _ended(node: WorkerProcess) -> None:
    if node.is_running:
        node.kill()
        await node.wait_ended(5.0)


@asynccontextmanager
async def clustered(model: Path, nodes: list[WorkerProcess]) -> AsyncIterator[Cluster]:
    workers = tuple(WorkerConfig(name=node.name, address=(node.address,), memory=MEMORY) for node in nodes)
    config = ClusterConfig(
        coordinator=CoordinatorConfig(memory=MEMORY), workers=workers, layers=(1, 2, 1), cache_disk=MOST
    )
    options = ClusterOptions(config, str(model), None, 2048, limits=Limits(rejoin_s=30))
    async with open_cluster(options, opened_folder(model)) as cluster:
        yield cluster


def fed_again(frames: Frames, epoch: int) -> int:
    """Rows of prompt chunks on this chain that were computed, but for those of its warm-up."""
    own = [frame for frame in frames if frame.epoch == epoch]
    begin = next(number for number, frame in enumerate(own) if frame.closed)
    windows = [window for frame in own[begin + 1 :] for window in frame.windows if not window.stored]
    return sum(len(window.tokens) for window in windows if len(window.tokens) > 1)


async def read(engine: Engine, asked: Request, tokens: list[int]) -> None:
    async with aclosing(engine.generate(asked)) as outputs:
        async for output in outputs:
            tokens += [token.token for token in output.tokens]


@pytest.mark.parametrize("cache", ["full", pytest.param("int8", marks=pytest.mark.matrix)])
async def test_running_sessions_go_on_with_their_caches_where_a_worker_ends_or_joins(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frames: Frames, cache: str
) -> None:
    """The disk of the one that joins is empty: the others give it what they have of its layers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "coordinator"))
    send = Chain.send

    def send_slowly(chain: Chain, frame: Frame) -> None:
        time.sleep(0.01)  # a worker takes a second to start: the stream need not be long for that
        send(chain, frame)

    monkeypatch.setattr(Chain, "send", send_slowly)
    config = MASKED["config"] | {"max_position_embeddings": 4096, "head_dim": 32}
    model = models("qwen3", config=config).folder
    asked = request(PROMPT, 2500, seed=3, temperature=0.7, cache=make_cache_choice(cache, None))
    found: list[int] = []
    async with (
        two_workers(model, tmp_path) as nodes,
        clustered(model, nodes) as cluster,
        Engine(cluster.chain, when_lost=cluster.reopen) as engine,
        background(read(engine, asked, found)),
    ):
        await until(lambda: len(found) > 10)
        nodes[1].signal(signal.SIGTERM)
        assert await nodes[1].wait_ended(10.0) == 0
        known = len(found)
        await until(lambda: len(found) > known)
        assert len(cluster.chain.plan.names) == 2 and cluster.recovery.still_since is not None
        shutil.rmtree(tmp_path / "last")
        nodes[1].start()
        await until(lambda: len(cluster.chain.plan.names) == 3)
        known = len(found)
        await until(lambda: len(found) > known + 10)
    assert {frame.epoch for frame in frames} == {1, 2, 3}
    assert 1090 <= fed_again(frames, 1) <= 1100
    for epoch in (2, 3):
        from_disk = [window for frame in frames if frame.epoch == epoch for window in frame.windows if window.stored]
        assert [len(window.tokens) for window in from_disk][:2] == [512, 512]
        assert fed_again(frames, epoch) < 512 + 20
    monkeypatch.setattr(Chain, "send", send)
    async with running(model, (4,)) as chain:
        [expected] = await solo(chain, [replace(asked, max_tokens=len(found))], chunk=512)
    assert found == expected.tokens
