"""Loads that were given up stop, and the next one starts; it reports that it waits."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from protos.brigade_pb2 import LoadProgress
from tests.integration import conftest
from tests.integration.conftest import RunningNode, Whole, answer, load_request, opened, peer_of, serving
from tests.integration.many import until
from tests.tiny import make_model
from worker.compute.shard import Shard
from worker.model.checkpoint import Checkpoint, open_folder
from worker.node import lifecycle
from worker.node.lifecycle import WorkerState
from worker.node.loading import load_shard
from worker.platform.threads import MlxThread

PIECES = 50  # of a fake file


class SlowHub:
    """Downloads files in pieces, each of which needs a permit."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, str]] = []  # the number of the download that took each, and its file
        self.ended: list[int] = []  # the downloads that have returned or raised
        self._num_downloads = 0
        self.permits = threading.Semaphore(0)

    def checkpoint(self, folder: Path) -> Checkpoint:
        return replace(open_folder(folder), download=self.download)

    def download(self, files: Iterable[str], progress: Callable[[int], None]) -> None:
        self._num_downloads += 1
        number = self._num_downloads
        try:
            for file in files:
                for _ in range(PIECES):
                    assert self.permits.acquire(timeout=60)
                    self.pieces.append((number, file))
                    progress(1)
        finally:
            self.ended.append(number)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SlowHub:
    hub = SlowHub()
    monkeypatch.setattr(conftest, "open_checkpoint", lambda model, known: hub.checkpoint(Path(model)))
    monkeypatch.setattr(lifecycle, "_WAITING_S", 0.01)
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
        async with peer_of(node) as peer:
            await peer.load(load_request(folder, start, 4), self.reports.append)


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_load_says_that_it_waits_for_another_one_which_stops_after_its_piece_if_it_was_given_up(
    tmp_path: Path, hub: SlowHub, is_given_up: bool
) -> None:
    folder = make_model(tmp_path / "model", num_files=3)
    async with serving(1) as [node], asyncio.timeout(60):
        first = Loading(node, folder, 1)
        hub.permits.release()
        await until(lambda: hub.pieces)
        if is_given_up:
            await first.give_up()
        second = Loading(node, folder, 2)
        await until(lambda: second.phases.count("waiting") >= 3)
        assert set(second.phases) == {"waiting"} and "waiting" not in first.phases
        assert first.task.done() == is_given_up
        hub.permits.release(6 * PIECES)
        await asyncio.wait([first.task, second.task])
        assert list(dict.fromkeys(second.phases)) == ["waiting", "download", "load"]
        assert ([number for number, _ in hub.pieces].count(1) == 2) == is_given_up
        async with opened(folder, (2, 2), [node]):
            pass


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """Of each load of a worker: set once it has noticed that it was given up."""
    found: list[threading.Event] = []

    async def note(*arguments: Any) -> Shard:
        found.append(next(each for each in arguments if isinstance(each, threading.Event)))
        return await load_shard(*arguments)

    monkeypatch.setattr(lifecycle, "load_shard", note)
    return found


@pytest.mark.parametrize("where", ["between tensors", "after the last one"])
async def test_what_a_given_up_load_has_read_is_kept_for_the_next_one(
    whole: Whole, monkeypatch: pytest.MonkeyPatch, given_up: list[threading.Event], where: str
) -> None:
    """A coordinator gives loads up when another node fails, and wants the same layers again."""
    read: list[mx.array] = []
    began, go_on = threading.Event(), threading.Event()
    materialise, num_tensors = Shard.materialise, len(Shard(open_folder(whole.folder), 1, 4).tensors)
    num_before = num_tensors // 2 if where == "between tensors" else num_tensors

    def slow(shard: Shard, progress: Callable[[int], None]) -> None:
        arrays = iter(shard.tensors.values())

        def note(num_bytes: int) -> None:
            if shard.start:
                read.append(next(arrays))
                if len(read) == num_before:
                    began.set()
                    assert go_on.wait(60)
            progress(num_bytes)

        materialise(shard, note)

    monkeypatch.setattr(Shard, "materialise", slow)
    async with serving(1) as [node], asyncio.timeout(60):
        first = Loading(node, whole.folder, 1)
        await asyncio.to_thread(began.wait, 60)
        await first.give_up()
        await until(given_up[0].is_set)
        go_on.set()
        await until(lambda: node.service.worker.state is WorkerState.EMPTY)
        kept = list(read)
        assert len(kept) == num_before
        await Loading(node, whole.folder, 1).task
        shard = node.service.worker.shard
        assert shard is not None
        assert all(array is before for array, before in zip(shard.tensors.values(), kept, strict=False))
        async with opened(whole.folder, (1, 3), [node]) as chain:
            assert (await answer(chain, (1, 2, 3), 4)).tokens == whole.tokens((1, 2, 3), 4)


async def test_what_was_held_before_is_kept_if_a_load_is_given_up_before_it_reads(
    tmp_path: Path, hub: SlowHub, given_up: list[threading.Event]
) -> None:
    folder = make_model(tmp_path / "model", num_files=3)
    async with serving(1) as [node], asyncio.timeout(60):
        hub.permits.release(6 * PIECES)
        await Loading(node, folder, 2).task
        shard = node.service.worker.shard
        assert shard is not None
        before = shard.tensors
        while hub.permits.acquire(blocking=False):
            pass
        second, num_pieces = Loading(node, folder, 1), len(hub.pieces)
        hub.permits.release()
        await until(lambda: len(hub.pieces) > num_pieces)
        await second.give_up()
        await until(given_up[1].is_set)
        hub.permits.release(6 * PIECES)
        await until(lambda: node.service.worker.state is WorkerState.EMPTY)
        await Loading(node, folder, 1).task
        shard = node.service.worker.shard
        assert shard is not None and all(shard.tensors[name] is array for name, array in before.items())


async def test_a_coordinator_whose_own_load_is_cancelled_goes_on_at_once_and_the_download_stops(tmp_path: Path) -> None:
    hub, thread = SlowHub(), MlxThread()
    checkpoint = hub.checkpoint(make_model(tmp_path / "model"))
    load = asyncio.create_task(load_shard(checkpoint, 0, 4, thread, lambda report: None))
    hub.permits.release()
    await until(lambda: hub.pieces)
    load.cancel()
    await asyncio.wait([load], timeout=60)
    assert load.cancelled() and len(hub.pieces) == 1
    hub.permits.release(PIECES)
    await until(lambda: hub.ended == [1])
    assert len(hub.pieces) == 2
    thread.close()
