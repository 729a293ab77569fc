"""The key for names of prefixes on disk: equal wherever the same weights are."""

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.deployment import naming_key
from protos.brigade_pb2 import DTYPE_FLOAT32, Contents, Fingerprint


@pytest.mark.parametrize(("hub_hashes", "is_same"), [({"model.safetensors": "a"}, True), ({}, False)])
def test_weights_of_a_hub_have_one_key_whether_or_not_they_are_here_yet(
    hub_hashes: dict[str, str], is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint: Any = SimpleNamespace(fingerprint=Fingerprint(config="c"))
    keys = set()
    for marks in (b"", b"marks of what is here"):
        contents = Contents(marks=marks, hub_hashes=hub_hashes)
        monkeypatch.setattr("coordinator.cluster.deployment.contents_of", lambda _, found=contents: found)
        keys.add(naming_key(b"secret", checkpoint, DTYPE_FLOAT32))
    assert (len(keys) == 1) == is_same
