"""Frames that are refused by what they open."""

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
    Sampling,
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
    ("opened", "message"),
    [
        ([Opening(slot=1), Opening(slot=2), Opening(slot=1)], r"expected to open a slot once, got slots \[1, 2, 1\]"),
        ([Opening(slot=3, cache=Cache(kind=9))], "expected a known kind of cache, got 9 for slot 3"),  # type: ignore[arg-type]
        ([Opening(slot=3, cache=Cache(kind=CACHE_ROTATING, size=8, keep=8))], "fewer than 8 tokens .*got 8 for slot 3"),
        ([Opening(slot=3, cache=Cache(kind=CACHE_ROTATING))], "fewer than 0 tokens .*got 0 for slot 3"),
    ],
)
def test_what_no_slot_can_be_opened_with_is_refused(opened: list[Opening], message: str) -> None:
    with pytest.raises(FrameError, match=rf"{message} \(step 41\)$"):
        check(*opened)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar(text="x" * (2**20 + 1)), "at most 1048576 characters of a grammar, got 1048577"),
        (Grammar(eos=range(65)), "at most 64 tokens that end an answer, got 65"),
        (Grammar(begins=2**24 + 1), "at most 16777216 tokens before an answer, got 16777217"),
        (Grammar(eos=[2, 2**32 - 1]), "at most 16777216 for a token that ends an answer, got 4294967295"),
    ],
)
def test_a_monster_of_a_grammar_is_refused(grammar: Grammar, message: str) -> None:
    with pytest.raises(FrameError, match=rf"{message} for slot 3 \(step 41\)$"):
        check(Opening(slot=3, sampling=Sampling(grammar=grammar)))
