"""A prompt's caches in a file: on other nodes and another split a prompt goes on from there, and no disk keeps more."""

import asyncio
import json
import os
import shutil
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from coordinator.cluster.options import ClusterOptions
from coordinator.decoding.decode_options import make_cache_choice
from coordinator.engine.engine import Engine, open_engine
from coordinator.engine.inputs import InputProcessor
from coordinator.engine.prompt_cache import PromptCache
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from tests.integration.conftest import Models, opened_folder, running
from tests.integration.many import Frames, request, solo, tokens_of
from tests.integration.many import frames as frames
from tests.integration.test_handover import two_workers
from tests.integration.windows import MASKED
from worker.config import ClusterConfig, CoordinatorConfig, WorkerConfig
from worker.errors import InputError
from worker.platform.threads import run_in_thread

PROMPT = tokens_of(1100)  # two whole pieces, and 76 tokens more
WHOLE = 1024


@pytest.fixture
def model(models: Models) -> Path:
    return models("qwen3", config=MASKED["config"] | {"max_position_embeddings": 2048, "head_dim": 32}).folder


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The coordinator's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "coordinator"))
    return tmp_path


async def answered(config: ClusterConfig, model: Path, file: Path, asked: Request) -> Answer:
    checkpoint = opened_folder(model)
    cache = PromptCache(file, checkpoint, config.cache_disk)
    options = cache.options(ClusterOptions(config, str(model), None, 1200))
    async with open_engine(InputProcessor(checkpoint, None), options, max_waiting=1) as engine:
        answer = await engine.answer(asked)
        await cache.keep(engine)
    return answer


def from_disk(frames: Frames) -> int:
    return sum(len(window.tokens) for frame in frames for window in frame.windows if window.stored)


async def test_a_prompt_goes_on_from_its_file_on_other_nodes(
    model: Path, disk: Path, frames: Frames, capfd: pytest.CaptureFixture[str]
) -> None:
    file, asked = disk / "prompt", request(PROMPT, 4, cache=make_cache_choice("int8", None))
    async with two_workers(model, disk) as nodes:
        workers = tuple(WorkerConfig(name=node.name, address=(node.address,), memory=1 << 30) for node in nodes)
        config = ClusterConfig(coordinator=CoordinatorConfig(memory=1 << 30), workers=workers, layers=(1, 2, 1))
        first = await answered(config, model, file, asked)
        assert from_disk(frames) == 0 and file.stat().st_mode & 0o777 == 0o600
        assert f"{file} holds the caches of {WHOLE} tokens" in capfd.readouterr().err
        written = file.stat()
        reordered = config.model_copy(update={"layers": (2, 1, 1)})
        second = await answered(reordered, model, file, asked)
        assert from_disk(frames) == WHOLE
    third = await answered(ClusterConfig(), model, file, asked)
    assert from_disk(frames) == 2 * WHOLE
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)  # nothing was new
    assert [name for *_, names in os.walk(disk) for name in names if name.endswith((".rows", ".part"))] == []
    async with running(model, (4,)) as chain:
        [expected] = await solo(chain, [asked], chunk=512)
    assert first.tokens == second.tokens == third.tokens == expected.tokens


async def test_a_torn_file_is_computed_again_as_far_as_it_is_torn(
    model: Path, disk: Path, frames: Frames, capfd: pytest.CaptureFixture[str]
) -> None:
    file, asked = disk / "prompt", request(PROMPT, 2)
    first = await answered(ClusterConfig(), model, file, asked)
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    second = await answered(ClusterConfig(), model, file, asked)
    assert "is not used, and computed again" in capfd.readouterr().err
    assert from_disk(frames) == WHOLE // 2 and second.tokens == first.tokens
    assert len(file.read_bytes()) == len(whole), "the file is whole again"
    written = file.read_bytes()
    await answered(ClusterConfig(), model, file, request(PROMPT[1:90], 2))
    assert "nothing of this prompt is kept" in capfd.readouterr().err and file.read_bytes() == written
    assert [name for *_, names in os.walk(disk) for name in names if name.endswith(".rows")] == []


async def test_a_part_of_a_prompt_replaces_no_file(
    model: Path, disk: Path, frames: Frames, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk takes less than the whole; a new file keeps what there is."""
    file, asked = disk / "prompt", request(PROMPT, 2)
    await answered(ClusterConfig(cache_disk=3 << 19), model, file, asked)  # one piece and a half
    assert f"{file} holds the caches of {WHOLE // 2} tokens" in capfd.readouterr().err
    small = file.read_bytes()
    await answered(ClusterConfig(cache_disk=3 << 19), model, file, asked)
    assert "only a part of this prompt's caches" in capfd.readouterr().err and file.read_bytes() == small
    await answered(ClusterConfig(), model, file, asked)
    assert f"{file} holds the caches of {WHOLE} tokens" in capfd.readouterr().err
    assert from_disk(frames) == 2 * WHOLE // 2


async def test_what_an_interrupted_run_has_stored_serves_the_next_one(
    model: Path, disk: Path, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, asked = disk / "prompt", request(PROMPT, 2)
    keep = PromptCache.keep

    async def interrupted(cache: PromptCache, engine: Engine) -> None:
        await engine.core.stored_names()

    monkeypatch.setattr(PromptCache, "keep", interrupted)
    await answered(ClusterConfig(), model, file, asked)
    monkeypatch.setattr(PromptCache, "keep", keep)
    before = file.stat().st_size
    await answered(ClusterConfig(), model, file, asked)
    assert from_disk(frames) == WHOLE and file.stat().st_size > before
    assert [name for *_, names in os.walk(disk) for name in names if name.endswith(".rows")] == []


async def test_many_at_once_begin_a_file(model: Path, disk: Path) -> None:
    """And where none can be written, that is told before the model is loaded."""
    checkpoint, file = opened_folder(model), disk / "prompt"
    for _ in range(20):
        await asyncio.gather(*(run_in_thread(partial(PromptCache, file, checkpoint)) for _ in range(4)))
        assert os.listdir(disk) == ["prompt"]
        file.unlink()
    with pytest.raises(InputError, match="No such file") as raised:
        PromptCache(disk / "none" / "prompt", checkpoint)
    assert raised.value.field == "prompt_cache"


async def test_only_its_own_files_are_used_and_written(model: Path, models: Models, disk: Path) -> None:
    """The other model has the same structure."""
    checkpoint, file, other = opened_folder(model), disk / "prompt", disk / "tuned"
    shutil.copytree(model, other)
    weights = {name: array + 1 for name, array in mx.load(str(other / "model.safetensors")).items()}
    mx.save_safetensors(str(other / "model.safetensors"), weights, {"format": "pt"})
    PromptCache(file, opened_folder(other))
    header = json.loads(file.read_bytes())
    outside = header | {"pieces": [["x", -1]]}
    for content, expected in (
        (b"a letter\n", "another kind of file"),
        (b"\xff\xfe\x00", "another kind of file"),
        (json.dumps(outside).encode() + b"\n", "another kind of file"),
        (json.dumps(header | {"pieces": [[f"{'0' * 32}-0-512-0-4.rows", 0]]}).encode() + b"\n", "is of another model"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputError, match=expected) as raised:
            PromptCache(file, checkpoint)
        assert raised.value.field == "prompt_cache" and file.read_bytes() == content
    file.write_text(json.dumps(header) + "\n")
    PromptCache(file, checkpoint)
    assert json.loads(file.read_bytes())["model"] == checkpoint.name, "the other run has kept nothing"
    os.mkfifo(disk / "pipe")
    for path, expected in (("none/prompt", "cannot write"), ("pipe", "expected a file"), (".", "expected a file")):
        with pytest.raises(InputError, match=expected):
            PromptCache(disk / path, checkpoint)
