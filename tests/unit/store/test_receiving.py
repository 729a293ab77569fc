"""A file that cannot be received is left as it was: nobody holds it, and what has come of it stays."""

import errno
import gc
import os
from pathlib import Path

import pytest
from blake3 import blake3

from protos.brigade_pb2 import Fingerprint
from worker.store.receiving import Receiving, begin_receiving
from worker.store.room import Room
from worker.store.store import Store

FULL = errno.ENOSPC, os.strerror(errno.ENOSPC)


def test_nobody_holds_what_could_not_be_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor is closed once: the number may be another file's by then."""
    given = tmp_path / "whole", tmp_path / "whole.part", b"head", 4, blake3(b"headbody").hexdigest()

    def fail(receiving: Receiving, begin: bytes) -> None:
        raise OSError(*FULL)

    with monkeypatch.context() as patch:
        patch.setattr(Receiving, "_take_up", fail)
        with pytest.raises(OSError, match="No space left") as raised:
            begin_receiving(*given)
    number = os.open(tmp_path, os.O_RDONLY)  # the lowest that is free: the same again
    del raised  # what the frames of the failure held ends with them
    gc.collect()
    found = begin_receiving(*given)
    assert found is not None and os.fstat(number)
    found.close()
    os.close(number)


def test_nobody_holds_what_there_was_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(room: Room, nbytes: int) -> None:
        raise OSError(*FULL)

    store, digest = Store(tmp_path), blake3(b"{}").hexdigest()
    model = Fingerprint(config=digest, tokenizer=digest, tensors=digest)
    with monkeypatch.context() as patch:
        patch.setattr(Room, "make", fail)
        with pytest.raises(OSError, match="No space left"):
            store.begin_file(model, "config.json", 2, digest)
    found = store.begin_file(model, "config.json", 2, digest)
    assert isinstance(found, Receiving)
    found.close()
