"""Journal: a request and its answer so far as bytes, so that another process can continue the answer. Pure.

A file is a mark and then records: the request, then the tokens of each step. Before each record stand its length, the
checksum of its bytes and the checksum of these two numbers. So a truncated file, whose writer was killed and which is
continued, differs from a modified one, which is refused.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgpack
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.decoding.decode_options import Decode
from coordinator.decoding.window_lengths import LENGTHS
from coordinator.sessions.output import KnownTokens, Output, Token
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Cache, Contents, Fingerprint, Sampling
from worker.errors import InputError

MOST_BYTES = 1 << 28  # of a file
MAGIC = b"brigade journal\n"
_VERSION = 1
_MOST_RECORD_BYTES = 1 << 25
_MOST_SHOWN = 8  # positions in a message
_PREFIX = struct.Struct("<III")  # length, checksum of the bytes, checksum of these two

Record = TypeVar("Record", bound=BaseModel)
_Id = Annotated[int, Field(ge=0, lt=2**32)]
_Packed = _Id | tuple[_Id, float, list[tuple[_Id, float]]]  # a token; with its logprob and alternatives if it has any


@dataclass(frozen=True)
class Header:
    """The request of a journal and the model that it was sent to."""

    model: str  # as the user named it
    fingerprint: Fingerprint
    contents: Contents  # without headers: the fingerprint covers them
    request: Request
    has_text: bool  # or else its tokens are given as ids


@dataclass(frozen=True)
class Journal:
    """The contents of a file."""

    header: Header
    known: KnownTokens
    num_bytes: int  # of the whole records; anything behind them is the beginning of one more


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Request(_Record):
    """The first record."""

    version: int
    model: str
    fingerprint: bytes
    contents: bytes
    has_text: bool
    prompt: Annotated[tuple[_Id, ...], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)]
    sampling: bytes
    decode: Decode
    cache: bytes
    stops: tuple[str, ...]
    eos: frozenset[_Id]
    repeat_guard: Annotated[int, Field(ge=0)]
    continues_text: bool = False  # older files lack it


# fields of a request that its record has as they are
_AS_THEY_ARE = ("prompt", "max_tokens", "decode", "stops", "eos", "repeat_guard", "continues_text")


class _Batch(_Record):
    """Any other record."""

    first: int  # how many tokens of the answer come before it
    tokens: list[_Packed]
    fills: list[tuple[_Id, _Packed]] = []
    finish_reason: Literal["stop", "length"] | None = None


def write_header(header: Header) -> bytes:
    """Return the beginning of a file."""
    request = header.request
    record = _Request(
        version=_VERSION,
        model=header.model,
        fingerprint=header.fingerprint.SerializeToString(deterministic=True),
        contents=header.contents.SerializeToString(deterministic=True),
        has_text=header.has_text,
        sampling=request.sampling.SerializeToString(deterministic=True),
        cache=request.cache.SerializeToString(deterministic=True),
        **{name: getattr(request, name) for name in _AS_THEY_ARE},
    )
    return MAGIC + _write(record.model_dump())


def write_batch(first: int, output: Output) -> bytes:
    """Return the record of an output that follows `first` tokens of the answer."""
    record: dict[str, Any] = {"first": first, "tokens": [_pack(token) for token in output.tokens]}
    if output.fills:
        record["fills"] = [(at, _pack(token)) for at, token in output.fills]
    if output.finish_reason is not None:
        record["finish_reason"] = output.finish_reason
    return _write(record)


def read_journal(data: bytes) -> Journal | None:
    """Return the contents of a file; None if it ends before the request does.

    Raises:
        InputError: the file is not a journal, or it was changed.
    """
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return None
        raise InputError("journal", "expected a journal or no file, found something else; give another file")
    header, end, last = None, 0, _Batch(first=0, tokens=[])
    tokens: list[Token] = []
    for number, (end, payload) in enumerate(_payloads(data)):  # noqa: B007 - used below
        if header is None:
            header = _read_header(payload)
            continue
        batch = _read(_Batch, payload, number)
        if problem := _problem(header.request, len(tokens), last, batch):
            raise _damaged(number, problem)
        tokens += map(_unpack, batch.tokens)
        last = batch
    if header is None:
        return None
    fills = tuple((at, _unpack(token)) for at, token in last.fills)
    return Journal(header, KnownTokens(tuple(tokens), fills, last.finish_reason), end)


def _write(record: dict[str, Any]) -> bytes:
    payload = msgpack.packb(record, default=sorted)  # sets as lists
    assert len(payload) <= _MOST_RECORD_BYTES
    numbers = struct.pack("<II", len(payload), zlib.crc32(payload))
    return numbers + struct.pack("<I", zlib.crc32(numbers)) + payload


def _payloads(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield (end, payload) of every complete record."""
    view, at, number = memoryview(data), len(MAGIC), 0
    written = len(data.rstrip(b"\0"))  # a file system may keep a length but not the bytes when the power fails
    while at + _PREFIX.size <= len(data):
        length, checksum, of_both = _PREFIX.unpack_from(data, at)
        begin, end = at + _PREFIX.size, at + _PREFIX.size + length
        if zlib.crc32(view[at : at + 8]) != of_both:
            if written <= begin:
                return
            raise _damaged(number, f"its length's checksum is wrong (byte {at})")
        if length > _MOST_RECORD_BYTES:
            raise _damaged(number, f"expected at most {_MOST_RECORD_BYTES} bytes, found {length}")
        if end > len(data):
            return
        if zlib.crc32(view[begin:end]) != checksum:
            if written < end:
                return
            raise _damaged(number, f"its checksum is wrong (byte {begin})")
        yield end, view[begin:end]
        at, number = end, number + 1


def _read_header(payload: memoryview) -> Header:
    record = _read(_Request, payload, 0)
    try:
        kept: dict[str, Any] = {name: getattr(record, name) for name in _AS_THEY_ARE}
        sampling, cache = Sampling.FromString(record.sampling), Cache.FromString(record.cache)
        fingerprint, contents = Fingerprint.FromString(record.fingerprint), Contents.FromString(record.contents)
    except DecodeError as error:
        raise _damaged(0, str(error)) from error
    request = Request(sampling=sampling, cache=cache, **kept)
    return Header(record.model, fingerprint, contents, request, record.has_text)


def _read(kind: type[Record], payload: memoryview, number: int) -> Record:
    try:
        whole = msgpack.Unpacker(max_buffer_size=max(1, len(payload)))
        whole.feed(payload)
        whole.skip()  # or lists within lists could each announce as many things as there are bytes
        found = msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException) as error:
        raise _damaged(number, f"its bytes are no msgpack ({error})") from error
    version = found.get("version", _VERSION) if isinstance(found, dict) else _VERSION
    if version != _VERSION:
        raise InputError(
            "journal", f"expected version {_VERSION}, found {version!r:.40}; use the brigade that wrote it"
        )
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            raise InputError("journal", "another version has written it; use the brigade that wrote it") from error
        place = ".".join(map(str, first["loc"])) or "all of it"
        raise _damaged(number, f"{place:.200}: {first['msg']:.200}") from error


def _problem(request: Request, num_known: int, last: _Batch, batch: _Batch) -> str:
    """Return why the batch cannot follow the last one; empty if it can."""
    if last.finish_reason is not None:
        return "the answer has ended before it"
    if batch.first != num_known:
        return f"expected tokens from {num_known} on, found them from {batch.first} on"
    num_tokens = num_known + len(batch.tokens)
    if num_tokens > request.max_tokens:
        return f"expected at most {request.max_tokens} tokens, found {num_tokens}"
    end = len(request.prompt) + num_tokens
    ahead = [at for at, _ in batch.fills]
    if ahead and request.decode.kind != "diffusion-fast":
        return f"expected no fills with {request.decode.kind}, found {len(ahead)}"
    if ahead != sorted(set(ahead)) or any(not end < at < end + LENGTHS[-1] for at in ahead):
        return f"expected fills at ascending positions shortly after {end}, found {ahead[:_MOST_SHOWN]}"
    return ""


def _pack(token: Token) -> int | Sequence[Any]:
    others = [(other.token, other.logprob) for other in token.alternatives]
    return (token.token, token.logprob, others) if token.logprob or others else token.token


def _unpack(packed: int | tuple[int, float, list[tuple[int, float]]]) -> Token:
    if isinstance(packed, int):
        return Token(packed)
    token, logprob, others = packed
    return Token(token, logprob, tuple(Token(*other) for other in others))


def _damaged(number: int, found: str) -> InputError:
    return InputError("journal", f"record {number} is damaged: {found}; ask again with another file")
