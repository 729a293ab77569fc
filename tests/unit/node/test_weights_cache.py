"""The weights cache: what is evicted and what never, what is found again, and which files have a name."""

import errno
import gc
import os
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest
from blake3 import blake3

from coordinator.cluster.weights import DigestCache, SourceFile
from protos.brigade_pb2 import Fingerprint
from tests.tiny import make_model
from worker.errors import FrameError, ModelError
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.describe import shard_tensors
from worker.node import weights_cache as cache_module
from worker.node.weights_cache import (
    Lease,
    PartialFile,
    Piece,
    WeightsCache,
    is_used,
    open_alone,
    pieces_of,
    place_name,
    place_of,
    remove_unused,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_folder(make_model(tmp_path_factory.mktemp("model") / "qwen3", num_files=3))


@dataclass
class Receiver:
    """A cache that receives pieces of one model, whose layers have the same size."""

    store: WeightsCache
    checkpoint: Checkpoint
    limit: int = 0  # of the store

    def piece(self, place: int) -> Piece:
        [piece] = (each for each in pieces_of(self.checkpoint, 0, 4) if each.place == place)
        return piece

    def blocks(self, place: int, start: int = 0) -> list[bytes | memoryview]:
        return list(SourceFile.of_piece(self.checkpoint, self.piece(place)).blocks(start, 1000))

    def begin(self, place: int) -> PartialFile | Path | None:
        piece = self.piece(place)
        digest = SourceFile.of_piece(self.checkpoint, piece).digest(threading.Event())
        return self.store.begin_piece(self.checkpoint.fingerprint, piece, digest)

    def partial(self, place: int) -> PartialFile:
        found = self.begin(place)
        assert isinstance(found, PartialFile)
        return found

    def receive(self, place: int) -> Path:
        """Receive what is missing of a piece; return its path."""
        found = self.begin(place)
        if isinstance(found, PartialFile):
            found.write(self.blocks(place, found.offset))
            found.finish()
            return found.path
        assert found
        return found

    def open(self, *paths: Path) -> Checkpoint:
        """What was received of the model: these pieces, whose names tell place and digest."""
        shutil.copy(self.checkpoint.folder / "config.json", paths[0].parent)
        digests = {place_of(place): digest for place, digest in (path.stem.split("-") for path in paths)}
        return self.store.open("x", self.checkpoint.fingerprint, self.checkpoint.tensors, digests)


@pytest.fixture
def cache(tmp_path: Path, checkpoint: Checkpoint) -> Receiver:
    return Receiver(WeightsCache(tmp_path / "shards"), checkpoint)


@pytest.fixture
def small(cache: Receiver, tmp_path: Path) -> Receiver:
    """A cache with room for two layers."""
    size = len(cache.piece(0).header) + cache.piece(0).nbytes
    limit = 2 * size + 2000  # with a config.json
    return Receiver(WeightsCache(tmp_path / "shards", limit), cache.checkpoint, limit)


def age(path: Path, days: int) -> None:
    used = path.stat()
    os.utime(path, (used.st_atime - 86400 * days, used.st_mtime))


def test_a_received_piece_is_a_safetensors_file_of_these_tensors(cache: Receiver, checkpoint: Checkpoint) -> None:
    whole = {name: array for file in checkpoint.folder.glob("*.safetensors") for name, array in mx.load(file).items()}
    for piece in pieces_of(checkpoint, 0, 4):
        path = cache.receive(piece.place)
        found = mx.load(str(path))
        assert found.keys() == piece.tensors.keys()
        assert all(mx.array_equal(found[name], whole[name]) for name in found)
        assert path.name.startswith(place_name(piece.place) + "-")
    assert all(place_of(place_name(place)) == place for place in (-2, -1, 0, 7, 99_999, 100_000))
    for start, end in [(0, 4), (1, 3), (3, 4)]:
        names = [name for piece in pieces_of(checkpoint, start, end) for name in piece.order]
        assert sorted(names) == sorted(shard_tensors(checkpoint, start, end))


def test_a_file_has_its_name_only_once_it_is_whole_and_right(cache: Receiver) -> None:
    first, *rest = cache.blocks(2)
    for is_right in (False, True):
        found = cache.partial(2)
        found.write([first])
        found.close()
        again = cache.partial(2)
        assert again.offset == len(first)
        again.write(rest if is_right else [b"x" * len(rest[0]), *rest[1:]])
        assert not list(cache.store.folder.rglob("*.safetensors"))
        with nullcontext() if is_right else pytest.raises(FrameError, match="with the digest"):
            again.finish()
        left = [path.suffix for path in cache.store.folder.rglob("*") if path.is_file()]
        assert left == ([".safetensors"] if is_right else [])


def test_a_partial_file_goes_on_where_it_was_verified(cache: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender would take a long silence for a stall."""
    found = cache.partial(2)
    found.write(cache.blocks(2)[:9])
    found.close()
    monkeypatch.setattr(cache_module, "REREAD_S", 0.0)
    monkeypatch.setattr(cache_module, "READ_BYTES", 2000)
    again = cache.partial(2)
    assert again.offset == 2000
    again.close()
    path = cache.receive(2)
    assert cache.begin(2) == path


def test_what_a_power_failure_left_longer_than_the_file_is_begun_anew(cache: Receiver) -> None:
    cache.partial(2).close()
    [part] = cache.store.folder.rglob("*.part")
    for content in (part.read_bytes() + bytes(cache.piece(2).nbytes + 1), bytes(20), cache.piece(2).header[:5]):
        part.write_bytes(content)
        again = cache.partial(2)
        assert again.offset == 0
        again.close()
        assert part.read_bytes() == cache.piece(2).header


@pytest.mark.parametrize("failing", [(PartialFile, "__init__"), (WeightsCache, "make_room")], ids=["disk", "room"])
def test_a_failed_file_is_not_held(cache: Receiver, monkeypatch: pytest.MonkeyPatch, failing: tuple[type, str]) -> None:
    """Its descriptor is closed once: the number may be another file's by then."""
    digest = blake3(b"{}").hexdigest()
    model = Fingerprint(config=digest, tokenizer=digest, tensors=digest)

    def fail(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*failing, fail)
        with pytest.raises(OSError, match="No space left") as raised:
            cache.store.begin_file(model, "config.json", 2, digest)
    number = os.open(ROOT, os.O_RDONLY)  # the lowest that is free: the same again
    del raised  # what the frames of the failure held ends with them
    gc.collect()
    found = cache.store.begin_file(model, "config.json", 2, digest)
    assert isinstance(found, PartialFile) and os.fstat(number)
    found.close()
    os.close(number)


def test_a_file_that_was_just_finished_is_not_begun_anew(cache: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had no name yet when this one looked for it, and its lock is free when this one takes it."""

    def open_late(path: Path) -> int | None:
        monkeypatch.undo()
        first = cache.partial(2)
        assert cache.begin(2) is None, "the first one holds it"
        first.write(cache.blocks(2))
        first.finish()
        return open_alone(path)

    monkeypatch.setattr(cache_module, "open_alone", open_late)
    assert cache.begin(2) is None
    found = cache.begin(2)
    assert isinstance(found, Path) and list(found.parent.iterdir()) == [found]


def test_the_least_recently_used_is_evicted_first_and_only_as_much_as_is_needed(small: Receiver) -> None:
    first, second = (small.receive(layer) for layer in (0, 1))
    age(first, 2)
    age(second, 3)
    small.receive(0)  # it is there: used now
    third = small.receive(2)
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)


def test_files_that_are_received_at_once_share_the_room(small: Receiver) -> None:
    first, second = small.partial(0), small.partial(1)
    with pytest.raises(ModelError, match="has room for"):
        small.begin(2)
    first.close()
    third = small.partial(2)
    for layer, file in ((1, second), (2, third)):
        file.write(small.blocks(layer))
        file.finish()
    assert sum(path.stat().st_size for path in small.store.folder.rglob("*") if path.is_file()) <= small.limit


def test_a_file_in_use_is_never_removed(small: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (small.receive(layer) for layer in (1, 2))
    age(first, 2)
    here = small.open(first, second)
    lease = small.store.lease(here, shard_tensors(here, 1, 2))
    assert first.stat().st_atime > second.stat().st_atime, "it is used now"
    age(first, 3)
    third = small.receive(3)
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)
    other = small.store.lease(here, shard_tensors(here, 1, 2))
    with pytest.raises(ModelError, match=r"removed just now"), monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "files_of", lambda *_: [first.name, second.name])  # in this order
        small.store.lease(here, shard_tensors(here, 1, 3))
    lease.close()
    [model] = small.store.kept()
    assert is_used(first) and not small.store.remove(model.key) and first.exists()
    other.close()
    assert small.store.remove(model.key) and not small.store.kept()
    elsewhere = small.store.lease(small.checkpoint, small.checkpoint.tensors)
    assert not any(map(is_used, small.checkpoint.folder.iterdir())), "a file outside the cache is not held"
    elsewhere.close()


def test_files_that_another_user_received_are_used_and_never_removed(
    small: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (small.receive(layer) for layer in (1, 2))
    here = small.open(first, second)

    def refuse(*given: object, **more: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    for owner, name in ((os, "utime"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, refuse)
    small.store.lease(here, shard_tensors(here, 1, 3)).close()
    [model] = small.store.kept()
    assert not small.store.remove(model.key) and first.exists() and not is_used(first)
    with pytest.raises(ModelError, match="has room for"):
        small.store.make_room(1 << 20)
    monkeypatch.setattr(os, "open", refuse)  # its user alone may read it
    assert not is_used(first) and not remove_unused(first)


def test_a_file_that_another_process_uses_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    code = (
        "import sys; from pathlib import Path; from worker.node.weights_cache import Lease\n"
        "lease = Lease(); lease.add(Path(sys.argv[1])); print(1, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin and other.stdout and other.stdout.readline()
        assert is_used(path) and not remove_unused(path)
        lease = Lease()
        assert lease.add(path)  # which is shared
        lease.close()
        other.stdin.close()
        other.wait(10)
    assert not is_used(path) and remove_unused(path)


def test_a_file_that_replaces_a_held_one_is_held(tmp_path: Path) -> None:
    path, other, lease = tmp_path / "file", tmp_path / "other", Lease()
    path.touch()
    other.touch()
    assert lease.add(path)
    other.replace(path)
    assert not is_used(path) and lease.add(path) and is_used(path)
    lease.close()
    assert remove_unused(path) and not lease.add(path)


def test_a_piece_that_comes_while_its_model_is_removed_stays(cache: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.receive(1)
    begun: list[PartialFile] = []

    def remove(path: Path) -> bool:
        is_gone = remove_unused(path)
        if not begun:
            begun.append(cache.partial(2))
        return is_gone

    monkeypatch.setattr(cache_module, "remove_unused", remove)
    assert not cache.store.remove(cache.store.kept()[0].key)
    begun[0].write(cache.blocks(2))
    begun[0].finish()
    assert list(cache.store.folder.rglob("*.safetensors")) == [begun[0].path]
    assert cache.store.remove(cache.store.kept()[0].key) and not cache.store.kept()


def test_a_tenth_of_the_disk_stays_free(cache: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = shutil.disk_usage(ROOT)
    cache.store.folder.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(total=1000, free=150))
    cache.store.make_room(50)
    with pytest.raises(ModelError, match="its disk is nearly full; make room there"):
        cache.store.make_room(51)


def test_of_two_fine_tunes_the_right_one_is_opened(cache: Receiver, checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = open_folder(make_model(tmp_path / "other", num_files=3, seed=1))
    assert other.fingerprint == checkpoint.fingerprint
    for each in (checkpoint, other, checkpoint):
        receiver = Receiver(cache.store, each)
        path = receiver.receive(2)
        found = receiver.open(path)
        assert found.tensors["model.layers.2.self_attn.q_proj.weight"].file == path.name
        assert found.fingerprint == each.fingerprint and path.name in [file for file, *_ in found.opened]


def test_a_fingerprint_is_no_way_out_of_the_folder_and_files_of_another_model_are_refused(cache: Receiver) -> None:
    path = cache.receive(2)
    digests = {2: path.stem.split("-")[1]}
    known = {name: info for name, info in cache.checkpoint.tensors.items() if "layers.2" not in name}
    with pytest.raises(ModelError, match="does not belong to this model; remove it by `brigade cache rm`"):
        cache.store.open("x", cache.checkpoint.fingerprint, known, digests)
    zeros = "0" * 64
    for config, digests in (("../..", {}), (zeros, {2: "../00002-x"})):
        with pytest.raises(ModelError, match="expected a digest in hex"):
            cache.store.open("x", Fingerprint(config=config, tokenizer=zeros, tensors=zeros), {}, digests)


def test_digests_last_until_a_change(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[SourceFile] = []
    digest = SourceFile.digest
    monkeypatch.setattr(SourceFile, "digest", lambda origin, stop: [made.append(origin), digest(origin, stop)][1])
    copy = open_folder(Path(shutil.copytree(checkpoint.folder, tmp_path / "copy")))
    piece, given_up, stop = pieces_of(copy, 2, 3)[0], threading.Event(), threading.Event()
    given_up.set()

    def found(stop: threading.Event) -> str:
        digests = DigestCache(copy)
        value = digests.of(SourceFile.of_piece(copy, piece), stop)
        digests.keep()
        return value

    assert found(given_up) == "" and len(made) == 1, "which is not kept"
    first = found(stop)
    assert found(stop) == first and len(made) == 2
    assert first == blake3(piece.header + b"".join(SourceFile.of_piece(copy, piece).blocks(0, 999))).hexdigest()
    for file in copy.files_of(piece.order):
        os.utime(copy.folder / file, (1, 1))
    assert found(stop) == first and len(made) == 3


CONTENT = b"x" * 600


def receive_small(cache: WeightsCache, number: int, name: str = "tokenizer.json") -> Path:
    model = Fingerprint(config=f"{number:064x}", tokenizer="0" * 64, tensors="0" * 64)
    found = cache.begin_file(model, name, len(CONTENT), blake3(CONTENT).hexdigest())
    assert isinstance(found, PartialFile)
    found.write([CONTENT])
    found.finish()
    return found.path


def test_small_files_count_and_those_of_models_without_pieces_are_evicted(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path, limit=2000)
    paths = [receive_small(cache, number) for number in range(6)]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 2000
    assert [path.exists() for path in paths] == [False] * 3 + [True] * 3
    assert [path.parent.exists() for path in paths] == [False] * 3 + [True] * 3


def test_a_model_that_another_process_has_removed_is_removed(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path)
    key = receive_small(cache, 1).parent.name
    assert cache.remove(key) and cache.remove(key)


def test_the_small_files_of_the_model_that_is_received_stay(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path, limit=1500)
    other, first = receive_small(cache, 1), receive_small(cache, 2)
    second = receive_small(cache, 2, "config.json")
    assert not other.exists() and first.exists() and second.exists()
    with pytest.raises(ModelError, match="pull_limit"):
        receive_small(cache, 2, "tokenizer_config.json")
    assert first.exists() and second.exists()
