"""What a worker loads: its copy of the coordinator's model, as far as its layers go, and no path that a peer names."""

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from coordinator.cluster.weights import known_digests
from protos.brigade_pb2 import LoadRequest
from tests.integration import test_hub
from tests.integration.conftest import Models, Whole, load_request, opened, serving
from tests.integration.test_equality import GREEDY, assert_equal
from tests.integration.test_hub import COMMIT, FIRST, SECOND, THIRD, Ask, Hub
from tests.tiny import make_model, write_folder
from worker.config import ClusterConfig, WorkerConfig
from worker.errors import ModelError
from worker.model.checkpoint import DEMO, Checkpoint, open_folder
from worker.model.contents import check_files, contents_of
from worker.model.describe import shard_tensors
from worker.node.model_sources import ModelSources

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
            await node.load(request)
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
        await node.load(full_request(whole.folder, 2, 4))
        tune(copy, FILES[0])
        request = full_request(copy, 2, 4)
        request.model = str(whole.folder)
        with pytest.raises(ModelError, match=f"its weights in {FILES[0]} differ"):
            await node.load(request)


async def test_files_that_come_late_are_compared_too(whole: Whole, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose copy comes from a hub that names no hashes; the coordinator's is a folder."""
    tune(copy, FILES[3])
    request = full_request(whole.folder, 2, 4)
    monkeypatch.setattr("tests.integration.conftest.open_checkpoint", lambda model, known: arriving(copy, model))
    async with serving(1) as [node]:
        with pytest.raises(ModelError, match=f"its weights in {FILES[3]} differ"):
            await node.load(request)
        assert not node.service.worker.shard


def arriving(origin: Path, model: str) -> Checkpoint:
    """A checkpoint whose weight files come only when they are fetched."""
    folder = origin.parent / "cache"
    shutil.copytree(origin, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)

    def download(files: Iterable[str], progress: Any) -> None:
        for file in files:
            shutil.copy(origin / file, folder)

    return replace(open_folder(origin), folder=folder, name=model, download=download, opened=())


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


folder, hub, asking = test_hub.folder, test_hub.hub, test_hub.asking  # fixtures


async def test_no_path_that_a_coordinator_names_is_opened_and_refusals_do_not_tell_what_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_paths, is_over = list[str](), False

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if not is_over and event in ("open", "os.listdir", "os.scandir"):
            opened_paths.append(os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else "")

    outside, root = make_model(tmp_path / "outside"), tmp_path / "root"  # the one would be loaded, were it opened
    (root / "nested" / "deep").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    (root / "file").write_text("no folder")
    monkeypatch.chdir(root)
    request, said = load_request(outside, 2, 4), set[str]()
    names = [str(outside), "../outside", f"{root}/../outside", f"{root}/link", "link", "outside", "nested/../link"]
    names += ["/etc", "/", "", ".", "..", "~", "loop", "file", "deep", f"{root}/nested/deep", "x\0", "x" * 70_000]
    names += ["é/../..@..", "/not/there", f"{root}/lonk"]
    async with serving(1, ModelSources(roots=(root, root / "not there"))) as [node]:
        sys.addaudithook(note)  # for good: Python has no way to take it back
        for name in names:
            request.model = name
            opened_paths.clear()
            with pytest.raises(ModelError, match=r"opens no path that a peer names.* --model FOLDER_OR_REPO") as caught:
                await node.load(request)
            assert set(opened_paths) <= {str(root), str(root / "not there")}, name
            assert len(str(caught.value)) < 400 and str(caught.value).isprintable()
            if name in (str(outside), "/not/there", f"{root}/link", f"{root}/lonk"):
                said.add(str(caught.value).replace(name, "NAME"))
    is_over = True
    assert len(said) == 1


# Models of one's own


async def test_models_below_the_roots_are_found_by_the_last_part_of_their_name(models: Models, tmp_path: Path) -> None:
    """Two have one name: the one that is meant is the one that is like the coordinator's."""
    whole = models("qwen3").folder
    shutil.copytree(models("llama").folder, tmp_path / "first" / "copy")
    shutil.copytree(whole, tmp_path / "second" / "copy")
    (tmp_path / "second" / "link").symlink_to("copy")
    roots = (tmp_path / "first", tmp_path / "second")
    request = load_request(whole, 2, 4)
    for name in ("copy", "/not/there/copy", "owner/copy", f"owner/copy@{COMMIT}", "/not/there/link"):
        request.model = name
        async with serving(1, ModelSources(roots=roots)) as [node]:
            assert (await node.load(request))[-1].phase == "load", name


@pytest.mark.parametrize("wanted", ["/not/there/copy", "owner/copy"])
def test_a_folder_of_models_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """As a service's on macOS: Documents, or another disk."""

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(Path, "iterdir", refuse)
    expected = f"^cannot read {re.escape(str(tmp_path))}: Operation not permitted; allow Python .*, Full Disk Access"
    with pytest.raises(ModelError, match=expected):
        ModelSources(roots=(tmp_path,)).open_own(wanted, {}, take)


async def test_a_workers_own_model_is_loaded_by_any_name_and_the_bundled_one_by_all(models: Models) -> None:
    own = models("qwen3").folder
    cases = [(str(own), load_request(own, 2, 4), name) for name in (str(own), "/etc", "../x", "demo")]
    cases += [(model, load_request(DEMO, 6, 8), "demo") for model in (None, str(own))]
    for model, request, name in cases:
        request.model = name
        async with serving(1, ModelSources(model)) as [node]:
            assert (await node.load(request))[-1].phase == "load", name


@pytest.mark.parametrize(
    ("name", "flag", "expected"),
    [("mini", "flag", "flag"), ("mini", None, "entry"), ("air", None, "top"), (None, None, "top")],
)
def test_flag_goes_before_entry_and_entry_before_file(name: str | None, flag: str | None, expected: str) -> None:
    mini = WorkerConfig(name="mini", address="localhost:1", model="entry")
    workers = (mini, WorkerConfig(name="air", address="localhost:2"))
    found = ModelSources.of(ClusterConfig(model="top", models=("shelf",), workers=workers), name, flag)
    assert found.cache is not None
    assert replace(found, cache=None) == ModelSources(expected, (Path("shelf"),), may_download_own=expected != "top")


# The hub


REPOSITORY = f"brigade/tiny@{COMMIT}"


def take(checkpoint: Checkpoint) -> None:
    """A check that everything passes."""


def test_a_repository_not_in_the_cache_is_asked_for_only_if_configured(hub: Hub, asking: Ask, tmp_path: Path) -> None:
    def refuse_demo(checkpoint: Checkpoint) -> None:
        assert checkpoint.name == "demo"
        raise ModelError("correct it")

    assert ModelSources.of(ClusterConfig(pull="none"), None, None) == ModelSources(None, (), may_download=False)
    with asking(hub.endpoint, tmp_path):
        for name in (REPOSITORY, "brigade/tiny", "brigade/tiny@main", "brigade/no..name"):
            with pytest.raises(ModelError, match=r"start it with --model brigade/tiny, or set `pull: hub`|correct it"):
                ModelSources("demo").open_own(name, {}, refuse_demo)
        assert hub.asked == []
        checkpoint = ModelSources.of(ClusterConfig(pull="hub"), None, None).open_own(REPOSITORY, {}, take)
        assert checkpoint.name == REPOSITORY and checkpoint.download is not None
        assert hub.asked


@pytest.mark.parametrize("own", ["brigade/tiny", "brigade/tiny@main"])
@pytest.mark.parametrize("wanted", [REPOSITORY, "/models/tiny", "elsewhere/tiny"])
def test_a_workers_own_repository_is_downloaded(hub: Hub, asking: Ask, tmp_path: Path, own: str, wanted: str) -> None:
    with asking(hub.endpoint, tmp_path):
        checkpoint = ModelSources(own).open_own(wanted, {}, take)
        assert checkpoint.name == REPOSITORY
        checkpoint.fetch(checkpoint.tensors, lambda nbytes: None)
    assert hub.downloads() >= {FIRST, SECOND, THIRD}
    assert not [path for _, path, _ in hub.asked if "elsewhere" in path]


def test_what_is_in_the_cache_is_opened_without_a_hub(hub: Hub, asking: Ask, folder: Path, tmp_path: Path) -> None:
    """So is the model of all, which is for the coordinator to download."""
    known = open_folder(folder).tensors
    of_all = ModelSources.of(ClusterConfig(model="brigade/tiny"), None, None)
    with asking(hub.endpoint, tmp_path):
        for wanted in (REPOSITORY, "/models/tiny"):
            with pytest.raises(ModelError, match="is not in its hub cache"):
                of_all.open_own(wanted, known, take)
        assert hub.asked == []
        test_hub.report("brigade/tiny")  # a shard of layers [0, 2): the files of these layers are in the cache
        hub.asked.clear()
        for wanted in (REPOSITORY, "/models/tiny"):
            assert of_all.open_own(wanted, known, take).name == REPOSITORY
        for name in ("brigade/tiny", REPOSITORY):
            found = ModelSources().open_own(name, known, partial(check_files, start=0, end=2))
            assert (found.name, found.fingerprint) == (REPOSITORY, open_folder(folder).fingerprint)
            assert found.download is None and set(found.hub_hashes) == {FIRST, SECOND, THIRD}
        with pytest.raises(ModelError, match=f"^lacks {THIRD}.*; `hf download brigade/tiny --revision {COMMIT}`, or"):
            ModelSources().open_own(REPOSITORY, known, partial(check_files, start=2, end=4))
    assert hub.asked == []
