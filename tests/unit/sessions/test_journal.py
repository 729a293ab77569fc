"""Journals as bytes: what was written is read, what was cut off is forgotten, what was changed is refused."""

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest

from coordinator.decoding.decode_options import Decode
from coordinator.sessions.journal import MAGIC, Header, Journal, read_journal, write_batch, write_header
from coordinator.sessions.output import KnownTokens, Output, Token
from coordinator.sessions.request import Request
from protos.brigade_pb2 import CACHE_ROTATING, Cache, Contents, Fingerprint, Sampling
from tests.unit.fuzz import with_one_bit_flipped
from worker.errors import InputError
from worker.model.model_spec import CanvasTraining, Refinement

ROUNDED = struct.unpack("<f", struct.pack("<f", -0.1))[0]
FIRST = Output("a", [Token(5), Token(2**32 - 1)], 0)
SECOND = Output(
    "b", [Token(6, ROUNDED, (Token(6, ROUNDED), Token(7, -2.5)))], 0, fills=[(8, Token(9, -1.0)), (10, Token(3))]
)
LAST = Output("", [Token(1)], 0, "stop")


def header(**changes: Any) -> Header:
    request = Request(
        prompt=(1, 2, 3),
        max_tokens=40,
        sampling=Sampling(seed=2**64 - 1, temperature=0.7, logit_bias={5: -1.5}, logprobs=3),
        decode=Decode("diffusion-fast", 8, 0.3, 0.01),
        cache=Cache(kind=CACHE_ROTATING, size=64, keep=4),
        stops=("é\n", "😀"),
        eos=frozenset({7, 1}),
        repeat_guard=4,
        continues_text=True,
    )
    fingerprint, contents = Fingerprint(config="c", tokenizer="t", tensors="x"), Contents(marks=b"abcd")
    return Header("demo", fingerprint, contents, Request(**vars(request) | changes), True)


def written(*pieces: Output, **changes: Any) -> bytes:
    """A file with these pieces."""
    parts, first = [write_header(header(**changes))], 0
    for piece in pieces:
        parts.append(write_batch(first, piece))
        first += len(piece.tokens)
    return b"".join(parts)


def record(content: Any) -> bytes:
    """A record whose checksums are right, whatever is in it."""
    payload = content if isinstance(content, bytes) else msgpack.packb(content)
    numbers = struct.pack("<II", len(payload), zlib.crc32(payload))
    return numbers + struct.pack("<I", zlib.crc32(numbers)) + payload


def found(data: bytes) -> Journal:
    journal = read_journal(data)
    assert journal is not None
    return journal


WHOLE = written(FIRST, SECOND, LAST)
ENDS = [len(written(*pieces)) for pieces in ([], [FIRST], [FIRST, SECOND], [FIRST, SECOND, LAST])]


def test_a_journal_comes_back_as_it_was_written() -> None:
    journal = found(WHOLE)
    assert journal.header == header()
    assert journal.known == KnownTokens((*FIRST.tokens, *SECOND.tokens, *LAST.tokens), (), "stop")
    assert journal.num_bytes == len(WHOLE)
    assert found(written(FIRST, SECOND)).known.fills == tuple(SECOND.fills)


def test_what_a_model_that_refines_its_canvases_was_trained_with_comes_back() -> None:
    training = CanvasTraining(None, 8, refinement=Refinement(not_text=frozenset({9, 8})))
    refined = Decode("canvas", canvas=8, canvas_steps=4, canvas_threshold=(0.1, 0.1, 1), training=training)
    assert found(written(FIRST, decode=refined)).header == header(decode=refined)


def test_a_file_torn_at_any_byte_has_all_records_before() -> None:
    """The beginning of a file is its own sound journal, or none yet."""
    for length in range(len(WHOLE)):
        journal, whole = read_journal(WHOLE[:length]), [end for end in ENDS if end <= length]
        assert (journal.num_bytes if journal else 0) == max(whole, default=0)
        if journal is not None:
            assert len(journal.known.tokens) == (0, 2, 3)[len(whole) - 1]


def test_any_flipped_bit_of_a_whole_file_is_refused() -> None:
    for flipped in with_one_bit_flipped(WHOLE):
        with pytest.raises(InputError, match=r"^journal: (expected a journal|record \d is damaged: .*checksum)"):
            read_journal(flipped)


def test_zeros_of_a_power_failure_are_cut_off_and_no_other_file_is_taken_for_a_torn_one() -> None:
    for num_zeros in (1, 12, 5000):
        assert found(written(FIRST) + bytes(num_zeros)).num_bytes == ENDS[1]
    with pytest.raises(InputError, match="record 2 is damaged"):
        read_journal(written(FIRST) + bytes(40) + b"x")
    for data in (b"x", b"brigade journaL\n", b"my notes\n" * 9, bytes(40)):
        with pytest.raises(InputError, match="expected a journal or no file"):
            read_journal(data)
    assert read_journal(b"") is read_journal(MAGIC[:7]) is read_journal(MAGIC) is read_journal(WHOLE[:80]) is None


def test_pages_that_a_power_failure_left_empty_cost_only_what_they_had() -> None:
    """A page ends anywhere in a record, also where the record itself has zeros."""
    for begin in range(len(MAGIC), len(WHOLE)):
        journal = read_journal(WHOLE[:begin] + bytes(len(WHOLE) - begin))
        intact = [end for end in ENDS if end <= begin or not any(WHOLE[begin:end])]
        assert (journal.num_bytes if journal else 0) == max(intact, default=0)


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([write_batch(1, FIRST)], "expected tokens from 0 on, found them from 1 on"),
        ([write_batch(0, FIRST), write_batch(0, FIRST)], "expected tokens from 2 on, found them from 0 on"),
        ([write_batch(0, LAST), write_batch(1, FIRST)], "the answer has ended before it"),
        ([write_batch(0, Output("", [Token(1)] * 41, 0))], "expected at most 40 tokens, found 41"),
        ([write_batch(0, Output("", [Token(1)], 0, fills=[(4, Token(1))]))], r"shortly after 4, found \[4\]"),
        ([write_batch(0, Output("", [], 0, fills=[(6, Token(1)), (5, Token(1))]))], r"found \[6, 5\]"),
        ([write_batch(0, Output("", [], 0, fills=[(9999, Token(1))]))], r"found \[9999\]"),
        ([record({"first": 0, "tokens": [-1]})], "tokens"),
        ([record({"first": 0, "tokens": [2**32]})], "tokens"),
        ([record({"first": 0, "tokens": [1], "finish_reason": "error"})], "finish_reason"),
        ([record([1, 2])], "all of it"),
        ([record(b"\xc1")], "no msgpack"),
        ([record(b"\x91" * 5000)], "no msgpack"),
        ([record(b"\xdd\xff\xff\xff\xff")], "no msgpack"),
    ],
)  # fmt: skip
def test_what_cannot_have_been_written_is_refused(records: Sequence[bytes], problem: str) -> None:
    with pytest.raises(InputError, match=rf"record {len(records)} is damaged: .*{problem}"):
        read_journal(written() + b"".join(records))


def test_a_header_or_a_length_that_cannot_be_meant_is_refused() -> None:
    for version in (0, 2, None, "1"):
        with pytest.raises(InputError, match=f"expected version 1, found {version!r}"):
            read_journal(MAGIC + record({"version": version, "anything": "else"}))
    with pytest.raises(InputError, match="another version has written it"):
        read_journal(written() + record({"first": 0, "tokens": [1], "more": 1}))
    with pytest.raises(InputError, match="expected no fills with ar, found 2"):
        read_journal(written(FIRST, SECOND, decode=Decode("ar")))
    numbers = struct.pack("<II", 2**32 - 1, 0)
    with pytest.raises(InputError, match="expected at most 33554432 bytes, found 4294967295"):
        read_journal(MAGIC + numbers + struct.pack("<I", zlib.crc32(numbers)))
