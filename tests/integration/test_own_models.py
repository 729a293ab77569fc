"""What a coordinator may have a worker load: what the worker's user gave it, and no path that a coordinator names."""

import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration import test_hub
from tests.integration.conftest import Models, load, load_request, serving
from tests.integration.test_hub import COMMIT, FIRST, SECOND, THIRD, Ask, Hub
from tests.tiny import make_model
from worker.config import ClusterConfig, WorkerConfig
from worker.errors import ModelError
from worker.model.checkpoint import DEMO, Checkpoint, open_folder
from worker.model.contents import check_files
from worker.node.model_sources import ModelSources

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
                await load(node, request)
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
            assert (await load(node, request))[-1].phase == "load", name


async def test_a_workers_own_model_is_loaded_by_any_name_and_the_bundled_one_by_all(models: Models) -> None:
    own = models("qwen3").folder
    cases = [(str(own), load_request(own, 2, 4), name) for name in (str(own), "/etc", "../x", "demo")]
    cases += [(model, load_request(DEMO, 6, 8), "demo") for model in (None, str(own))]
    for model, request, name in cases:
        request.model = name
        async with serving(1, ModelSources(model)) as [node]:
            assert (await load(node, request))[-1].phase == "load", name


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
