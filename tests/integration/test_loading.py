"""Loading by the real Load call: refusals, damage, memory, digests, and loads that are given up for the next one."""

import asyncio
import gc
import hashlib
import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import grpc
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from coordinator.cluster import peer as peer_module
from coordinator.engine.engine import Engine
from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_UNSPECIFIED, Fingerprint, HelloRequest, LoadProgress, LoadRequest
from protos.brigade_pb2_grpc import NodeStub
from tests.integration import conftest
from tests.integration.conftest import (
    ANYWHERE,
    NETWORK,
    Models,
    RunningNode,
    Whole,
    answer,
    load_request,
    opened,
    serving,
)
from tests.integration.many import Live, request, until
from tests.integration.test_copies import full_request
from tests.tiny import make_model, write_folder
from worker.compute import held_tensors
from worker.compute.shard import Shard
from worker.errors import BrigadeError, ModelError, NodeSilent
from worker.model import contents
from worker.model.checkpoint import Checkpoint, open_folder
from worker.node import lifecycle, loading
from worker.node.lifecycle import WorkerState
from worker.node.loading import load_shard
from worker.node.model_sources import ModelSources
from worker.node.network import PROTOCOL_VERSION
from worker.node.rpc_errors import error_of
from worker.platform.threads import MlxThread

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(models: Models, tmp_path: Path) -> Path:
    """A copy of a sound model of four layers, to be damaged."""
    return Path(shutil.copytree(models("qwen3").folder, tmp_path / "model"))


async def refusal(request: LoadRequest, copy: Path | ModelSources = ANYWHERE) -> str:
    """What a worker says to a load that it refuses."""
    async with serving(1, copy) as [node]:
        with pytest.raises(ModelError) as caught:
            await node.load(request)
    assert str(caught.value).startswith("worker node-1: ")
    return str(caught.value)


# Handshake


ANOTHER: dict[str, dict[str, Any]] = {"config": {"config": {"rope_theta": 20000.0}}, "tensors": {"dtype": mx.bfloat16}}


@pytest.mark.parametrize(
    ("part", "named"), [("config", "config.json"), ("tokenizer", "tokenizer"), ("tensors", "tensor")]
)
async def test_another_model_is_refused_by_fingerprint(models: Models, folder: Path, part: str, named: str) -> None:
    request = load_request(models("qwen3").folder, 2, 4)
    async with serving(1, folder) as [node]:
        await node.load(request)  # as long as the copies are equal
        assert gc.get_freeze_count(), "a full collection would stop every stream for a moment"
    if part == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    else:
        make_model(folder, **ANOTHER[part])
    here, there = getattr(open_folder(folder).fingerprint, part), getattr(request.fingerprint, part)
    message = await refusal(request, folder)
    assert here[:12] in message and there[:12] in message and named in message


def changed(folder: Path, **fields: Any) -> LoadRequest:
    request = load_request(folder, 2, 4)
    for name in fields:
        request.ClearField(name)  # type: ignore[arg-type]
    request.MergeFrom(LoadRequest(**fields))
    return request


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fingerprint": Fingerprint()}, ("config.json",)),
        ({"num_layers": 5}, ("of 5 layers", "has 4")),
        ({"end": 5}, ("[2, 5)", "has 4")),
        ({"start": 0}, ("[0, 4)",)),
        ({"start": 3, "end": 3}, ("[3, 3)",)),
        ({"start": 3, "end": 2}, ("[3, 2)",)),
        ({"dtype": DTYPE_BFLOAT16}, ("bfloat16", "float32")),
        ({"dtype": DTYPE_UNSPECIFIED}, ("unspecified", "float32")),
        ({"dtype": 9}, ("9", "float32")),
    ],
    ids=str,
)
async def test_what_the_model_has_not_is_refused(models: Models, fields: dict[str, Any], said: tuple[str, ...]) -> None:
    message = await refusal(changed(models("qwen3").folder, **fields))
    assert all(part in message for part in said), message


async def test_another_version_of_the_protocol_is_refused_with_both_versions() -> None:
    async with serving(1) as [node], NETWORK.channel("node-1", node.address) as channel:
        hello = NodeStub(channel).Hello
        assert (await hello(HelloRequest(protocol_version=PROTOCOL_VERSION))).node == "node-1"
        with pytest.raises(grpc.RpcError) as caught:
            await hello(HelloRequest(protocol_version=PROTOCOL_VERSION + 41))
    error = error_of(caught.value, "node-1")
    assert isinstance(error, ModelError)
    assert f"worker node-1: speaks protocol {PROTOCOL_VERSION}" in str(error)
    assert f"the coordinator speaks {PROTOCOL_VERSION + 41}" in str(error)
    assert "brigade launch --update" in str(error) and "\n" not in str(error)


# Damage


@pytest.mark.parametrize("is_open", [False, True], ids=["after its header was read", "before its tensors are read"])
@pytest.mark.parametrize("kept", [0, -100])
async def test_a_file_that_is_cut_short_is_a_model_error(folder: Path, kept: int, is_open: bool) -> None:
    """A copy that is still going on, a disk that fails: the tensors are read long after the headers."""
    checkpoint = open_folder(folder)

    def read() -> None:
        shard = Shard(checkpoint, 2, 4) if is_open else None
        os.truncate(folder / WEIGHTS, kept if kept >= 0 else (folder / WEIGHTS).stat().st_size + kept)
        (shard or Shard(checkpoint, 2, 4)).materialise(lambda nbytes: None)

    expected = r"cannot read .*layers \[2, 4\)" if is_open else "cannot read"
    with closing(MlxThread()) as thread, pytest.raises(ModelError, match=expected):
        await thread.run(read)


async def digests(node: RunningNode) -> dict[str, str]:
    async with node.reached() as peer:
        return await peer.digests()


async def test_a_refused_load_leaves_what_was_loaded_and_a_sound_one_may_follow(models: Models, folder: Path) -> None:
    """The damage is named; what else does not fit: by descriptions alone, in tests/unit/model."""
    whole, damaged, lacking = models("qwen3"), load_request(folder, 2, 4), "model.layers.2.mlp.up_proj.weight"
    async with serving(1) as [node]:
        await node.load(load_request(whole.folder, 2, 4))
        before = await digests(node)
        make_model(folder, **ANOTHER["config"])
        with pytest.raises(ModelError, match=r"^worker node-1: "):
            await node.load(changed(folder, num_layers=5))
        assert await digests(node) == before
        tensors = dict(mx.load(str(folder / WEIGHTS)))
        del tensors[lacking]
        write_folder(folder, json.loads((whole.folder / "config.json").read_text()), tensors)
        damaged.fingerprint.CopyFrom(open_folder(folder).fingerprint)  # a coordinator with the same damage
        with pytest.raises(ModelError, match=f"^worker node-1: .*{lacking}"):
            await node.load(damaged)
        async with opened(whole.folder, (2, 2), [node]) as chain:
            assert (await answer(chain, (1, 2, 3), 4)).tokens == whole.tokens((1, 2, 3), 4)


# Progress and digests


@pytest.mark.parametrize(("start", "end"), [(1, 2), (2, 4)])
async def test_progress_ends_at_the_bytes_of_the_shards_tensors(whole: Whole, start: int, end: int) -> None:
    parameters = dict(tree_flatten(whole.reference.model.parameters()))
    own = [f"model.layers.{i}." for i in range(start, end)] + (["model.norm", "lm_head"] if end == 4 else [])
    expected = sum(array.nbytes for name, array in parameters.items() if name.startswith(tuple(own)))
    async with serving(1) as [node]:
        reports = await node.load(load_request(whole.folder, start, end))
    done = [report.done for report in reports if report.phase == "load"]
    assert done == sorted(done) and len(done) >= end - start and done[0] > 0
    assert done[-1] == reports[-1].total == expected


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that look for signs of progress after a moment of silence."""
    monkeypatch.setattr(lifecycle, "QUIET_S", 0.001)
    monkeypatch.setattr(loading, "QUIET_S", 0.001)
    monkeypatch.setattr(loading, "READ_BYTES", 1000)


@pytest.mark.usefixtures("quiet")
async def test_a_long_check_of_contents_is_reported(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    is_told, read_marks, phases = threading.Event(), contents.read_marks, list[str]()

    def slow(path: Path, tensors: Any, note_read: Callable[[], None]) -> dict[str, bytes]:
        for _ in range(6000):
            note_read()
            if is_told.wait(0.01):
                break
        return read_marks(path, tensors, note_read)

    def note(report: LoadProgress) -> None:
        phases.append(report.phase)
        is_told.set()

    request = full_request(models("qwen3").folder, 2, 4)
    async with serving(1) as [node], node.reached() as peer:
        monkeypatch.setattr(contents, "read_marks", slow)
        await peer.load(request, note)
    in_turn = [phase for phase, _ in groupby(phases)]  # a load so short, and the check after it, may have no report
    assert in_turn in (["check"], ["check", "load"], ["check", "load", "check"])


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("does_disk_answer", [True, False])
async def test_a_tensor_that_takes_long_to_read_is_reported_as_long_as_the_disk_answers(
    models: Models, monkeypatch: pytest.MonkeyPatch, *, does_disk_answer: bool
) -> None:
    """MLX tells of whole tensors only."""
    is_over, materialise, read_spans, told = threading.Event(), Shard.materialise, loading.read_spans, list[int]()

    def slow(shard: Shard, progress: Callable[[int], None]) -> None:
        assert is_over.wait(60)
        materialise(shard, progress)

    def hang(*arguments: Any) -> Iterator[bytes]:
        assert is_over.wait(60)
        return read_spans(*arguments)

    def note(report: LoadProgress) -> None:
        told.append(report.done)
        is_over.set()

    request = load_request(models("qwen3").folder, 2, 4)
    monkeypatch.setattr(Shard, "materialise", slow)
    async with serving(1) as [node], node.reached() as peer:
        if does_disk_answer:
            await peer.load(request, note)
            assert 0 < told[0] <= told[1]
        else:
            monkeypatch.setattr(loading, "read_spans", hang)
            monkeypatch.setattr(peer_module, "STALL_S", 0.5)
            with pytest.raises(NodeSilent, match="no progress in loading"):
                await peer.load(request, note)
            assert not told
            is_over.set()


@pytest.mark.parametrize(("quantize", "tied"), [(None, False), ({"group_size": 64, "bits": 4}, True)])
async def test_the_digests_of_all_shards_are_those_of_the_whole_models_tensors(
    models: Models, quantize: dict[str, int] | None, tied: bool
) -> None:
    config = {"intermediate_size": 128}
    whole = models("qwen3", dtype=mx.bfloat16, tied=tied, quantize=quantize, config=config, num_files=2)
    expected = {name: digest(array) for name, array in tree_flatten(whole.reference.model.parameters())}
    async with serving(2) as nodes, opened(whole.folder, (1, 2, 1), nodes) as chain:
        found = await chain.thread.run(lambda: Shard(open_folder(whole.folder), 0, 1).digests())
        for peer in chain.peers:
            theirs = await peer.digests()
            assert theirs
            assert not {name for name in theirs.keys() & found.keys() if "embed_tokens" not in name}
            found |= theirs
    assert found == expected


def digest(array: mx.array) -> str:
    return hashlib.blake2b(bytes(np.array(array.view(mx.uint8))), digest_size=16).hexdigest()


async def test_digests_leave_room_for_frames_in_between(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_tensors, "DIGEST_BYTES", 256)
    async with serving(1) as [node], opened(models("qwen3").folder, (2, 2), [node]) as chain, Engine(chain) as engine:
        idle = await chain.peers[0].digests()
        live = Live(engine, request((5, 6, 7), 400))
        await live.wait_pieces(1)
        before = live.num_pieces
        assert await chain.peers[0].digests() == idle
        assert before + 5 < live.num_pieces < 400
        live.task.cancel()
        await asyncio.wait([live.task])
    shard = Shard(open_folder(models("qwen3").folder), 2, 4)
    assert {name: digest(array) for name, array in shard.tensors.items()} == idle


async def test_a_node_that_holds_nothing_has_no_digests() -> None:
    async with serving(1) as [node]:
        with pytest.raises(ModelError, match="worker node-1: holds no shard"):
            await digests(node)


# Memory


async def test_a_node_lets_go_of_its_shard_before_it_loads_another(
    models: Models, monkeypatch: pytest.MonkeyPatch, without_collector: None
) -> None:
    shards: list[weakref.ref[Shard]] = []
    alive: list[int] = []
    materialise: Callable[..., None] = Shard.materialise

    def note(shard: Shard, progress: Callable[[int], None]) -> None:
        alive.append(sum(other() is not None for other in shards))
        shards.append(weakref.ref(shard))
        materialise(shard, progress)

    monkeypatch.setattr(Shard, "materialise", note)
    async with serving(1) as [node]:
        await node.load(load_request(models("qwen3").folder, 2, 4))
        assert shards[0]() is not None
        await node.load(load_request(models("qwen3").folder, 1, 4))
        await node.load(load_request(models("llama").folder, 1, 4))
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("error", [ModelError("no such kernel"), IndexError("no such kernel")], ids=repr)
async def test_a_node_that_failed_lets_go_of_its_shard_before_it_loads_another(
    models: Models, monkeypatch: pytest.MonkeyPatch, without_collector: None, error: Exception
) -> None:
    """Its error passes through what holds the shard, and its coordinator still has that error."""
    shards: list[weakref.ref[Shard]] = []
    run: Callable[..., mx.array] = Shard.__call__

    def fail(shard: Shard, *arguments: Any) -> mx.array:
        if shard.is_first:
            return run(shard, *arguments)
        shards.append(weakref.ref(shard))
        raise type(error)(*error.args)

    async with serving(1) as [node]:
        async with opened(models("qwen3").folder, (2, 2), [node]) as chain:
            monkeypatch.setattr(Shard, "__call__", fail)
            with pytest.raises(BrigadeError, match="no such kernel"):
                await answer(chain, (1, 2, 3), 4)
        await until(lambda: not node.service.worker.attachment)
        assert shards[0]() is not None
        await node.load(load_request(models("qwen3").folder, 1, 4))
        assert shards[0]() is None


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
    monkeypatch.setattr(lifecycle, "WAITING_S", 0.01)
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
        async with node.reached() as peer:
            await peer.load(load_request(folder, start, 4), self.reports.append)


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_load_waits_as_long_as_another_one_gets_on_which_stops_after_its_piece_if_it_was_given_up(
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
        await until(lambda: "waiting" in second.phases)
        await asyncio.sleep(0.1)  # ten times as long as it waits
        assert second.phases == ["waiting"], "a disk that hangs must not look like progress"
        if not is_given_up:
            hub.permits.release()
            await until(lambda: len(second.phases) == 2)
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
