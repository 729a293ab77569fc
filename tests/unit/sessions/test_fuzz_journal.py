"""Journals at random, nearly right or extreme, and their files: an answer so far, or an InputError; little memory."""

import asyncio
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.engine.journal_file import JournalFile
from coordinator.sessions.journal import MAGIC, Journal, read_journal
from tests.unit.fuzz import fuzzed, nearly, within
from tests.unit.sessions.test_journal import FIRST, SECOND, WHOLE, found, header, record, written
from worker.errors import InputError

REQUEST = msgpack.unpackb(written()[len(MAGIC) + 12 :])
BATCH = {"first": 0, "tokens": [5, (6, -0.5, [(6, -0.5)])], "fills": [(5, 9)], "finish_reason": "stop"}
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3)
    | st.binary(max_size=9) | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
    | st.builds(msgpack.Timestamp, st.integers(0, 2**40), st.integers(0, 999)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2) | st.binary(max_size=2), inner),
    max_leaves=6,
)  # fmt: skip


def read(data: bytes) -> Journal | None:
    with within(1 << 20):
        try:
            journal = read_journal(data)
        except InputError as error:
            assert error.field == "journal" and len(str(error)) < 1000
            return None
        assert journal is None or journal.num_bytes <= len(data)
        return journal


@fuzzed(60)
@given(nearly(WHOLE) | st.binary(max_size=60).map(MAGIC.__add__))
def test_a_damaged_file_never_has_another_request_or_other_tokens(data: bytes) -> None:
    if journal := read(data):
        assert journal.header == header()
        assert journal.known.tokens == found(WHOLE).known.tokens[: len(journal.known.tokens)]


@fuzzed(40)
@given(st.lists(nearly(msgpack.packb(BATCH)) | nearly(msgpack.packb(REQUEST)) | st.binary(max_size=20), max_size=3))
def test_records_of_nearly_right_bytes_are_read_or_refused(payloads: list[bytes]) -> None:
    read(MAGIC + b"".join(map(record, payloads)))
    read(written(FIRST, SECOND) + b"".join(map(record, payloads)))


BATCHES = st.dictionaries(st.sampled_from(sorted(BATCH)), ODD) | st.builds(dict, first=st.integers(-1, 4))


@fuzzed(40)
@given(st.dictionaries(st.sampled_from(sorted(REQUEST)), ODD), st.lists(ODD | BATCHES.map(BATCH.__or__), max_size=2))
def test_records_with_values_of_any_kind_are_read_or_refused(request: dict[str, Any], batches: list[Any]) -> None:
    read(MAGIC + record(REQUEST | request))
    read(written() + b"".join(map(record, batches)))


LENGTH = 1 << 16
NESTED = (b"\xdd" + struct.pack(">I", LENGTH)) * 500 + bytes(LENGTH)


@pytest.mark.parametrize(
    "content",
    [
        NESTED,
        {"version": "9" * LENGTH},
        {"first": 0, "tokens": [], "fills": [(at, 1) for at in range(LENGTH // 16)]},
        {"x" * LENGTH: 1},
        {"first": "x" * LENGTH, "tokens": []},
    ],
    ids=["lists in lists", "version", "fills", "key", "value"],
)
def test_a_record_that_says_much_is_refused_in_a_few_words(content: Any) -> None:
    with within(4 << 20), pytest.raises(InputError) as refused:
        read_journal(written() + record(content))
    assert len(str(refused.value)) < 1000


@fuzzed(20)
@given(nearly(WHOLE) | st.integers(0, len(WHOLE)).map(lambda length: WHOLE[:length]))
def test_no_file_loses_a_whole_record(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed-journal"
    path.write_bytes(data)
    try:
        asyncio.run(_open(path))
    except InputError:
        assert path.read_bytes() == data
    else:
        assert data.startswith(left := path.read_bytes()) and (not left or found(left).num_bytes == len(left))


async def _open(path: Path) -> None:
    async with JournalFile(path):
        pass
