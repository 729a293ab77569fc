"""Nodes with copies of their own: a fine-tune is told from its model, and a worker needs only its layers' files."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from coordinator.cluster.weights import known_digests
from protos.brigade_pb2 import LoadRequest
from tests.integration.conftest import Models, Whole, load, load_request, opened, serving
from tests.integration.test_equality import GREEDY, assert_equal
from tests.tiny import write_folder
from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.contents import contents_of
from worker.model.describe import shard_tensors

FILES = [f"model-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4)]


@pytest.fixture
def whole(models: Models) -> Whole:
    return models("qwen3", num_files=4)


@pytest.fixture
def copy(whole: Whole, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.folder, tmp_path / "copy"))


def full_request(folder: Path, start: int, end: int) -> LoadRequest:
    """As a coordinator sends it."""
    request = load_request(folder, start, end)
    request.contents.CopyFrom(contents_of(checkpoint := open_folder(folder)))
    request.digests.update(known_digests(checkpoint))
    return request


async def refusal(request: LoadRequest, copy: Path) -> str:
    async with serving(1, copy) as [node]:
        with pytest.raises(ModelError) as caught:
            await load(node, request)
    return str(caught.value)


def tune(folder: Path, file: str) -> None:
    """Other values in one weight file, same names, shapes and dtypes."""
    tensors = mx.load(str(folder / file))
    mx.save_safetensors(str(folder / file), {name: tensor * 1.01 for name, tensor in tensors.items()})


# Fine-tunes


@pytest.mark.parametrize("file", [FILES[0], FILES[3]])
async def test_a_fine_tune_with_equal_headers_is_refused_by_its_file(whole: Whole, copy: Path, file: str) -> None:
    tune(copy, file)
    assert open_folder(copy).fingerprint == open_folder(whole.folder).fingerprint
    differ = f"^worker node-1: its weights in {file} differ from the coordinator's; copy the same model to both nodes$"
    async with serving(1, copy) as nodes:
        with pytest.raises(ModelError, match=differ):
            async with opened(whole.folder, (2, 2), nodes):
                pytest.fail("the chain opened")


async def test_a_node_that_holds_the_model_refuses_its_fine_tune(whole: Whole, copy: Path) -> None:
    async with serving(1, whole.folder) as [node]:
        await load(node, full_request(whole.folder, 2, 4))
        tune(copy, FILES[0])
        request = full_request(copy, 2, 4)
        request.model = str(whole.folder)
        with pytest.raises(ModelError, match=f"its weights in {FILES[0]} differ"):
            await load(node, request)


async def test_files_that_come_late_are_compared_too(whole: Whole, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose copy comes from a hub that names no hashes; the coordinator's is a folder."""
    tune(copy, FILES[3])
    request = full_request(whole.folder, 2, 4)
    monkeypatch.setattr("tests.integration.conftest.open_checkpoint", lambda model, known: arriving(copy, model))
    async with serving(1) as [node]:
        with pytest.raises(ModelError, match=f"its weights in {FILES[3]} differ"):
            await load(node, request)
        assert not node.service.worker.shard


def arriving(origin: Path, model: str) -> Checkpoint:
    """A checkpoint whose weight files come only when they are fetched."""
    folder = origin.parent / "cache"
    shutil.copytree(origin, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)

    def download(files: Iterable[str], progress: Any) -> None:
        for file in files:
            shutil.copy(origin / file, folder)

    return replace(open_folder(origin), folder=folder, name=model, download=download)


# Folders that lack files


def needed(folder: Path, start: int, end: int) -> set[str]:
    checkpoint = open_folder(folder)
    return checkpoint.files_of(shard_tensors(checkpoint, start, end))


def keep_only(folder: Path, files: set[str]) -> Path:
    absent = [path for path in folder.glob("*.safetensors") if path.name not in files]
    for path in absent:
        path.unlink()
    assert absent
    return folder


@pytest.mark.parametrize(("indexed", "start"), [(True, 1), (False, 2), (True, 3)])
async def test_a_worker_needs_only_the_files_of_its_layers(whole: Whole, copy: Path, indexed: bool, start: int) -> None:
    keep_only(copy, needed(whole.folder, start, 4))
    if not indexed:
        (copy / "model.safetensors.index.json").unlink()
    async with serving(1, copy) as nodes, opened(whole.folder, (start, 4 - start), nodes) as chain:
        await assert_equal(chain, whole, GREEDY)


async def test_the_middle_of_a_chain_needs_neither_the_first_files_nor_the_last(whole: Whole, copy: Path) -> None:
    keep_only(copy, needed(whole.folder, 1, 2))
    async with (
        serving(1, copy) as [middle],
        serving(2) as [_, last],  # a chain's nodes have different names
        opened(whole.folder, (1, 1, 2), [middle, last]) as chain,
    ):
        await assert_equal(chain, whole, GREEDY)


async def test_a_file_of_its_own_layers_that_a_worker_lacks_is_named_with_its_layers(whole: Whole, copy: Path) -> None:
    request, held = full_request(whole.folder, 1, 4), open_folder(copy)
    in_file = [name for name in shard_tensors(held, 1, 4) if held.tensors[name].file == FILES[2]]
    layers = [int(name.split(".")[2]) for name in in_file if "layers" in name]
    lacks = f"worker node-1: lacks {FILES[2]}, which holds layers [{min(layers)}, {max(layers) + 1})"
    (copy / FILES[2]).unlink()
    assert await refusal(request, copy) == f"{lacks}; copy it to {copy}"
    (copy / FILES[3]).unlink()
    message = await refusal(request, copy)
    assert message.startswith(lacks) and "(and 1 more such file)" in message


async def test_a_head_that_a_worker_lacks_is_named(models: Models, tmp_path: Path) -> None:
    whole, folder = models("qwen3"), tmp_path / "copy"
    tensors = dict(tree_flatten(whole.reference.model.parameters()))
    head = {name: tensors.pop(name) for name in ("lm_head.weight", "model.norm.weight")}
    write_folder(folder, json.loads((whole.folder / "config.json").read_text()), tensors)
    mx.save_safetensors(str(folder / "model-head.safetensors"), head)
    request = full_request(folder, 2, 4)
    (folder / "model-head.safetensors").unlink()
    lacks = "lacks model-head.safetensors, which holds the embedding or the head; copy it to"
    assert lacks in await refusal(request, folder)


async def test_a_file_that_only_another_model_knows_does_not_make_it_this_one(models: Models, copy: Path) -> None:
    """What is absent is believed to be as the coordinator says; what is here is not."""
    (copy / FILES[0]).unlink()
    request = full_request(models("qwen3", num_files=4, config={"intermediate_size": 128}).folder, 2, 4)
    request.fingerprint.config = open_folder(models("qwen3", num_files=4).folder).fingerprint.config
    assert "tensor headers" in await refusal(request, copy)


async def test_a_coordinator_needs_every_header_and_says_so(whole: Whole, copy: Path) -> None:
    (copy / FILES[3]).unlink()
    async with serving(1, whole.folder) as nodes:
        with pytest.raises(ModelError, match=r"is missing, .* Only a worker may lack files"):
            async with opened(copy, (2, 2), nodes):
                pytest.fail("the chain opened")
