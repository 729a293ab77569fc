"""The store: what is evicted and what never, what is found again, and that no file has a name before it is whole."""

import errno
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import pytest
from blake3 import blake3

from coordinator.cluster.weights import DigestCache, SourceFile
from protos.brigade_pb2 import Fingerprint
from tests.tiny import make_model
from worker.errors import ModelError
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

NOBODY = Fingerprint(config="0" * 64, tokenizer="0" * 64, tensors="0" * 64)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_folder(make_model(tmp_path_factory.mktemp("model") / "qwen3", num_files=3))


@pytest.fixture
def store(tmp_path: Path) -> WeightsCache:
    return WeightsCache(tmp_path / "shards")


def receive(store: WeightsCache, checkpoint: Checkpoint, piece: Piece) -> Path:
    """As a whole feed of this piece does; where it lies then."""
    origin = SourceFile.of_piece(checkpoint, piece)
    found = store.begin_piece(checkpoint.fingerprint, piece, origin.digest(threading.Event()))
    if isinstance(found, Path):
        return found
    assert found is not None
    found.write(list(origin.blocks(found.offset, 1000)))
    found.finish()
    return found.path


def begin(store: WeightsCache, checkpoint: Checkpoint, piece: Piece) -> PartialFile:
    """Begin to receive a piece, or go on with what has come of it."""
    digest = SourceFile.of_piece(checkpoint, piece).digest(threading.Event())
    found = store.begin_piece(checkpoint.fingerprint, piece, digest)
    assert isinstance(found, PartialFile)
    return found


def digest_in(path: Path) -> tuple[int, str]:
    """Place and digest of a piece, by its name."""
    place, _, digest = path.stem.partition("-")
    return place_of(place), digest


def age(path: Path, days: int) -> None:
    used = path.stat().st_atime - 86400 * days
    os.utime(path, (used, path.stat().st_mtime))


# Pieces


def test_a_received_piece_is_a_safetensors_file_of_these_tensors(store: WeightsCache, checkpoint: Checkpoint) -> None:
    whole = {name: array for file in checkpoint.folder.glob("*.safetensors") for name, array in mx.load(file).items()}
    for piece in pieces_of(checkpoint, 0, 4):
        path = receive(store, checkpoint, piece)
        found = mx.load(str(path))
        assert found.keys() == piece.tensors.keys()
        assert all(mx.array_equal(found[name], whole[name]) for name in found)
        assert place_name(digest_in(path)[0]) == path.stem.partition("-")[0]
    assert all(place_of(place_name(place)) == place for place in (-2, -1, 0, 7, 99_999, 100_000))
    for start, end in [(0, 4), (1, 3), (3, 4)]:
        names = [name for piece in pieces_of(checkpoint, start, end) for name in piece.order]
        assert sorted(names) == sorted(shard_tensors(checkpoint, start, end))


def test_a_file_has_its_name_only_once_it_is_whole_and_right(store: WeightsCache, checkpoint: Checkpoint) -> None:
    piece = pieces_of(checkpoint, 2, 3)[0]
    begun, *rest = SourceFile.of_piece(checkpoint, piece).blocks(0, 1000)
    for is_right in (False, True):
        found = begin(store, checkpoint, piece)
        found.write([begun])
        found.close()
        again = begin(store, checkpoint, piece)
        assert again.offset == len(begun)
        again.write(rest if is_right else [b"x" * len(rest[0]), *rest[1:]])
        assert not list(store.folder.rglob("*.safetensors"))
        with nullcontext() if is_right else pytest.raises(ModelError, match="with the digest"):
            again.finish()
        again.close()
        left = [path.suffix for path in store.folder.rglob("*") if path.is_file()]
        assert left == ([".safetensors"] if is_right else [])


def test_a_partial_file_that_takes_long_to_read_again_is_continued_where_it_was_verified(
    store: WeightsCache, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender would take a long silence for a stall."""
    piece = pieces_of(checkpoint, 2, 3)[0]
    origin = SourceFile.of_piece(checkpoint, piece)
    found = begin(store, checkpoint, piece)
    found.write(list(origin.blocks(0, 1000))[:9])
    found.close()
    monkeypatch.setattr(cache_module, "_REREAD_S", 0.0)
    monkeypatch.setattr(cache_module, "_READ_BYTES", 2000)
    again = begin(store, checkpoint, piece)
    assert again.offset == 2000
    again.write(list(origin.blocks(2000, 1000)))
    again.finish()
    assert store.begin_piece(checkpoint.fingerprint, piece, origin.digest(threading.Event())) == again.path


def test_what_a_power_failure_left_longer_than_the_file_is_begun_anew(
    store: WeightsCache, checkpoint: Checkpoint
) -> None:
    piece = pieces_of(checkpoint, 2, 3)[0]
    begin(store, checkpoint, piece).close()
    [part] = store.folder.rglob("*.part")
    for content in (part.read_bytes() + bytes(piece.nbytes + 1), bytes(20), piece.header[:5]):
        part.write_bytes(content)
        again = begin(store, checkpoint, piece)
        assert again.offset == 0
        again.close()
        assert part.read_bytes() == piece.header


# Room


def test_the_least_recently_used_goes_first_and_only_as_much_as_is_needed(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    pieces = pieces_of(checkpoint, 1, 4)[1:]  # layers, which are equally large
    size = len(pieces[0].header) + pieces[0].nbytes
    store = WeightsCache(tmp_path / "shards", limit=2 * size + 50)
    first, second = (receive(store, checkpoint, piece) for piece in pieces[:2])
    age(first, 2)
    age(second, 3)
    receive(store, checkpoint, pieces[0])  # it is there: used now
    third = receive(store, checkpoint, pieces[2])
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)


def test_what_is_in_use_is_never_removed(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = pieces_of(checkpoint, 1, 4)[1:]
    size = len(pieces[0].header) + pieces[0].nbytes
    store = WeightsCache(tmp_path / "shards", limit=2 * size + 2000)  # with a config.json
    first, second = (receive(store, checkpoint, piece) for piece in pieces[:2])
    age(first, 2)
    (first.parent / "config.json").write_text((checkpoint.folder / "config.json").read_text())
    here = store.open("x", checkpoint.fingerprint, checkpoint.tensors, dict(map(digest_in, (first, second))))
    lease = store.lease(here, shard_tensors(here, 1, 2))
    assert first.stat().st_atime > second.stat().st_atime, "it is used now"
    age(first, 3)
    third = receive(store, checkpoint, pieces[2])
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)
    other = store.lease(here, shard_tensors(here, 1, 2))
    with pytest.raises(ModelError, match=r"removed just now"), monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "files_of", lambda *_: [first.name, second.name])  # in this order
        store.lease(here, shard_tensors(here, 1, 3))
    lease.close()
    assert is_used(first) and not store.remove(store.kept()[0].key) and first.exists()
    other.close()
    assert store.remove(store.kept()[0].key) and not store.kept()
    elsewhere = store.lease(checkpoint, checkpoint.tensors)
    assert not any(map(is_used, checkpoint.folder.iterdir())), "what is no file of the store is nobody's to hold"
    elsewhere.close()


def test_a_file_that_another_process_uses_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    code = (
        f"from worker.node.weights_cache import *; from pathlib import Path; l = Lease(); l.add(Path({str(path)!r})); "
    )
    command = [sys.executable, "-c", code + "print(1, flush=True); open(0).read()"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin and other.stdout and other.stdout.readline()
        assert is_used(path) and not remove_unused(path)
        lease = Lease()
        assert lease.add(path)  # which is shared
        lease.close()
        other.stdin.close()
        other.wait(10)
    assert not is_used(path) and remove_unused(path)


def test_a_tenth_of_the_disk_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = shutil.disk_usage(tmp_path)
    cache = WeightsCache(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(total=1000, free=150))
    cache.make_room(50)
    with pytest.raises(ModelError, match="its disk is nearly full; make room there"):
        cache.make_room(51)


# Models


def test_of_two_fine_tunes_the_pieces_that_are_asked_for_are_opened(
    store: WeightsCache, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    other = open_folder(make_model(tmp_path / "other", num_files=3, seed=1))
    assert other.fingerprint == checkpoint.fingerprint
    for each in (checkpoint, other, checkpoint):
        path = receive(store, each, pieces_of(each, 2, 3)[0])
        (path.parent / "config.json").write_text((each.folder / "config.json").read_text())
        found = store.open("x", each.fingerprint, each.tensors, dict([digest_in(path)]))
        assert found.tensors["model.layers.2.self_attn.q_proj.weight"].file == path.name
        assert found.fingerprint == each.fingerprint


def test_a_fingerprint_is_no_way_out_of_the_folder_and_files_of_another_model_are_refused(
    store: WeightsCache, checkpoint: Checkpoint
) -> None:
    path = receive(store, checkpoint, pieces_of(checkpoint, 2, 3)[0])
    known = {name: info for name, info in checkpoint.tensors.items() if "layers.2" not in name}
    with pytest.raises(ModelError, match="does not belong to this model; remove it by `brigade cache rm`"):
        store.open("x", checkpoint.fingerprint, known, dict([digest_in(path)]))
    for fingerprint, digests in (
        (Fingerprint(config="../..", tokenizer="0" * 64, tensors="0" * 64), {}), (NOBODY, {2: "../00002-x"}),
    ):  # fmt: skip
        with pytest.raises(ModelError, match="expected a digest in hex"):
            store.open("x", fingerprint, {}, digests)


# Digests


def test_digests_are_kept_until_a_file_changes(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[SourceFile] = []
    digest: Callable[[SourceFile, threading.Event], str] = SourceFile.digest
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


@pytest.mark.parametrize("kind", ["small file", "piece"])
def test_a_file_that_another_has_just_ended_is_not_begun_anew(
    store: WeightsCache, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It had no name yet when this one looked for it, and nobody holds it any more when this one locks it."""
    piece = pieces_of(checkpoint, 2, 3)[0]
    origin = (
        SourceFile.of_piece(checkpoint, piece)
        if kind == "piece"
        else SourceFile.of_file(checkpoint.folder / "config.json")
    )
    digest = origin.digest(threading.Event())

    def begin() -> PartialFile | Path | None:
        if kind == "piece":
            return store.begin_piece(checkpoint.fingerprint, piece, digest)
        return store.begin_file(checkpoint.fingerprint, "config.json", origin.nbytes, digest)

    def open_late(path: Path) -> int | None:
        monkeypatch.undo()
        first = begin()
        assert isinstance(first, PartialFile) and begin() is None, "the first one holds it"
        first.write(list(origin.blocks(0, 1 << 20)))
        first.finish()
        first.close()
        return open_alone(path)

    monkeypatch.setattr(cache_module, "open_alone", open_late)
    assert begin() is None
    found = begin()
    assert isinstance(found, Path) and list(found.parent.iterdir()) == [found]


def test_what_begins_to_come_while_the_rest_is_removed_stays(
    store: WeightsCache, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pieces_of(checkpoint, 1, 3)[-2:]
    receive(store, checkpoint, first)
    begun: list[PartialFile] = []

    def remove(path: Path) -> bool:
        is_gone = remove_unused(path)
        if not begun:
            begun.append(begin(store, checkpoint, second))
        return is_gone

    monkeypatch.setattr(cache_module, "remove_unused", remove)
    assert not store.remove(store.kept()[0].key)
    begun[0].write(list(SourceFile.of_piece(checkpoint, second).blocks(0, 1 << 20)))
    begun[0].finish()
    begun[0].close()
    assert [path.name for path in store.folder.rglob("*.safetensors")] == [begun[0].path.name]
    assert store.remove(store.kept()[0].key) and not store.kept()


def test_a_file_that_replaces_a_held_one_is_held(tmp_path: Path) -> None:
    path, other, lease = tmp_path / "file", tmp_path / "other", Lease()
    for each in (path, other):
        each.write_text(each.name)
    assert lease.add(path)
    other.replace(path)
    assert not is_used(path) and lease.add(path) and is_used(path)
    lease.close()
    assert remove_unused(path) and not lease.add(path)


def test_a_finished_file_is_held_or_known_to_be_gone(tmp_path: Path) -> None:
    """While others try all the time to have it alone."""
    path, is_over, num_held = tmp_path / "file", threading.Event(), 0

    def try_to_remove() -> None:
        while not is_over.is_set():
            remove_unused(path)

    with ThreadPoolExecutor() as pool:
        trying = pool.submit(try_to_remove)
        try:
            for _ in range(300):
                alone = open_alone(tmp_path / "file.part")
                assert alone is not None
                (tmp_path / "file.part").replace(path)
                os.close(alone)
                lease = Lease()
                is_held = lease.add(path)
                assert path.exists() == is_held
                num_held += is_held
                lease.close()
                while not remove_unused(path):  # as others do: by name alone it might be the next one that goes
                    pass
        finally:
            is_over.set()
        trying.result()
    assert num_held


FULL = errno.ENOSPC, os.strerror(errno.ENOSPC)
DIGEST = blake3(b"{}").hexdigest()
MODEL = Fingerprint(config=DIGEST, tokenizer=DIGEST, tensors=DIGEST)


@pytest.mark.parametrize("failing", [(PartialFile, "__init__"), (WeightsCache, "make_room")], ids=["disk", "room"])
def test_nobody_holds_what_could_not_be_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: tuple[type, str]
) -> None:
    """Its descriptor is closed once: the number may be another file's by then."""

    def fail(*given: object) -> None:
        raise OSError(*FULL)

    cache = WeightsCache(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(*failing, fail)
        with pytest.raises(OSError, match="No space left") as raised:
            cache.begin_file(MODEL, "config.json", 2, DIGEST)
    number = os.open(tmp_path, os.O_RDONLY)  # the lowest that is free: the same again
    del raised  # what the frames of the failure held ends with them
    gc.collect()
    found = cache.begin_file(MODEL, "config.json", 2, DIGEST)
    assert isinstance(found, PartialFile) and os.fstat(number)
    found.close()
    os.close(number)
