"""All files of received models count against the limit, and a model without pieces goes as a whole."""

from pathlib import Path

import pytest
from blake3 import blake3

from protos.brigade_pb2 import Fingerprint
from worker.errors import ModelError
from worker.node.weights_cache import PartialFile, WeightsCache

CONTENT = b"x" * 600


def model(number: int) -> Fingerprint:
    return Fingerprint(config=f"{number:064x}", tokenizer="0" * 64, tensors="0" * 64)


def receive(cache: WeightsCache, number: int, name: str = "tokenizer.json") -> Path:
    found = cache.begin_file(model(number), name, len(CONTENT), blake3(CONTENT).hexdigest())
    assert isinstance(found, PartialFile)
    found.write([CONTENT])
    found.finish()
    return found.path


def test_small_files_count_and_those_of_models_without_pieces_are_evicted(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path, limit=2000)
    paths = [receive(cache, number) for number in range(6)]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 2000
    assert [path.exists() for path in paths] == [False] * 3 + [True] * 3
    assert [path.parent.exists() for path in paths] == [False] * 3 + [True] * 3


def test_the_small_files_of_the_model_that_is_received_stay(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path, limit=1500)
    other, first = receive(cache, 1), receive(cache, 2)
    second = receive(cache, 2, "config.json")
    assert not other.exists() and first.exists() and second.exists()
    with pytest.raises(ModelError, match="pull_limit"):
        receive(cache, 2, "tokenizer_config.json")
    assert first.exists() and second.exists()
