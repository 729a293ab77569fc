"""Workers without the model: they are sent their layers, keep them, and make the same tokens."""

import asyncio
import errno
import io
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster import survey as survey_module
from coordinator.cluster import weights as feed_module
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.cluster.survey import known_speeds
from coordinator.cluster.weights import SourceFile, load_pushing, push_weights
from coordinator.deploy.trial import try_cluster
from coordinator.engine.engine import Engine
from protos.brigade_pb2 import Feeding, HelloReply, LoadProgress, LoadRequest
from tests.integration import test_hub
from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK, Models, RunningNode, Whole, answer, opened, serving
from tests.integration.layouts import write_layout
from tests.integration.many import Live, request, tokens_of, until
from tests.integration.published import PUBLISHED
from tests.integration.test_copies import full_request, tune
from tests.integration.test_hub import THIRD, Ask, Hub
from tests.tiny import VOCAB
from tools.proxy import Proxy
from worker.config import ClusterConfig, WorkerConfig
from worker.errors import ModelError, ModelLacking, StageLost
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.contents import contents_of
from worker.model.describe import describe
from worker.model.hub import open_repository
from worker.node import weights_receive as feeding_module
from worker.node.framing import CHUNK_BYTES, Chunk, read_transfer
from worker.node.model_sources import Headers, ModelSources, Opening
from worker.node.network import Network
from worker.node.weights_cache import PartialFile, WeightsCache, pieces_of

PROMPT = tuple((5 * i + 3) % VOCAB for i in range(20))
NOTHING = ModelSources()
LARGE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2000}  # layers of 1.7 MB, a head of 2 MB

StoreOf = Callable[[str], WeightsCache]
Lacking = Callable[..., AbstractAsyncContextManager[list[RunningNode]]]

folder, hub, asking = test_hub.folder, test_hub.hub, test_hub.asking  # fixtures


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def store_of(tmp_path: Path) -> StoreOf:
    """Each node's own, as on machines of their own."""
    return lambda name: WeightsCache(tmp_path / "shards" / name)


@pytest.fixture
def lacking(store_of: StoreOf) -> Lacking:
    """`lacking(2)`: two workers without a model, whose stores outlive them."""
    return partial(serving, model=NOTHING, store_of=store_of)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes came with each message, to any node."""
    found: list[int] = []

    def note(message: bytes) -> Feeding | Chunk:
        read = read_transfer(message)
        if isinstance(read, Chunk):
            found.append(len(read.data))
        return read

    monkeypatch.setattr(feeding_module, "read_transfer", note)
    return found


def size_of(folder: Path, start: int, end: int, *, with_files: bool = True) -> int:
    """Bytes that a worker of these layers is sent."""
    checkpoint = open_folder(folder)
    files = [folder / "config.json", *checkpoint.tokenizer_files()] if with_files else []
    return sum(piece.nbytes for piece in pieces_of(checkpoint, start, end)) + sum(p.stat().st_size for p in files)


async def fed(node: RunningNode, wanted: LoadRequest, folder: Path) -> int:
    async with node.reached() as peer:
        return await push_weights(peer, wanted, open_folder(folder), lambda report: None)


async def fed_and_loaded(node: RunningNode, wanted: LoadRequest, folder: Path) -> None:
    await fed(node, wanted, folder)
    async with node.reached() as peer:
        await peer.load(wanted, lambda report: None)


async def assert_equal(
    nodes: Sequence[RunningNode], whole: Whole, layers: Sequence[int] = (2, 2), network: Network = NETWORK
) -> None:
    """The nodes make the whole model's tokens."""
    async with opened(whole.folder, layers, nodes, network) as chain:
        assert (await answer(chain, PROMPT, 6)).tokens == whole.tokens(PROMPT, 6)


MODELS: dict[str, dict[str, Any]] = {
    "one file": {},
    "quantised": {"quantize": {"group_size": 32, "bits": 4}},
    "quantised, tied, several files": {"quantize": {"group_size": 32, "bits": 8}, "tied": True, "num_files": 4},
}


@pytest.mark.parametrize("kind", MODELS)
async def test_workers_without_the_model_make_the_same_tokens(models: Models, kind: str, lacking: Lacking) -> None:
    async with lacking(2) as nodes:
        await assert_equal(nodes, models("qwen3", **MODELS[kind]), (1, 1, 2))


async def test_experts_in_tensors_of_their_own_make_the_same_tokens(tmp_path: Path, lacking: Lacking) -> None:
    whole = Whole(write_layout(tmp_path / "model", PUBLISHED["Qwen3-235B"]))
    async with lacking(1) as nodes:
        await assert_equal(nodes, whole, (2, 1))


async def test_over_encrypted_links_too(models: Models, lacking: Lacking, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with lacking(1, network_of=certificates.network) as nodes:
        await assert_equal(nodes, models("qwen3"), network=certificates.coordinator())


async def test_what_was_sent_stays_for_a_new_process(models: Models, lacking: Lacking, taken: list[int]) -> None:
    whole, out = models("qwen3"), io.StringIO()
    for expected in (size_of(whole.folder, 2, 4), 0):
        taken.clear()
        async with lacking(1, out=out) as nodes:
            await assert_equal(nodes, whole)
        assert sum(taken) == expected
    shard = rf"layers \[2, 4\) of {re.escape(str(whole.folder))}"
    assert re.match(
        r"worker node-1: lacks weights and waits for them: is asked for the model .*\n"
        rf"worker node-1: was sent \d\.\d MiB of {shard} in \d+\.\d s\n",
        out.getvalue(),
    )
    assert out.getvalue().count("was sent") == 1


async def test_another_split_is_sent_only_the_new_layers(models: Models, lacking: Lacking, taken: list[int]) -> None:
    whole = models("qwen3", tied=True)
    async with lacking(1) as nodes:
        await assert_equal(nodes, whole, (3, 1))
        for split, new in [((1, 3), (1, 3)), ((2, 2), (2, 2))]:
            taken.clear()
            await assert_equal(nodes, whole, split)
            assert sum(taken) == size_of(whole.folder, *new, with_files=False)


async def test_a_fine_tune_is_not_taken_for_its_model(whole: Whole, lacking: Lacking, tmp_path: Path) -> None:
    """All but the weights are alike; and the first one's layers are still there when it is asked for again."""
    copy = Path(shutil.copytree(whole.folder, tmp_path / "copy"))
    tune(copy, "model.safetensors")
    tuned = Whole(copy)
    async with lacking(1) as nodes:
        for each in (whole, tuned, whole):
            await assert_equal(nodes, each)


async def test_a_changed_layer_is_sent_anew(models: Models, tmp_path: Path, lacking: Lacking, taken: list[int]) -> None:
    """Marks are of some bytes of each tensor; the received ones are compared by all of them."""
    whole = models("qwen3", config=LARGE)
    folder = Path(shutil.copytree(whole.folder, tmp_path / "model"))
    checkpoint = open_folder(folder)
    [changed] = pieces_of(checkpoint, 2, 3)
    async with lacking(1) as nodes:
        await assert_equal(nodes, whole, (1, 3))
        overwrite(folder, "model.layers.2.mlp.down_proj.weight", num_bytes=2000)
        assert contents_of(open_folder(folder)).marks == contents_of(checkpoint).marks
        taken.clear()
        await assert_equal(nodes, Whole(folder), (1, 3))
    assert sum(taken) == changed.nbytes


async def test_a_worker_loads_nothing_of_files_that_were_changed_since_its_coordinator_opened_them(
    models: Models, lacking: Lacking, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models("qwen3").folder, tmp_path / "model"))
    wanted, checkpoint = full_request(folder, 2, 4), open_folder(folder)
    overwrite(folder, "model.layers.2.mlp.down_proj.weight", num_bytes=2000)
    async with lacking(1) as [node], node.reached() as peer:
        with pytest.raises(ModelError, match="was changed"):
            await load_pushing(peer, wanted, checkpoint, lambda report: None, feeds=True)
        assert node.service.worker.shard is None


def overwrite(folder: Path, name: str, num_bytes: int) -> None:
    """The first bytes of a tensor."""
    info = open_folder(folder).tensors[name]
    with (folder / info.file).open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little") + info.begin)
        file.write(b"\x11" * num_bytes)


async def test_a_damaged_layer_is_resent(models: Models, lacking: Lacking, store_of: StoreOf, taken: list[int]) -> None:
    whole = models("qwen3", config=LARGE)
    [piece] = pieces_of(open_folder(whole.folder), 2, 3)
    for damage in ("", "bytes", "length", "header"):
        taken.clear()
        if damage:
            [kept] = store_of("node-1").folder.rglob("00002-*.safetensors")
            harm(kept, damage)
        async with lacking(1) as nodes:
            await assert_equal(nodes, whole, (1, 3))
        assert not damage or sum(taken) == piece.nbytes, damage


def harm(path: Path, damage: str) -> None:
    """Bytes by somebody who writes to it; the others by the disk, so that nothing tells of it but they themselves."""
    written = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(0 if damage == "header" else 100_000)
        if damage == "length":
            file.truncate(200_000)
        else:
            file.write(b"\x11" * 16)
    if damage != "bytes":
        os.utime(path, ns=(written, written))


async def test_only_a_worker_whose_own_model_is_another_is_sent_the_one_that_is_asked_for(
    models: Models, whole: Whole, store_of: StoreOf, taken: list[int]
) -> None:
    for own in (whole, models("llama")):
        async with serving(1, own.folder, store_of=store_of) as nodes:
            await assert_equal(nodes, whole)
        assert bool(taken) == store_of("node-1").folder.exists() == (own is not whole)


class Nowhere(ModelSources):
    """A node on another machine than this one, whose hub cache it does not see."""

    def candidates(self, wanted: str, known: Headers) -> list[Opening]:
        return []


async def test_what_the_coordinator_has_on_the_hub_it_downloads_once_and_sends(
    hub: Hub, asking: Ask, folder: Path, store_of: StoreOf, tmp_path: Path
) -> None:
    phases: list[str] = []
    with asking(hub.endpoint, tmp_path / "hub"):
        checkpoint = open_repository("brigade/tiny")
        assert not (checkpoint.folder / THIRD).exists()
        spec, contents = describe(checkpoint), contents_of(open_folder(folder))
        wanted = LoadRequest(
            model=checkpoint.name, fingerprint=checkpoint.fingerprint, start=1, end=spec.num_layers,
            num_layers=spec.num_layers, dtype=spec.dtype, contents=contents,
        )  # fmt: skip
        async with serving(1, Nowhere(), store_of=store_of) as [node], node.reached() as peer:
            await load_pushing(peer, wanted, checkpoint, lambda report: phases.append(report.phase), feeds=True)
    assert (checkpoint.folder / THIRD).exists()
    assert [phase for phase, _ in groupby(phases)] == ["download", "feed", "load"]


# Cuts


async def test_after_a_cut_what_came_is_not_sent_again_though_the_worker_is_not_found_for_a_moment(
    models: Models, lacking: Lacking, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name may have gone with its cable."""
    monkeypatch.setattr(feed_module, "PAUSE_S", 0.01)
    folder, hello = models("qwen3", config=LARGE).folder, Peer.hello
    wanted, cuts, refusals = full_request(folder, 1, 4), [2 << 20, 4 << 20], [StageLost("not found")] * 3
    async with lacking(1) as [node], Proxy(node.address).serving() as proxy:
        proxy.there.bytes_per_s = 40e6

        async def lost_at_first(peer: Peer, within_s: float | None = None) -> HelloReply:
            if refusals and not cuts:
                raise refusals.pop()
            return await hello(peer, within_s)

        def cut(report: LoadProgress) -> None:
            if cuts and report.done > cuts[0]:
                del cuts[0]
                proxy.reset()

        monkeypatch.setattr(Peer, "hello", lost_at_first)
        async with node.reached(address=proxy.address) as peer:
            await push_weights(peer, wanted, open_folder(folder), cut)
            await peer.load(wanted, lambda report: None)
    assert not cuts and not refusals and sum(taken) == size_of(folder, 1, 4)


async def test_what_one_process_received_the_next_completes(models: Models, lacking: Lacking, taken: list[int]) -> None:
    folder = models("qwen3", config=LARGE).folder
    wanted, size = full_request(folder, 1, 4), size_of(folder, 1, 4)
    async with lacking(1) as [node], node.reached() as peer:
        feeding = asyncio.create_task(fed(node, wanted, folder))
        await until(lambda: sum(taken) > 2 << 20)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        with pytest.raises(ModelLacking):
            await peer.load(wanted, lambda report: None)
    assert sum(taken) < size
    async with lacking(1) as [node]:
        await fed(node, wanted, folder)
    assert sum(taken) == size


@pytest.mark.parametrize("had_come", ["some of it", "all of it"])
async def test_what_is_damaged_in_an_unfinished_layer_is_sent_again(
    models: Models, lacking: Lacking, store_of: StoreOf, taken: list[int], had_come: str
) -> None:
    """A power failure may leave zeros at the end of a file."""
    folder = models("qwen3", config=LARGE).folder
    wanted, kept = full_request(folder, 1, 4), store_of("node-1").folder
    async with lacking(1) as [node]:
        feeding = asyncio.create_task(fed(node, wanted, folder))
        if had_come == "some of it":
            await until(lambda: sum(taken) > 2 << 20)
            feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
    for finished in kept.rglob("*.safetensors"):
        if had_come == "all of it":
            finished.rename(finished.with_suffix(".part"))
    for unfinished in kept.rglob("*.part"):
        half = unfinished.stat().st_size // 2
        unfinished.write_bytes(unfinished.read_bytes()[:half] + bytes(half))
    async with lacking(1) as [node]:
        await fed_and_loaded(node, wanted, folder)
        await assert_equal([node], models("qwen3", config=LARGE), (1, 3))


async def test_what_another_worker_of_its_machine_receives_a_worker_reports_and_is_not_sent(
    models: Models, lacking: Lacking, store_of: StoreOf, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding_module, "ASK_AGAIN_S", 0.01)
    folder, reports = models("qwen3").folder, list[LoadProgress]()
    wanted, checkpoint = full_request(folder, 1, 4), open_folder(folder)
    first, *_ = pieces_of(checkpoint, 1, 4)
    source = SourceFile.of_piece(checkpoint, first)
    digest, blocks = source.digest(threading.Event()), list(source.blocks(0, 1 << 14))
    # what another process of that machine does
    other = store_of("node-1").begin_piece(checkpoint.fingerprint, first, digest)
    assert isinstance(other, PartialFile)
    async with lacking(1) as [node], node.reached() as peer:
        loading = asyncio.create_task(load_pushing(peer, wanted, checkpoint, reports.append, feeds=True))
        await until(lambda: any(report.phase == "shared" for report in reports))
        other.write(blocks[:-1])
        await until(lambda: reports[-1].done >= other.offset)
        other.close()
        await loading
    shared = [report for report in reports if report.phase == "shared"]
    assert [report.done for report in shared] == sorted(report.done for report in shared)
    assert {report.total for report in shared} == {size_of(folder, 1, 4)}
    assert sum(taken) == size_of(folder, 1, 4) - sum(map(len, blocks[:-1]))


# Refusals


async def test_a_worker_that_takes_none_refuses_as_before(models: Models) -> None:
    folder = models("qwen3").folder
    async with serving(1, NOTHING) as [node]:
        with pytest.raises(
            ModelError, match=r"^worker node-1: is asked for the model .* has no model of its own"
        ) as got:
            async with opened(folder, (2, 2), [node]):
                pytest.fail("the chain opened")
        assert not isinstance(got.value, ModelLacking)
        with pytest.raises(ModelError, match=r"^worker node-1: takes no model from a coordinator: `pull`"):
            await fed(node, full_request(folder, 2, 4), folder)


async def test_a_coordinator_sends_none_where_its_file_says_so_and_says_what_its_worker_lacks(
    models: Models, lacking: Lacking, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models("qwen3").folder
    monkeypatch.setattr(survey_module, "is_worth_measuring", lambda peers: True)
    async with lacking(1) as [node], node.reached() as peer:
        with pytest.raises(ModelLacking, match=r"^worker node-1: is asked for .*; this node does not send it: `pull`"):
            await load_pushing(peer, full_request(folder, 2, 4), open_folder(folder), lambda report: None, feeds=False)
        cluster = ClusterConfig(workers=(WorkerConfig(name=node.name, address=(node.address,)),), pull="none")
        options = ClusterOptions(cluster, str(folder), None, 128)
        with pytest.raises(ModelLacking, match="this node does not send it"):
            await try_cluster(options)
        assert list((await known_speeds(options, open_folder(folder), [peer])).speeds) == ["coordinator"]
    assert not taken


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "make room there"), (errno.EROFS, "let it write there")], ids=str
)
async def test_a_disk_that_takes_no_more_is_told_and_nothing_half_written_is_loaded(
    models: Models, lacking: Lacking, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    folder, write, written = models("qwen3").folder, PartialFile.write, list[int]()

    def fill(receiving: PartialFile, pieces: Sequence[bytes]) -> None:
        written.extend(map(len, pieces))
        if sum(written) > 100_000:
            raise OSError(number, os.strerror(number))
        write(receiving, pieces)

    wanted = full_request(folder, 2, 4)
    async with lacking(1) as [node], node.reached() as peer:
        with (
            monkeypatch.context() as patch,
            pytest.raises(ModelError, match=f"cannot keep what it receives: {os.strerror(number)} .*; {remedy}"),
        ):
            patch.setattr(PartialFile, "write", fill)
            await fed(node, wanted, folder)
        with pytest.raises(ModelLacking):
            await peer.load(wanted, lambda report: None)
        await fed_and_loaded(node, wanted, folder)


async def test_more_than_the_limit_is_refused_unsent(models: Models, tmp_path: Path, taken: list[int]) -> None:
    folder = models("qwen3").folder
    limit = size_of(folder, 2, 4, with_files=False) - 1
    async with serving(1, NOTHING, store_of=lambda name: WeightsCache(tmp_path / "shards", limit)) as [node]:
        with pytest.raises(ModelError, match=r"^worker node-1: has room for .* received layers, needs .* `pull_limit`"):
            await fed(node, full_request(folder, 2, 4), folder)
    assert sum(taken) == size_of(folder, 0, 0)


async def test_room_for_missing_layers_is_not_made_of_those_that_are_asked_for_with_them(
    models: Models, tmp_path: Path
) -> None:
    folder = models("qwen3", config={"num_hidden_layers": 9}).folder
    store = WeightsCache(tmp_path / "shards", size_of(folder, 2, 9))
    async with serving(1, NOTHING, store_of=lambda name: store) as [node]:
        await fed(node, full_request(folder, 4, 9), folder)
        assert await fed(node, full_request(folder, 1, 8), folder) == size_of(folder, 1, 4, with_files=False)


async def test_a_model_makes_room_for_another_only_once_its_chain_has_left(models: Models, tmp_path: Path) -> None:
    first, second = models("qwen3").folder, models("llama").folder
    store = WeightsCache(tmp_path / "shards", size_of(first, 2, 4) + 10_000)

    async def assert_no_room(node: RunningNode) -> set[Path]:
        kept = set(store.folder.rglob("*.safetensors"))
        with pytest.raises(ModelError, match=r"^worker node-1: has room for .* of received layers, needs"):
            await fed(node, full_request(second, 2, 4), second)
        assert set(store.folder.rglob("*.safetensors")) == kept
        return kept

    async with serving(1, NOTHING, store_of=lambda name: store) as [node]:
        wanted = full_request(first, 2, 4)
        wanted.coordinator.id = "who is about to use it"
        async with node.reached() as peer:
            await load_pushing(peer, wanted, open_folder(first), lambda report: None, feeds=True)
        await assert_no_room(node)
        async with opened(first, (2, 2), [node]):
            kept = await assert_no_room(node)
        await node.service.worker.wait_detached()
        await fed(node, full_request(second, 2, 4), second)
    assert len(set(store.folder.rglob("*.safetensors")) - kept) == 3


async def test_a_long_digest_is_announced(models: Models, lacking: Lacking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take the silence for a stall."""
    folder, digest, was_repeated, announced = models("qwen3").folder, SourceFile.digest, threading.Event(), list[str]()

    def make(file: SourceFile, given_up: threading.Event) -> str:
        assert file.announcement.file or was_repeated.wait(60)
        return digest(file, given_up)

    def note(message: bytes) -> Feeding | Chunk:
        read = read_transfer(message)
        if isinstance(read, Feeding) and read.announcement.file:
            if read.announcement.file in announced:
                was_repeated.set()
            announced.append(read.announcement.file)
        return read

    monkeypatch.setattr(feed_module, "DIGEST_S", 0.05)
    monkeypatch.setattr(SourceFile, "digest", make)
    monkeypatch.setattr(feeding_module, "read_transfer", note)
    async with lacking(1) as [node]:
        await fed_and_loaded(node, full_request(folder, 2, 4), folder)


@pytest.mark.parametrize("at", ["digest", "sending"])
async def test_a_disk_that_hangs_ends_the_transfer(
    models: Models, lacking: Lacking, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    folder, digest, blocks, is_over = models("qwen3").folder, SourceFile.digest, SourceFile.blocks, threading.Event()

    def hang_at_digest(file: SourceFile, given_up: threading.Event) -> str:
        assert file.announcement.file or is_over.wait(60)
        return digest(file, given_up)

    def hang_at_sending(file: SourceFile, offset: int, block_bytes: int) -> Iterator[bytes]:
        assert block_bytes != CHUNK_BYTES or is_over.wait(60)  # those that are sent, not those of a digest
        return blocks(file, offset, block_bytes)

    if at == "digest":
        monkeypatch.setattr(feed_module, "DIGEST_S", 0.05)
        monkeypatch.setattr(SourceFile, "digest", hang_at_digest)
    else:
        monkeypatch.setattr(SourceFile, "blocks", hang_at_sending)
    monkeypatch.setattr(feed_module, "DISK_S", 0.1)
    async with lacking(1) as [node]:
        try:
            with pytest.raises(ModelError, match="no byte came from its disk"):
                await fed(node, full_request(folder, 2, 4), folder)
        finally:
            is_over.set()


async def test_a_file_that_is_gone_before_it_is_sent_is_named(
    models: Models, lacking: Lacking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, gone = models("qwen3").folder, tmp_path / "tokenizer.json"
    wanted = full_request(folder, 2, 4)
    monkeypatch.setattr(Checkpoint, "tokenizer_files", lambda checkpoint: [gone])
    async with lacking(1) as [node]:
        with pytest.raises(ModelError, match=f"cannot read {gone}: No such file"):
            await fed(node, wanted, folder)


# Beside other work


async def test_a_worker_takes_layers_in_while_it_serves_sessions(models: Models, store_of: StoreOf) -> None:
    whole, other = models("qwen3"), models("llama").folder
    async with (
        serving(1, whole.folder, store_of=store_of) as [node],
        opened(whole.folder, (2, 2), [node]) as chain,
        Engine(chain) as engine,
    ):
        live = Live(engine, request(tokens_of(9), 60))
        await live.wait_pieces(1)
        assert await fed(node, full_request(other, 1, 4), other) == size_of(other, 1, 4)
        assert (await live.answer()).tokens == whole.tokens(tokens_of(9), 60)


async def test_a_node_without_the_model_measures_itself(
    models: Models, lacking: Lacking, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models("qwen3").folder
    monkeypatch.setattr(survey_module, "is_worth_measuring", lambda peers: True)
    options = ClusterOptions(ClusterConfig(), str(folder), None, 128)
    async with lacking(1) as [node], node.reached() as peer:
        assert (await known_speeds(options, open_folder(folder), [peer])).speeds["node-1"].is_measured
    assert sum(taken) == size_of(folder, 0, 0)
