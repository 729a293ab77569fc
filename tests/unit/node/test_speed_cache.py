"""How fast this node is at a model: measured once per device, version and shapes, and read again ever after."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest

from protos.brigade_pb2 import RowTimes, Speed
from tests.tiny import make_model
from worker.node import speed_cache
from worker.node.loading import open_checkpoint
from worker.platform.mlx_memory import MemoryHeld
from worker.platform.threads import MlxThread

FOUND = Speed(kinds=[RowTimes(rows=[1, 8], ms=[1.5, 2.5])], head=RowTimes(rows=[1], ms=[0.5]), gbps=100)


@pytest.fixture
def gauged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were measured, which takes no time here; what is kept of them is in a folder of its own."""
    found: list[str] = []

    def measure_speed(checkpoint: object) -> Speed:
        found.append(checkpoint.name)  # type: ignore[attr-defined]
        return FOUND

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(speed_cache, "measure_speed", measure_speed)
    return found


def speed_of(folder: Path, *, anew: bool = False) -> Speed:
    with closing(MlxThread()) as thread:
        return asyncio.run(speed_cache.measured_speed(open_checkpoint(str(folder)), thread, anew=anew))


def test_what_was_measured_is_kept_until_it_is_to_be_measured_again_or_mlx_or_the_file_is_another(
    gauged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "a")
    assert kept(folder) is None
    assert [speed_of(folder), speed_of(folder)] == [FOUND, FOUND] and len(gauged) == 1
    assert kept(folder) == FOUND
    [file] = (tmp_path / "cache" / "brigade" / "speeds").iterdir()
    for num_measured, damage in enumerate((b"", b"\xc1", msgpack.packb({"format": 1}), msgpack.packb([1])), start=2):
        file.write_bytes(damage)
        assert [speed_of(folder), speed_of(folder)] == [FOUND, FOUND] and len(gauged) == num_measured
    with monkeypatch.context() as patch:
        patch.setattr(speed_cache, "version", lambda package: "9.9")
        assert speed_of(folder) == FOUND and len(gauged) == 6
    slower = Speed(kinds=FOUND.kinds, head=FOUND.head, gbps=50)
    monkeypatch.setattr(speed_cache, "measure_speed", lambda checkpoint: slower)
    assert [speed_of(folder), speed_of(folder, anew=True), kept(folder)] == [FOUND, slower, slower]


def kept(folder: Path) -> Speed | None:
    return asyncio.run(speed_cache.kept_speed(open_checkpoint(str(folder))))


def test_a_copy_of_other_weights_is_as_fast_and_other_shapes_are_not(gauged: list[str], tmp_path: Path) -> None:
    for name, seed, config in (("a", 0, {}), ("b", 1, {}), ("c", 0, {"intermediate_size": 128})):
        speed_of(make_model(tmp_path / name, seed=seed, config=config))
    assert len(gauged) == 2


@pytest.mark.parametrize(
    ("name", "found"), [("memory_budget", lambda: 1000), ("memory_held", lambda: MemoryHeld(1 << 60, 0, 0))]
)
def test_a_layer_that_does_not_fit_beside_what_a_shard_holds_is_not_tried(
    gauged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: Any
) -> None:
    """It would be paged out meanwhile, and what is measured then would be kept."""
    folder = make_model(tmp_path / "a")
    monkeypatch.setattr(speed_cache, name, found)
    assert speed_of(folder) == Speed() and not gauged and kept(folder) is None
