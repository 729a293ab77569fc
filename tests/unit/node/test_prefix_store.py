"""Pieces of prefixes on a node's disk: read as they were written, by the same layers only, within a limit."""

import asyncio
import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from blake3 import blake3

from protos.brigade_pb2 import DTYPE_FLOAT32, FilePart, Piece, PrefixesRequest, Segment, Tensor
from worker.errors import ConfigError, FrameError, PrefixLost
from worker.memory.slot_caches import CacheSegment
from worker.node import prefix_store
from worker.node.hop import MOST_TENSORS
from worker.node.prefix_store import (
    PrefixStore,
    file_parts,
    join_parts,
    list_prefixes,
    naming_secret,
    piece_files,
    read_piece,
)
from worker.platform.files import private_file

LIMIT = 1 << 20
SEGMENTS = [
    CacheSegment(2, 0, 4, (mx.arange(24.0).reshape(1, 2, 3, 4),), (mx.ones((1, 2, 3, 4), mx.bfloat16),)),
    CacheSegment(3, 1, 0, (mx.zeros((1, 5)), mx.full((1, 2), 7, mx.float16)), (), 7),
    CacheSegment(4, 0, 4, (mx.array([[[[1]]]], mx.uint32),), ()),
]


def name_of(number: int) -> bytes:
    return bytes([number]) * 16


def write(folder: Path, *numbers: int, layers: tuple[int, int] = (2, 5), limit: int = LIMIT) -> None:
    for number in numbers:
        store = PrefixStore(*layers, limit, folder)
        store.put(Piece(name=name_of(number), begin=4, end=7 + number), SEGMENTS)
        store.threads.shutdown()


def read(folder: Path, number: int = 1, layers: tuple[int, int] = (2, 5)) -> list[CacheSegment]:
    return PrefixStore(*layers, LIMIT, folder).read(name_of(number))


def test_a_piece_is_read_as_it_was_written_also_by_fewer_of_its_layers(tmp_path: Path) -> None:
    write(tmp_path / "prompts", 1)
    for layers in ((2, 5), (3, 5), (2, 3)):
        found = read(tmp_path / "prompts", layers=layers)
        for each, expected in zip(found, SEGMENTS, strict=True):
            assert (each.number, each.part, each.base, each.length) == (
                expected.number, expected.part, expected.base, expected.length,
            )  # fmt: skip
            pairs = zip((each.keys, each.values), (expected.keys, expected.values), strict=True)
            for ours, theirs in pairs:
                assert [array.dtype for array in ours] == [array.dtype for array in theirs]
                assert all(mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for layers in ((1, 5), (2, 6)):
        with pytest.raises(PrefixLost):
            read(tmp_path / "prompts", layers=layers)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "prompts").iterdir()}
    assert modes == {0o600} and (tmp_path / "prompts").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda own, other: own[:-1],
        lambda own, other: own[:40],
        lambda own, other: own[:10],
        lambda own, other: b"",
        lambda own, other: own[:-30] + bytes([own[-30] ^ 1]) + own[-29:],
        lambda own, other: own + b"more",
        lambda own, other: own + (1 << 60).to_bytes(8, "little"),
        lambda own, other: other,
    ],
)
def test_what_is_torn_damaged_or_of_another_piece_is_refused_and_removed(
    tmp_path: Path, damage: Callable[[bytes, bytes], bytes]
) -> None:
    write(tmp_path, 1, 2)
    paths = {file.piece.name: file.path for file in piece_files(tmp_path)}
    own, other = (paths[name_of(number)] for number in (1, 2))
    own.write_bytes(damage(own.read_bytes(), other.read_bytes()))
    with pytest.raises(PrefixLost):
        read(tmp_path)
    assert not own.exists() and read(tmp_path, 2)


def made_up(content: bytes, *segments: Segment) -> bytes:
    """The file of a piece with other segments, which have no bytes, and a digest that fits."""
    headers = [segment.SerializeToString() for segment in segments]
    body = b"".join(struct.pack("<IQ", len(header), 0) + header for header in headers)
    return content[:32] + blake3(body).digest() + body


@pytest.mark.parametrize("shape", [[0, 2**32 - 1], [0] * 9])
def test_a_piece_of_another_node_with_a_shape_of_no_array_is_removed(tmp_path: Path, shape: list[int]) -> None:
    write(tmp_path, 1)
    [file] = piece_files(tmp_path)
    segment = Segment(num_keys=1, tensors=[Tensor(dtype=DTYPE_FLOAT32, shape=shape)])
    PrefixStore(2, 5, LIMIT, tmp_path).add(file.piece, made_up(file.path.read_bytes(), segment))
    with pytest.raises(PrefixLost, match="expected tensors in"):
        read(tmp_path)
    assert not file.path.exists()


def test_a_piece_of_another_node_with_too_many_segments_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    [file] = piece_files(tmp_path)
    content = made_up(file.path.read_bytes(), *[Segment()] * (MOST_TENSORS + 1))
    with pytest.raises(FrameError, match="expected at most"):
        PrefixStore(2, 5, LIMIT, tmp_path).add(file.piece, content)
    assert read(tmp_path)


def test_the_least_recently_used_pieces_give_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1)
    [size] = [file.nbytes for file in piece_files(tmp_path)]
    write(tmp_path, 2, 3, limit=3 * size)
    for number in (1, 2, 3):
        os.utime(next(tmp_path.glob(f"{name_of(number).hex()}*")), (number, number))
    read(tmp_path, 1)
    write(tmp_path, 4, 5, limit=3 * size)
    assert {file.piece.name for file in piece_files(tmp_path)} == set(map(name_of, (1, 4, 5)))
    store = PrefixStore(2, 5, size - 1, tmp_path)  # a limit that was lowered, below a single piece
    for number in (6, 7):
        store.put(Piece(name=name_of(number), begin=4, end=7 + number), SEGMENTS)
    store.threads.shutdown()
    assert not piece_files(tmp_path)
    [told] = caplog.records
    assert "expected room for" in told.message


def test_pieces_that_are_written_at_once_do_not_take_the_same_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    [size] = [file.nbytes for file in piece_files(tmp_path)]
    both = threading.Barrier(2)

    def write_at_once(path: Path) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # another writer has room, too, if it may be as far
        return private_file(path)

    monkeypatch.setattr(prefix_store, "private_file", write_at_once)
    stores = [PrefixStore(2, 5, 2 * size, tmp_path) for _ in range(2)]
    for number, store in enumerate(stores, 2):
        store.put(Piece(name=name_of(number), begin=4, end=7 + number), SEGMENTS)
    for store in stores:
        store.threads.shutdown()
    assert sum(file.nbytes for file in piece_files(tmp_path)) <= 2 * size


def test_a_folder_that_another_process_holds_costs_pieces_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been stopped in the middle of a write; this process ends all the same."""
    monkeypatch.setattr("worker.node.prefix_store.LOCK_S", 0.05)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    write(tmp_path, 1)
    assert not piece_files(tmp_path)
    os.close(held)
    write(tmp_path, 2)
    assert len(piece_files(tmp_path)) == 1


def test_the_beginning_of_a_prefix_outlives_its_end(tmp_path: Path) -> None:
    write(tmp_path, 30, 20, 10)
    [size] = {file.nbytes for file in piece_files(tmp_path)}
    write(tmp_path, 1, limit=2 * size)
    assert {file.piece.name for file in piece_files(tmp_path)} == set(map(name_of, (1, 10)))
    write(tmp_path, 100, limit=2 * size)  # of the same prefix, for which there is no room
    assert {file.piece.name for file in piece_files(tmp_path)} == set(map(name_of, (1, 10)))


def test_pieces_of_a_clock_that_was_ahead_give_way(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    year = time.time() + 365 * 86400
    for path in tmp_path.iterdir():
        os.utime(path, (year, year))
    both = sum(path.stat().st_size for path in tmp_path.iterdir())
    write(tmp_path, 3, limit=both)
    assert read(tmp_path, 3) and len(piece_files(tmp_path)) == 2


def test_a_piece_that_came_after_it_was_looked_for_is_found(tmp_path: Path) -> None:
    write(tmp_path / "other", 2)
    [piece] = list_prefixes(PrefixesRequest(), tmp_path / "other").pieces
    write(tmp_path, 1)
    store = PrefixStore(2, 5, LIMIT, tmp_path)
    store.read(name_of(1), [name_of(2)])
    assert isinstance(store.ahead[name_of(2)].exception(), PrefixLost)  # it was looked for in vain
    store.add(piece, read_piece(piece, tmp_path / "other"))
    assert len(store.read(name_of(2))) == len(SEGMENTS)


def test_pieces_are_listed_with_their_layers_and_removed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 1, 2, layers=(5, 8))
    (tmp_path / "something.rows").write_bytes(b"else")
    (tmp_path / f"{name_of(3).hex()}-0-512-0-8.rows").mkdir()
    secret = naming_secret(tmp_path)
    (tmp_path / f".{name_of(4).hex()}-0-512-0-8.rows.0123abcd").write_bytes(b"of a process that was killed")
    found = list_prefixes(PrefixesRequest(remove=True), tmp_path)
    listed = {(p.name, p.begin, p.end, p.first_layer, p.last_layer) for p in found.pieces}
    assert listed == {(name_of(1), 4, 8, 2, 5), (name_of(1), 4, 8, 5, 8), (name_of(2), 4, 9, 5, 8)}
    assert found.bytes > 0 < found.used
    assert len(list(tmp_path.iterdir())) == 3 and (tmp_path / "something.rows").exists()
    assert naming_secret(tmp_path) == secret, "a coordinator that runs goes on with it"
    assert not list_prefixes(PrefixesRequest(), tmp_path / "absent").pieces


@pytest.mark.parametrize("damaged", [(2, 4), (4, 5), (3, 5), (0, 3)])
def test_a_stage_reads_its_layers_from_several_files_whichever_of_them_are_sound(
    tmp_path: Path, damaged: tuple[int, int]
) -> None:
    for layers in ((2, 4), (4, 5), (3, 5), (0, 3)):
        write(tmp_path, 1, layers=layers)
    assert len(read(tmp_path, layers=(0, 5))) == len(read(tmp_path, layers=(2, 5))) == 2 * len(SEGMENTS)  # of two files
    [path] = tmp_path.glob("*-{}-{}.rows".format(*damaged))
    path.write_bytes(path.read_bytes()[:-1])
    assert {each.number for each in read(tmp_path, layers=(2, 5))} == {each.number for each in SEGMENTS}
    if damaged == (0, 3):
        with pytest.raises(PrefixLost):
            read(tmp_path, layers=(0, 5))


async def test_a_piece_goes_to_another_node_whole_and_undamaged_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write(here, 1)
    [piece] = list_prefixes(PrefixesRequest(), here).pieces
    content = read_piece(piece, here)
    other = Piece(name=name_of(2), begin=4, end=9, first_layer=2, last_layer=5)
    with pytest.raises(PrefixLost):
        read_piece(other, here)

    async def sent(parts: Iterable[FilePart]) -> AsyncIterator[FilePart]:
        for part in parts:
            yield part

    async def silent() -> AsyncIterator[FilePart]:
        yield next(file_parts(piece, content))
        await asyncio.Event().wait()

    assert await join_parts(sent(file_parts(piece, content))) == (piece, content)
    with monkeypatch.context() as patch, pytest.raises(FrameError, match="got nothing for"):
        patch.setattr("worker.node.prefix_store.PART_S", 0.05)
        await join_parts(silent())
    store = PrefixStore(3, 5, LIMIT, there)
    made_up = [content[:16] + name_of(1) + blake3(body).digest() + body for body in (b"x", b"x" * 99)]
    for body in made_up:
        with pytest.raises(FrameError, match="expected segments in the file of a piece"):
            store.add(piece, body)
    outside = Piece(name=b"../../etc", begin=4, end=8, first_layer=2, last_layer=5)
    for wrong, damaged in ((piece, content[:-1]), (piece, b""), (other, content), (outside, content)):
        with pytest.raises(FrameError):
            store.add(wrong, damaged)
    assert not there.exists()
    store.add(piece, content)
    assert [each.number for each in store.read(name_of(1))] == [each.number for each in SEGMENTS]
    assert {path.stat().st_mode & 0o777 for path in there.iterdir()} == {0o600}
    with pytest.raises(PrefixLost, match="expected room"):
        PrefixStore(3, 5, len(content) - 1, tmp_path / "full").add(piece, content)
    assert not list_prefixes(PrefixesRequest(), tmp_path / "full").pieces


def test_the_secret_stays_the_same_and_is_for_its_user_only(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    secret = naming_secret(folder)
    assert naming_secret(folder) == secret and len(secret) == 32 and naming_secret(tmp_path / "other") != secret
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    (folder / "secret").write_bytes(b"short")
    folder.chmod(0o755)
    assert len(naming_secret(folder)) == 32 and folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="cannot keep prefixes on disk"):
        naming_secret(folder / "secret")


def test_a_disk_that_takes_no_more_costs_pieces_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "prompts").write_bytes(b"a file where the folder should be")
    store = PrefixStore(2, 5, LIMIT, tmp_path / "prompts")
    assert store.put(Piece(name=name_of(1), begin=4, end=7), SEGMENTS)
    store.threads.shutdown()
    assert caplog.text.count("cannot keep prefixes on disk any more") == 1
    assert not store.put(Piece(name=name_of(2), begin=4, end=7), SEGMENTS)
