"""Which files of a piece go where, so that every node has its layers."""

import random
from itertools import pairwise

import pytest

from coordinator.cluster.prefixes import Move, moves_for
from protos.brigade_pb2 import Piece


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
