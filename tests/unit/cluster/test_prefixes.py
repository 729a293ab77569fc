"""Which files of a piece go where, so that every node has its layers, and what becomes of those that cannot go."""

import asyncio
import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.prefixes import ChainPrefixes, Move, moves_for
from protos.brigade_pb2 import Piece
from worker.errors import PrefixLost


def file(first: int, last: int) -> Piece:
    return Piece(name=bytes(16), begin=0, end=512, first_layer=first, last_layer=last)


PLACES = ((0, 4), (4, 8))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([[(0, 4)], [(4, 8)]], []),
        ([[(0, 8)], [(2, 8)]], []),
        ([[(0, 2), (2, 4)], [(4, 6), (5, 8)]], []),
        ([[(0, 4), (4, 8)], []], [(0, 1, (4, 8))]),
        ([[(0, 2)], [(2, 8)]], [(1, 0, (2, 8))]),
        ([[], [(0, 4), (4, 8)]], [(1, 0, (0, 4))]),
        ([[(0, 4)], [], [(4, 6)], [(5, 8)]], [(2, 1, (4, 6)), (3, 1, (5, 8))]),
        ([[(0, 4)], [(4, 7)]], None),
        ([[], []], None),
    ],
)
def test_nodes_get_what_they_lack_and_nothing_else(
    files: list[list[tuple[int, int]]], expected: list[tuple[int, int, tuple[int, int]]] | None
) -> None:
    found = moves_for([[file(*layers) for layers in held] for held in files], PLACES)
    moves = None if expected is None else [Move(source, to, file(*layers)) for source, to, layers in expected]
    assert found == moves


def test_after_these_moves_every_node_has_all_its_layers() -> None:
    numbers = random.Random(0)
    num_complete = 0
    for _ in range(300):
        ends = [0, *sorted(numbers.sample(range(1, 12), 2)), 12]
        places = list(pairwise(ends))
        held = [
            [(first := numbers.randrange(12), numbers.randrange(first + 1, 13)) for _ in range(numbers.randrange(4))]
            for _ in places
        ]
        moves = moves_for([[file(*layers) for layers in each] for each in held], places)
        layers_of = [{layer for first, last in each for layer in range(first, last)} for each in held]
        assert (moves is None) == (set().union(*layers_of) != set(range(12)))
        for move in moves or ():
            layers = range(move.piece.first_layer, move.piece.last_layer)
            assert set(layers) <= layers_of[move.source] and not set(layers) <= layers_of[move.target]
            layers_of[move.target] |= set(layers)
        if moves is not None:
            num_complete += 1
            assert all(set(range(*place)) <= layers for place, layers in zip(places, layers_of, strict=True))
    assert num_complete > 20


class FakePeer:
    """A worker that has pieces, of which some cannot be read; it notes those that it gives and gets."""

    def __init__(self, *numbers: int, lost: int = -1) -> None:
        self.pieces = [Piece(name=bytes([n] * 16), begin=0, end=n, first_layer=0, last_layer=8) for n in numbers]
        self.lost = bytes([max(0, lost)] * 16)
        self.is_draining = True
        self.given: Counter[int] = Counter()
        self.got: list[int] = []

    async def prefixes(self, request: object) -> Any:
        return SimpleNamespace(pieces=self.pieces)

    async def export_piece(self, piece: Piece) -> bytes:
        self.given[piece.end] += 1
        await asyncio.sleep(0)
        if piece.name == self.lost:
            raise PrefixLost("expected a piece")
        return b"content"

    async def import_piece(self, piece: Piece, content: bytes) -> None:
        self.got.append(piece.end)


async def brought(prefixes: ChainPrefixes, *numbers: int) -> list[int]:
    pieces = [Piece(name=bytes([n] * 16), begin=0, end=n) for n in numbers]
    return [piece.end for piece in await prefixes.bring(pieces, 5.0)]


def test_a_piece_that_cannot_be_moved_stops_no_other_and_none_is_moved_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coordinator.cluster.prefixes.list_prefixes", lambda request: SimpleNamespace(pieces=[]))

    async def run() -> None:
        source, target, own = FakePeer(1, 2, 3, lost=2), FakePeer(3), SimpleNamespace(add=lambda *given: None)
        peers: list[Any] = [source, target]
        prefixes = ChainPrefixes(bytes(32), own, peers, [(0, 2), (2, 4), (4, 8)])  # type: ignore[arg-type]
        await prefixes.learn()
        assert {piece.end for piece, _ in prefixes.scattered.values()} == {1, 2, 3} and not prefixes.whole
        found = await asyncio.gather(*(brought(prefixes, 1, 2, 3) for _ in range(4)))
        assert found == [[1, 3]] * 4
        assert not prefixes.scattered and [piece.end for piece in prefixes.whole] == [1, 3]
        assert source.given == {1: 2, 2: 1, 3: 1} and target.got == [1] and not prefixes.num_moving

    asyncio.run(run())


def test_what_a_leaving_node_has_is_kept_even_if_one_file_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.cluster.prefixes.list_prefixes", lambda request: SimpleNamespace(pieces=[]))
    kept: list[int] = []

    async def run() -> None:
        source, own = FakePeer(1, 2, 3, lost=2), SimpleNamespace(add=lambda piece, content: kept.append(piece.end))
        peers: list[Any] = [source]
        prefixes = ChainPrefixes(bytes(32), own, peers, [(0, 4), (4, 8)])  # type: ignore[arg-type]
        names = [piece.name for piece in source.pieces]
        await prefixes.keep_of_leaving(names)
        await prefixes.gather(names, [1])
        assert source.given == {1: 2, 2: 1, 3: 2}, "what could not come is not asked for again"

    asyncio.run(run())
    assert kept == [1, 3] * 2
