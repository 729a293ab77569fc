"""Loads that nobody waits for any more stop, and the next one starts; it says so if it has to wait."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from protos.brigade_pb2 import LoadProgress
from tests.integration import conftest
from tests.integration.conftest import Models, RunningNode, answer, load_request, opened, serving
from tests.integration.many import until
from tests.tiny import make_model
from worker.compute.shard import Shard
from worker.model.checkpoint import Checkpoint, open_folder
from worker.node import loader
from worker.node.loading import load_shard
from worker.process.mlx_thread import MlxThread

PIECES = 50  # of a fake file


class SlowHub:
    """Downloads files in pieces, each of which needs a permit."""

    def __init__(self) -> None:
        self.pieces: list[tuple[threading.Thread, str]] = []  # the thread that took each, and its file
        self.permits = threading.Semaphore(0)

    def checkpoint(self, folder: Path) -> Checkpoint:
        return replace(open_folder(folder), download=self.download)

    def download(self, files: Iterable[str], progress: Callable[[int], None]) -> None:
        for file in files:
            for _ in range(PIECES):
                assert self.permits.acquire(timeout=10)
                self.pieces.append((threading.current_thread(), file))
                progress(1)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SlowHub:
    hub = SlowHub()
    monkeypatch.setattr(conftest, "open_checkpoint", lambda model, known: hub.checkpoint(Path(model)))
    monkeypatch.setattr(loader, "_WAITING_S", 0.01)
    return hub


class Loading:
    """A coordinator that loads, and what it is told."""

    def __init__(self, node: RunningNode, folder: Path, start: int) -> None:
        self.reports: list[LoadProgress] = []
        self.task = asyncio.create_task(self._load(node, folder, start))

    @property
    def phases(self) -> list[str]:
        return [report.phase for report in self.reports]

    async def give_up(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _load(self, node: RunningNode, folder: Path, start: int) -> None:
        peer = node.peer()
        try:
            await peer.load(load_request(folder, start, 4), self.reports.append)
        finally:
            await peer.close()


async def test_a_download_that_was_given_up_stops_after_its_piece_and_the_next_load_says_that_it_waits(
    tmp_path: Path, hub: SlowHub
) -> None:
    folder = make_model(tmp_path / "model", num_files=3)
    async with serving(1) as [node], asyncio.timeout(20):
        first = Loading(node, folder, 1)
        hub.permits.release()
        await until(lambda: hub.pieces)
        await first.give_up()
        second = Loading(node, folder, 2)
        await until(lambda: second.phases.count("waiting") >= 3)
        assert set(second.phases) == {"waiting"}
        hub.permits.release(3 * PIECES + 1)
        await second.task
        given_up = hub.pieces[0][0]
        assert [thread for thread, _ in hub.pieces].count(given_up) == 2
        assert list(dict.fromkeys(second.phases)) == ["waiting", "download", "load"]
        async with opened(folder, (2, 2), [node]):
            pass


async def test_two_coordinators_load_one_after_the_other(tmp_path: Path, hub: SlowHub) -> None:
    folder = make_model(tmp_path / "model", num_files=3)
    async with serving(1) as [node], asyncio.timeout(20):
        first = Loading(node, folder, 1)
        hub.permits.release()
        await until(lambda: hub.pieces)
        second = Loading(node, folder, 2)
        await until(lambda: "waiting" in second.phases)
        assert not first.task.done()
        hub.permits.release(6 * PIECES)
        await asyncio.gather(first.task, second.task)
    assert "waiting" not in first.phases
    assert second.phases[-1] == "load"


async def test_a_load_that_was_given_up_reads_no_layer_more_and_the_next_one_starts(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = models("qwen3")
    began, go_on = threading.Event(), threading.Event()
    layers: list[int] = []
    materialise = Shard.materialise

    def slow(shard: Shard, progress: Callable[[int], None]) -> None:
        def note(num_bytes: int) -> None:
            if shard.start:
                layers.append(shard.start)
                began.set()
                assert go_on.wait(10)
            progress(num_bytes)

        materialise(shard, note)

    monkeypatch.setattr(Shard, "materialise", slow)
    async with serving(1) as [node], asyncio.timeout(20):
        first = Loading(node, whole.folder, 1)
        await asyncio.to_thread(began.wait, 10)
        await first.give_up()
        second = Loading(node, whole.folder, 2)
        await until(lambda: "waiting" in second.phases)
        go_on.set()
        await second.task
        assert layers.count(1) == 1
        async with opened(whole.folder, (2, 2), [node]) as chain:
            assert (await answer(chain, (1, 2, 3), 4)).tokens == whole.tokens((1, 2, 3), 4)


async def test_a_coordinator_whose_own_load_is_cancelled_goes_on_at_once_and_the_download_stops(tmp_path: Path) -> None:
    hub, thread = SlowHub(), MlxThread()
    checkpoint = hub.checkpoint(make_model(tmp_path / "model"))
    load = asyncio.create_task(load_shard(checkpoint, 0, 4, thread, lambda report: None))
    hub.permits.release()
    await until(lambda: hub.pieces)
    load.cancel()
    await asyncio.wait([load], timeout=5)
    assert load.cancelled() and len(hub.pieces) == 1
    hub.permits.release(PIECES)
    await asyncio.to_thread(hub.pieces[0][0].join, 5)
    assert len(hub.pieces) == 2
    thread.close()
