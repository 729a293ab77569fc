"""A file that cannot be received is left as it was: nobody holds it, and what has come of it stays."""

import errno
import gc
import os
from pathlib import Path

import pytest
from blake3 import blake3

from protos.brigade_pb2 import Fingerprint
from worker.node.weights_cache import PartialFile, WeightsCache

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
