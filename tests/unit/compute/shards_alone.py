"""A shard holds what its layers need and nothing else, takes over what is there already, and is gone when let go of.

MLX counts the memory of a whole process: `test_shard.py` runs these tests where no other test has left a thread behind.
"""

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from protos.brigade_pb2 import Cache, Frame, Opening, Window
from tests.tiny import make_model
from tools.model_types.make import make_type
from worker.compute import shard as shard_module
from worker.compute.batching import LaneWindow
from worker.compute.executor import Executor
from worker.compute.shard import CutModel, Shard
from worker.errors import ModelError
from worker.memory.history import History
from worker.memory.slot_caches import members
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.describe import describe

pytestmark = pytest.mark.usefixtures("uncompiled")

# tied and not, states, windows, latents, experts, biases, a second tensor that travels, positions in the embedding
TYPES = ("qwen3", "llama", "gemma3", "qwen3_5", "deepseek_v3", "gpt_oss", "falcon_h1", "nemotron_h", "rwkv7", "gpt2")
SMALL = 4096  # bytes that may come and go beside weights


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_type(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture
def checkpoint(folder: Path) -> Checkpoint:
    return open_folder(folder)


types = pytest.mark.parametrize("folder", TYPES, indirect=True)
few_types = pytest.mark.parametrize(
    "folder",
    [
        each if each in ("llama", "deepseek_v3", "gpt2") else pytest.param(each, marks=pytest.mark.matrix)
        for each in TYPES
    ],
    indirect=True,
)


def memory() -> int:
    mx.synchronize()  # what is still being computed holds what it needs
    return mx.get_active_memory()


def loaded(checkpoint: Checkpoint, start: int, end: int, held: dict[str, mx.array] | None = None) -> Shard:
    shard = Shard(checkpoint, start, end, held)
    shard.materialise(lambda nbytes: None)
    return shard


def incoming(shard: Shard, num_rows: int) -> mx.array:
    if shard.is_first:
        return mx.zeros((1, num_rows), mx.int32)
    return mx.zeros((1, num_rows, shard.info.hidden_size), shard.info.dtype)


def run(shard: Shard) -> mx.array:
    """A prompt of one slot, a step of two, and the last stage's logits."""
    slots = [shard.make_caches(Cache()) for _ in range(2)]
    h = shard(incoming(shard, 5), [LaneWindow(slots[0], 0, 5)])
    h = shard(incoming(shard, 2), [LaneWindow(slots[0], 5, 1), LaneWindow(slots[1], 0, 1)])
    h = shard.logits(h) if shard.is_last else h
    mx.eval(h, [array for slot in slots for array in slot.arrays()])
    for slot in slots:
        slot.close()
    return h


@types
def test_a_shard_takes_the_bytes_of_the_plan_and_is_freed(checkpoint: Checkpoint, without_collector: None) -> None:
    """By reference counting alone: a cycle would keep gigabytes until Python looks for cycles."""

    def num_modules() -> int:
        return sum(isinstance(each, nn.Module) for each in gc.get_objects())

    before, modules_before = memory(), num_modules()
    spec = describe(checkpoint)
    assert num_modules() == modules_before and memory() - before < SMALL, "a description leaves no model behind"
    for start, end in ((0, 2), (1, 3), (1, spec.num_layers)):
        shard = loaded(checkpoint, start, end)
        assert shard.nbytes == spec.shard_bytes(start, end) == sum(array.nbytes for array in shard.tensors.values())
        assert memory() - before <= 1.1 * shard.nbytes + SMALL
        run(shard)
        assert memory() - before + SMALL >= shard.nbytes > 4 * SMALL
        del shard
        assert memory() - before < SMALL


@pytest.mark.parametrize("folder", ["qwen3_5", "nemotron_h", "falcon_h1", "rwkv7", "mamba2", "lfm2"], indirect=True)
@pytest.mark.parametrize("is_last", [True, False])
def test_a_prompt_chunk_leaves_nothing_but_its_caches(checkpoint: Checkpoint, is_last: bool) -> None:
    """Recurrent states are slices and functions of all the chunk's rows, which must not outlive the step."""
    spec = describe(checkpoint)
    engine = Executor(loaded(checkpoint, 0, spec.num_layers - (not is_last)), 0, spec.dtype)
    held = list[int]()
    for slot in range(2):  # the first one compiles
        chunk = Window(slot=slot, prefix_hash=History().prefix_hash(0), tokens=[5] * 400)
        engine.finish(engine.begin(Frame(opened=[Opening(slot=slot)], windows=[chunk]), (), 0, 0))
        held.append(memory() - engine.cache_bytes)
    assert held[1] - held[0] < len(chunk.tokens) * spec.row_bytes / 4


def test_a_failed_pass_keeps_no_shard(tmp_path: Path, without_collector: None, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_folder(make_model(tmp_path / "model"))
    describe(checkpoint)
    before = memory()
    shard = loaded(checkpoint, 1, 3)
    with monkeypatch.context() as patch:
        patch.setattr(nn.RMSNorm, "__call__", None)
        try:
            run(shard)
        except TypeError:
            pass
        else:
            pytest.fail("it ran without norms")
    run(shard)  # nothing is left of that pass
    del shard
    assert memory() - before < SMALL


@few_types
def test_what_another_shard_has_read_is_taken_over_and_the_rest_let_go_of(checkpoint: Checkpoint) -> None:
    num_layers = describe(checkpoint).num_layers
    expected = run(loaded(checkpoint, 2, num_layers))
    before = memory()
    first = loaded(checkpoint, 1, 4)
    held = first.tensors
    theirs = dict(held)
    del first
    shard = Shard(checkpoint, 2, num_layers, held)
    ours = shard.tensors
    kept = theirs.keys() & ours.keys()
    assert kept and theirs.keys() - kept and ours.keys() - kept and not held
    assert all(ours[name] is theirs[name] for name in kept)
    del theirs, ours
    shard.materialise(lambda nbytes: None)
    assert memory() - before <= 1.1 * shard.nbytes + SMALL
    assert mx.array_equal(run(shard), expected)


def test_a_shard_that_takes_everything_over_reads_nothing(tmp_path: Path) -> None:
    checkpoint = open_folder(make_model(tmp_path / "model", num_files=2))
    whole = loaded(checkpoint, 0, 4)
    expected = run(whole)
    part = Shard(checkpoint, 1, 4, whole.tensors)
    for file in tmp_path.glob("model/*.safetensors"):
        with file.open("rb+") as data:
            data.truncate(1000)
    part.materialise(lambda nbytes: None)
    assert part.digests().items() <= whole.digests().items() and run(part).shape == expected.shape


def test_no_shard_computes_with_a_tensor_that_it_did_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a tensor's place found wrongly, the shard that needs it would say so instead of answering nonsense."""
    checkpoint = open_folder(make_model(tmp_path / "model"))
    lacking = "model.layers.2.self_attn.k_norm.weight"
    tensors = shard_module.shard_tensors
    monkeypatch.setattr(
        shard_module, "shard_tensors", lambda *shard: [name for name in tensors(*shard) if name != lacking]
    )
    Shard(checkpoint, 0, 2)
    with pytest.raises(ModelError, match=rf"cannot tell which node needs tensor {lacking}$"):
        Shard(checkpoint, 2, 4)


def test_norm_and_head_find_empty_caches_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding that remembers token ids runs before them, and each step's ids would wait for those before."""
    seen: list[list[mx.array]] = []
    behind = CutModel.behind

    def watched(self: CutModel, h: mx.array, caches: Any, mode: str) -> mx.array:
        seen.append([array for listed in caches for cache in members(listed) for array in cache.arrays()])
        return behind(self, h, caches, mode)

    monkeypatch.setattr(CutModel, "behind", watched)
    shard = Shard(open_folder(make_type(tmp_path, "longcat_flash_ngram")), 0, 6)
    for _ in range(2):
        shard.logits(mx.zeros((1, 1, shard.info.hidden_size)))
    assert seen == [[], []]


def test_experts_that_a_cpu_cannot_multiply_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX itself says so only at the first step. Layers without experts, and quantised experts, are no matter."""
    folder = make_type(tmp_path / "model", "deepseek_v3", dtype=mx.bfloat16)
    monkeypatch.setattr(shard_module, "multiplies_experts", lambda dtype: dtype == mx.float32)
    with pytest.raises(ModelError, match="its experts are in bfloat16, which MLX computes on a GPU only; take a quant"):
        Shard(open_folder(folder), 0, 2)
    assert Shard(open_folder(folder), 0, 1).nbytes
