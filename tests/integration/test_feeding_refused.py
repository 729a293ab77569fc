"""What a coordinator may not do by feeding: whatever it announces and sends, only files of the model get a name."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cluster.peer import Peer
from coordinator.cluster.weights import SourceFile, push_weights
from protos.brigade_pb2 import Announcement, Feeding, Held, LoadRequest
from protos.brigade_pb2_grpc import NodeServicer, NodeStub
from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK, Models, serving
from tests.integration.test_copies import full_request
from tests.unit.fuzz import ODD_INTS, fuzzed
from worker.errors import BrigadeError, ConfigError, FrameError, ModelError
from worker.model.checkpoint import open_folder
from worker.model.headers import pack_headers, unpack_headers
from worker.node import weights_receive as feeding_module
from worker.node.certificates import Role
from worker.node.framing import checksum_of, write_chunk
from worker.node.hop import add_node
from worker.node.log import worker_log
from worker.node.model_sources import ModelSources
from worker.node.rpc_errors import error_of
from worker.node.weights_cache import PartialFile, WeightsCache, pieces_of
from worker.node.weights_receive import receive_weights

CONTENT = b'{"a": 1}'


def digest_of(content: bytes) -> str:
    return blake3(content).hexdigest()


def file(name: str, content: bytes = CONTENT, **other: Any) -> list[Feeding]:
    """A file, announced and sent."""
    said = {"size": len(content), "digest": digest_of(content)} | other
    return [Feeding(announcement=Announcement(file=name, **said)), *data(content)]


def data(content: bytes, at: int = 0) -> list[Feeding]:
    return [Feeding(data=content, checksum=checksum_of([content], at))]


@pytest.fixture
def store(tmp_path: Path) -> WeightsCache:
    return WeightsCache(tmp_path / "shards")


@pytest.fixture
def wanted(folder: Path) -> LoadRequest:
    return full_request(folder, 2, 4)


@pytest.fixture
def sound(folder: Path, wanted: LoadRequest) -> list[Feeding]:
    """All that an honest coordinator says."""
    checkpoint = open_folder(folder)
    said = [Feeding(model=wanted), *file("config.json", (checkpoint.folder / "config.json").read_bytes())]
    for piece in pieces_of(checkpoint, 2, 4):
        origin = SourceFile.of_piece(checkpoint, piece)
        digest = origin.digest(asyncio.Event())  # type: ignore[arg-type]
        said.append(Feeding(announcement=Announcement(place=piece.place, size=piece.nbytes, digest=digest)))
        at = 0
        for block in origin.blocks(0, 1 << 14):
            said += data(block, at)
            at += len(block)
    return said


def written(message: Feeding) -> bytes:
    """As a coordinator writes it."""
    if message.WhichOneof("what") != "data":
        return message.SerializeToString()
    chunk = write_chunk([message.data], None)
    return chunk + (b"\x25" + message.checksum.to_bytes(4, "little") if message.checksum else b"")


def receiving(
    store: WeightsCache, first: Feeding, others: AsyncIterator[bytes]
) -> contextlib.aclosing[AsyncGenerator[Held, None]]:
    return contextlib.aclosing(
        receive_weights(store, written(first), others, worker_log("mini", None), has_checksums=True)
    )


async def say(store: WeightsCache, messages: Sequence[Feeding]) -> None:
    """Have a worker hear these messages. Raises what it refuses with."""

    async def sent() -> AsyncIterator[bytes]:
        for message in messages[1:]:
            yield written(message)

    async with receiving(store, messages[0], sent()) as held:
        _ = [each async for each in held]


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


async def test_a_coordinator_that_falls_silent_is_not_waited_for(
    store: WeightsCache, wanted: LoadRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding_module, "SILENT_S", 0.05)
    monkeypatch.setattr(feeding_module, "ENDED_S", 0.05)

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with receiving(store, Feeding(model=wanted), nothing()) as held:
        with pytest.raises(FrameError, match="expected weights, got nothing for"):
            _ = [each async for each in held]


async def test_a_file_that_is_not_of_the_model_stays_only_until_the_next_transfer(
    store: WeightsCache, sound: list[Feeding]
) -> None:
    with pytest.raises(ModelError, match="tokenizer files"):
        await say(store, [*sound[:3], *file("vocab.json"), *sound[3:]])
    assert [kept.name for kept in store.kept()] == [sound[0].model.model]
    await say(store, [*sound[:2], *sound[3:]])  # its config.json is here
    assert "vocab.json" not in files_in(store.folder) and len(store.kept()[0].places) == 3


async def test_what_a_disk_did_not_take_leaves_no_gap(
    store: WeightsCache, sound: list[Feeding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a moment: the next transfer goes on where this one got to."""
    calls, write = count(1), PartialFile.write

    def write_or_fail(partial: PartialFile, blocks: Sequence[bytes]) -> None:
        if next(calls) == 6:  # within the second piece
            write(partial, [blocks[0][:100]])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(partial, blocks)

    monkeypatch.setattr(feeding_module, "BATCH_BYTES", 1 << 14)
    monkeypatch.setattr(PartialFile, "write", write_or_fail)
    with pytest.raises(ModelError, match="cannot keep what it receives: No space"):
        await say(store, sound)
    [unfinished] = store.folder.rglob("*.part")
    left, other = unfinished.read_bytes(), WeightsCache(store.folder.with_name("other"))
    await say(other, sound)
    [whole] = other.folder.rglob(f"{unfinished.name.partition('-')[0]}*.safetensors")
    assert left and whole.read_bytes().startswith(left)


async def test_a_small_file_of_the_same_size_is_sent_anew(store: WeightsCache, wanted: LoadRequest) -> None:
    """Two coordinators' config.json may say the same in another order."""
    for content in (b'{"a": 1}', b'{ "a":1}'):
        await say(store, [Feeding(model=wanted), *file("config.json", content)])
        [found] = store.folder.rglob("config.json")
        assert found.read_bytes() == content


async def test_what_is_here_already_is_held_until_the_call_is_over(store: WeightsCache, sound: list[Feeding]) -> None:
    await say(store, sound)
    is_tried = asyncio.Event()

    async def sent() -> AsyncIterator[bytes]:
        yield written(sound[1])
        await is_tried.wait()

    async with receiving(store, sound[0], sent()) as held:
        assert [(await anext(held)).bytes, (await anext(held)).bytes] == [0, sound[1].announcement.size]
        [kept] = store.kept()
        assert not store.remove(kept.key) and "config.json" in files_in(store.folder)
        is_tried.set()
        assert not [each async for each in held]
    assert store.remove(kept.key) and not files_in(store.folder)


@pytest.mark.parametrize(
    "name",
    [
        "../config.json", "/etc/passwd", "a/config.json", "", ".", "..", "config.json\0", "model.safetensors", "x.py",
        "tokenizer.py", "tokenizer/../../x.json", "tokenizer\n.json", ".config.json", "model.safetensors.index.json",
        "tokenizer" + "x" * 200 + ".json", "called", "tokenizer_é.json",
    ],
)  # fmt: skip
async def test_only_files_of_a_configuration_and_a_tokenizer_have_names(
    store: WeightsCache, wanted: LoadRequest, name: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"expected config\.json or a file of a tokenizer"):
        await say(store, [Feeding(model=wanted), *file(name)])
    assert not files_in(tmp_path)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (file("config.json", size=1 << 25), "expected config.json or a file of a tokenizer"),
        (file("config.json", size=3), "expected some of at most 3 more bytes of a file, got 8"),
        (file("config.json", size=9), "expected 1 more bytes, got the end"),
        (file("config.json", digest="../../x"), "expected a digest in hex"),
        (file("config.json", digest=""), "expected a digest in hex"),
        (file("config.json", digest=digest_of(b"other")), "expected config.json with the digest .* got one with"),
        ([file("config.json", size=9)[0], *file("config.json")], "expected 9 more bytes, got the next file"),
        ([*file("config.json"), *data(b"more")], "expected some of at most 0 more bytes"),
        (data(b"first"), "expected some of at most 0 more bytes"),
        ([*file("config.json", size=9), *data(b"")], "expected some of at most 1 more bytes of a file, got 0"),
        ([*file("config.json", size=9), *data(b"x", 7)], "got 1 with a wrong checksum"),
        ([file("config.json")[0], Feeding(data=CONTENT)], "got 8 with a wrong checksum"),
        ([Feeding()], "expected an announcement or data"),
        ([Feeding(model=LoadRequest())], "expected an announcement or data"),
        ([Feeding(announcement=Announcement(place=2, size=1, digest="0" * 64))], "no config.json"),
        ([Feeding(announcement=Announcement())], "no config.json"),
        ([part for n in range(33) for part in file(f"vocab{n}.json")], "expected at most 32 files"),
    ],
)
async def test_what_is_not_in_order_is_refused(
    store: WeightsCache, wanted: LoadRequest, messages: list[Feeding], said: str
) -> None:
    with pytest.raises((FrameError, ModelError), match=said):
        await say(store, [Feeding(model=wanted), *messages])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"place": 0}, r"expected one of \[-2, 2, 3\], got piece 0"),
        ({"place": -1}, r"expected one of \[-2, 2, 3\], got piece -1"),
        ({"size": 1 << 60}, r"expected \d+ bytes of it, got piece -2 of 1152921504606846976 bytes"),
        ({"size": 0}, r"expected \d+ bytes of it, got piece -2 of 0 bytes"),
        ({"digest": "f" * 63}, "expected a digest in hex"),
        ({"digest": "f" * 64}, "expected back-f*.safetensors with the digest f*, got one with"),
    ],
)
async def test_a_piece_is_of_the_size_and_place_that_the_headers_say(
    store: WeightsCache, sound: list[Feeding], fields: dict[str, Any], said: str
) -> None:
    announcement = next(m.announcement for m in sound if m.announcement.WhichOneof("what") == "place")
    for name, value in fields.items():
        setattr(announcement, name, value)
    with pytest.raises((FrameError, ModelError), match=said):
        await say(store, sound)
    assert not [name for name in files_in(store.folder) if name.endswith(".safetensors")]


async def test_a_chunk_that_was_changed_on_its_way_is_not_written(store: WeightsCache, sound: list[Feeding]) -> None:
    sent = b"".join(message.data for message in sound)
    victim = [message for message in sound if len(message.data) > 1000][3]
    victim.data = victim.data[:500] + bytes([victim.data[500] ^ 4]) + victim.data[501:]
    with pytest.raises(FrameError, match="expected bytes as they were sent"):
        await say(store, sound)
    [part] = store.folder.rglob("*.part")
    header = next(piece.header for piece in pieces_of(open_folder(Path(sound[0].model.model)), 2, 3))
    assert part.name.startswith("00002-") and len(part.read_bytes()) > len(header)
    assert part.read_bytes()[len(header) :] in sent


async def test_headers_of_another_fingerprint_make_no_piece(store: WeightsCache, sound: list[Feeding]) -> None:
    known = unpack_headers(sound[0].model.contents.headers)
    known["model.norm.weight"] = known["lm_head.weight"]
    sound[0].model.contents.headers = pack_headers(known)
    with pytest.raises(ModelError, match=r"tensor headers of .* differ"):
        await say(store, sound)


MESSAGES = st.one_of(
    st.builds(lambda content, at: data(content, at), st.binary(max_size=20), st.sampled_from([0, 0, 0, 8])),
    st.builds(
        lambda name, size, digest, content: [
            Feeding(announcement=Announcement(file=name, size=size % 2**64, digest=digest)), *data(content)
        ],
        st.sampled_from(["config.json", "tokenizer.json", "../x", "vocab.txt", "merges.txt"]),
        st.sampled_from([len(CONTENT), 0]) | ODD_INTS,
        st.sampled_from([digest_of(CONTENT), digest_of(b""), "../x"]),
        st.sampled_from([CONTENT, b"", b"other"]),
    ),
    st.builds(
        lambda place, size: [Feeding(announcement=Announcement(place=place, size=size % 2**64, digest="0" * 64))],
        st.sampled_from([-3, -2, -1, 0, 2, 2**31 - 1]),
        ODD_INTS,
    ),
)  # fmt: skip


def test_fuzzed_messages_leave_only_right_files(models: Models, tmp_path_factory: pytest.TempPathFactory) -> None:
    wanted = Feeding(model=full_request(models("qwen3").folder, 2, 4))

    @fuzzed(20)
    @given(st.lists(MESSAGES, max_size=5))
    def check(parts: list[list[Feeding]]) -> None:
        folder = tmp_path_factory.mktemp("store")
        with contextlib.suppress(BrigadeError), asyncio.Runner() as runner:
            runner.run(say(WeightsCache(folder / "shards"), [wanted, *(m for part in parts for m in part)]))
        whole = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".part"]
        assert {path.name for path in whole} <= {"config.json", "tokenizer.json", "vocab.txt", "merges.txt"}
        assert all(digest_of(path.read_bytes()) in (digest_of(CONTENT), digest_of(b"")) for path in whole)

    check()


class Liar(NodeServicer):
    """Says what it has of each file as it likes."""

    def __init__(self, replies: list[int]) -> None:
        self._replies = replies

    async def Feed(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Held]:
        for reply in self._replies:
            yield Held(bytes=reply)
        async for _ in messages:
            pass


@pytest.mark.parametrize("replies", [[0, 2**63], [0, 5, 4], [0, 0, 2**40]], ids=str)
async def test_a_worker_that_has_more_than_there_is_or_less_than_before_is_refused(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replies: list[int]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, server = models("qwen3").folder, NETWORK.server()
    add_node(Liar(replies), server)
    peer = Peer("node-1", [f"127.0.0.1:{NETWORK.listen(server, '127.0.0.1:0')}"], NETWORK)
    await server.start()
    try:
        with pytest.raises(FrameError, match=r"^worker node-1: expected it to have \d+ to \d+ bytes of a file"):
            await push_weights(peer, full_request(folder, 2, 4), open_folder(folder), lambda report: None)
    finally:
        await peer.close()
        await server.stop(None)


async def test_a_worker_s_certificate_may_not_send_weights(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with (
        serving(
            1, ModelSources(), network_of=certificates.network, store_of=lambda name: WeightsCache(tmp_path / "s")
        ) as [node],
        certificates.network("node-2", Role.WORKER).channel("node-1", node.address) as channel,
    ):
        call = NodeStub(channel).Feed()  # nothing is written: the refusal waits for no message
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
    error = error_of(caught.value, "node-1")
    assert isinstance(error, ConfigError) and "expected a certificate with the role" in str(error)
    assert not (tmp_path / "s").exists()
