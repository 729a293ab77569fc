"""Frames that are refused by what they open."""

from contextlib import nullcontext

import pytest

from protos.brigade_pb2 import (
    CACHE_FULL,
    CACHE_INT8,
    CACHE_ROTATING,
    CACHE_UNSPECIFIED,
    Cache,
    DType,
    Frame,
    Grammar,
    Opening,
    Piece,
    Sampling,
    Store,
    Window,
)
from worker.compute.header import check_header
from worker.errors import FrameError

ROTATING = Cache(kind=CACHE_ROTATING, size=8, keep=4)


def check(*opened: Opening) -> None:
    check_header(Frame(step=41, opened=opened), 0, 64, DType.DTYPE_FLOAT32)


def test_slots_that_open_once_with_a_cache_that_there_is_and_a_grammar_of_the_largest_size_are_taken() -> None:
    caches = [*(Cache(kind=kind) for kind in (CACHE_UNSPECIFIED, CACHE_FULL, CACHE_INT8)), ROTATING]
    check(*(Opening(slot=slot, cache=cache) for slot, cache in enumerate(caches)))
    check(Opening(sampling=Sampling(grammar=Grammar(text="x" * 2**20, begins=2**24, eos=range(64)))))


@pytest.mark.parametrize(
    "opened",
    [
        [Opening(slot=1), Opening(slot=2), Opening(slot=1)],
        [Opening(slot=3, cache=Cache(kind=9))],  # type: ignore[arg-type]
        [Opening(slot=3, cache=Cache(kind=CACHE_ROTATING, size=8, keep=8))],
        [Opening(slot=3, cache=Cache(kind=CACHE_ROTATING))],
        [Opening(slot=3, snapshots=range(9))],
        [Opening(slot=3, snapshots=[4, 4])],
        *(
            [Opening(slot=3, sampling=Sampling(grammar=grammar))]
            for grammar in (
                Grammar(text="x" * (2**20 + 1)), Grammar(eos=range(65)), Grammar(begins=2**24 + 1),
                Grammar(eos=[2, 2**32 - 1]),
            )
        ),
    ],
    ids=["twice", "kind", "keep", "size", "snapshots", "order", "text", "ends", "beginning", "end"],
)  # fmt: skip
def test_what_no_slot_can_be_opened_with_is_refused(opened: list[Opening]) -> None:
    with pytest.raises(FrameError, match=r"^expected .*, got .*slots? .*\(step 41\)$"):
        check(*opened)


@pytest.mark.parametrize(
    ("window", "is_taken"),
    [
        (Window(base=6, tokens=[1, 2], snapshots=[3, 8]), True),
        (Window(base=6, tokens=[1, 2], snapshots=[3, 7]), False),
        (Window(base=6, tokens=[1, 2], snapshots=[3, 3, 8]), False),
        (Window(base=6, tokens=[1, 2], snapshots=[8], wanted=1), False),
    ],
)
def test_only_a_prompt_chunk_may_ask_for_a_snapshot_at_its_end(window: Window, is_taken: bool) -> None:
    with nullcontext() if is_taken else pytest.raises(FrameError, match=r"got .* in the window of slot 0"):
        check_header(Frame(step=41, windows=[window]), 0, 64, DType.DTYPE_FLOAT32)


NAME = bytes(16)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (Frame(windows=[Window(tokens=[1], stored=NAME)]), ""),
        (Frame(stores=[Store(piece=Piece(name=NAME, end=1))]), ""),
        (Frame(windows=[Window(tokens=[1], stored=NAME), Window(slot=1, tokens=[1])]), "alone in its frame"),
        (Frame(stores=[Store(piece=Piece(name=NAME, end=1))] * 2), "alone in its frame"),
        (Frame(windows=[Window(tokens=[1], stored=NAME[1:])]), "16 bytes of the name of a piece of a prefix, got 15"),
        (Frame(stores=[Store(piece=Piece(end=1))]), "16 bytes of the name of a piece of a prefix, got 0"),
        (Frame(stores=[Store(piece=Piece(name=NAME, begin=5, end=5))]), r"got \[5, 5\)"),
        (Frame(stores=[Store(piece=Piece(name=NAME, end=2**25))]), r"got \[0, 33554432\)"),
        (Frame(windows=[Window(tokens=[1], stored=NAME, wanted=1)]), "only tokens in the window of a piece"),
        (Frame(windows=[Window(tokens=[1], stored=NAME, pooled=1)]), "only tokens in the window of a piece"),
        (Frame(windows=[Window(tokens=[1], stored=NAME, snapshots=[1])]), "only tokens in the window of a piece"),
        (Frame(windows=[Window(tokens=[1], stored=NAME, targets=[1])]), "only tokens in the window of a piece"),
    ],
)
def test_pieces_of_prefixes_are_named_bounded_and_alone(frame: Frame, said: str) -> None:
    with pytest.raises(FrameError, match=said) if said else nullcontext():
        check_header(frame, 0, 64, DType.DTYPE_FLOAT32)
