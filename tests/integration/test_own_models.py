"""What a coordinator may have a worker load: what the worker's user gave it, and no path that a coordinator names."""

import os
import shutil
import sys
from collections.abc import Iterator
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

model, folder, hub, asking = test_hub.model, test_hub.folder, test_hub.hub, test_hub.asking  # fixtures

_noting: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _noting is not None and event in ("open", "os.listdir", "os.scandir"):
        _noting.append(os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else "")


@pytest.fixture(scope="module")
def hooked() -> None:
    sys.addaudithook(_note)  # for good: Python has no way to take it back


@pytest.fixture
def opened_paths(hooked: None) -> Iterator[list[str]]:
    """Every file and folder that Python opens from here on."""
    global _noting
    _noting = []
    yield _noting
    _noting = None


def take(checkpoint: Checkpoint) -> None:
    """A check that everything passes."""


# Paths


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A sound model where no worker of these tests may look."""
    return make_model(tmp_path / "outside")


@pytest.fixture
def root(tmp_path: Path, outside: Path) -> Path:
    """A folder of models, with what leads out of it."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    (root / "file").write_text("no folder")
    (root / "nested" / "deep").mkdir(parents=True)
    return root


async def test_no_path_that_a_coordinator_names_is_opened(
    root: Path, outside: Path, opened_paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    request = load_request(outside, 2, 4)  # it would be loaded, were it opened
    names = [str(outside), "../outside", f"{root}/../outside", f"{root}/link", "link", "outside", "nested/../link"]
    names += ["/etc", "/", "", ".", "..", "~", "loop", "file", "deep", f"{root}/nested/deep", "x\0", "x" * 70_000]
    names += ["é/../..@.."]
    async with serving(1, ModelSources(roots=(root, root / "not there"))) as [node]:
        for name in names:
            request.model = name
            opened_paths.clear()
            with pytest.raises(ModelError, match=r"opens no path that a peer names.* --model FOLDER_OR_REPO") as caught:
                await load(node, request)
            assert set(opened_paths) <= {str(root), str(root / "not there")}, name
            assert len(str(caught.value)) < 400 and str(caught.value).isprintable()


async def test_a_refusal_does_not_tell_what_is_on_the_disk(root: Path, outside: Path) -> None:
    request, said = load_request(outside, 2, 4), []
    async with serving(1, ModelSources(roots=(root,))) as [node]:
        for name in (str(outside), "/not/there", f"{root}/link", f"{root}/lonk"):
            request.model = name
            with pytest.raises(ModelError) as caught:
                await load(node, request)
            said.append(str(caught.value).replace(name, "NAME"))
    assert len(set(said)) == 1


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


async def test_a_worker_s_own_model_is_loaded_whatever_a_coordinator_calls_it(models: Models) -> None:
    whole = models("qwen3").folder
    request = load_request(whole, 2, 4)
    for name in (str(whole), "/etc", "../x", "demo"):
        request.model = name
        async with serving(1, ModelSources(str(whole))) as [node]:
            assert (await load(node, request))[-1].phase == "load", name


async def test_another_model_than_its_own_is_refused_as_such(models: Models) -> None:
    request = load_request(models("llama").folder, 2, 4)
    own = models("qwen3").folder
    async with serving(1, own) as [node]:
        with pytest.raises(ModelError, match=rf"its config.json of {own} \(sha256 .*copy the same model to both"):
            await load(node, request)


async def test_the_bundled_model_needs_no_permission(models: Models) -> None:
    request = load_request(DEMO, 6, 8)
    request.model = "demo"
    for models_of_node in (ModelSources(), ModelSources(str(models("qwen3").folder))):
        async with serving(1, models_of_node) as [node]:
            assert (await load(node, request))[-1].phase == "load"


@pytest.mark.parametrize(
    ("name", "flag", "expected"),
    [
        ("mini", "flag", "flag"),
        ("mini", None, "entry"),
        ("air", None, "top"),
        (None, None, "top"),
        ("air", "flag", "flag"),
    ],
)
def test_the_flag_wins_over_the_entry_and_the_entry_over_the_file(
    name: str | None, flag: str | None, expected: str
) -> None:
    workers = (
        WorkerConfig(name="mini", address="localhost:1", model="entry"),
        WorkerConfig(name="air", address="localhost:2"),
    )
    cluster = ClusterConfig(model="top", models=("shelf",), workers=workers)
    found = ModelSources.of(cluster, name, flag)
    assert found.cache is not None
    assert replace(found, cache=None) == ModelSources(expected, (Path("shelf"),), may_download_own=expected != "top")


def test_only_a_configuration_lets_a_node_download_whatever_it_is_asked_for() -> None:
    assert ModelSources.of(ClusterConfig(pull="none"), None, None) == ModelSources(None, (), may_download=False)
    assert ModelSources.of(ClusterConfig(pull="hub"), None, None).may_download


# The hub


REPOSITORY = f"brigade/tiny@{COMMIT}"


def test_a_repository_that_is_not_in_the_cache_is_asked_for_only_if_that_is_configured(
    hub: Hub, asking: Ask, tmp_path: Path
) -> None:
    with asking(hub.endpoint, tmp_path):
        for name in (REPOSITORY, "brigade/tiny", "brigade/tiny@main", "brigade/no..name"):
            with pytest.raises(ModelError, match=r"start it with --model brigade/tiny, or set `pull: hub`|correct it"):
                ModelSources("demo").open_own(name, {}, refuse_demo)
        assert hub.asked == []
        checkpoint = ModelSources(may_download=True).open_own(REPOSITORY, {}, take)
        assert checkpoint.name == REPOSITORY and checkpoint.download is not None
        assert hub.asked


def refuse_demo(checkpoint: Checkpoint) -> None:
    assert checkpoint.name == "demo"
    raise ModelError("correct it")


@pytest.mark.parametrize("own", ["brigade/tiny", "brigade/tiny@main"])
@pytest.mark.parametrize("wanted", [REPOSITORY, "/models/tiny", "elsewhere/tiny"])
def test_a_worker_s_own_repository_is_downloaded_without_asking(
    hub: Hub, asking: Ask, tmp_path: Path, own: str, wanted: str
) -> None:
    with asking(hub.endpoint, tmp_path):
        checkpoint = ModelSources(own).open_own(wanted, {}, take)
        assert checkpoint.name == REPOSITORY
        checkpoint.fetch(checkpoint.tensors, lambda nbytes: None)
    assert hub.downloads() >= {FIRST, SECOND, THIRD}
    assert not [path for _, path, _ in hub.asked if "elsewhere" in path]


@pytest.mark.parametrize("wanted", [REPOSITORY, "/models/tiny"])
def test_the_model_of_all_is_for_the_coordinator_to_download(
    hub: Hub, asking: Ask, folder: Path, tmp_path: Path, wanted: str
) -> None:
    known = open_folder(folder).tensors
    with asking(hub.endpoint, tmp_path):
        models = ModelSources.of(ClusterConfig(model="brigade/tiny"), None, None)
        with pytest.raises(ModelError, match="is not in its hub cache"):
            models.open_own(wanted, known, take)
        assert hub.asked == []
        test_hub.report("brigade/tiny")  # it downloads some of it
        hub.asked.clear()
        assert models.open_own(wanted, known, take).name == REPOSITORY
    assert hub.asked == []


def test_what_is_in_the_cache_is_opened_without_asking_the_hub(
    hub: Hub, asking: Ask, folder: Path, tmp_path: Path
) -> None:
    """The cache has the files of the first layers; of the others it tells what to do."""
    known = open_folder(folder).tensors
    with asking(hub.endpoint, tmp_path):
        test_hub.report("brigade/tiny")  # a shard of layers [0, 2)
        hub.asked.clear()
        for name in ("brigade/tiny", REPOSITORY):
            found = ModelSources().open_own(name, known, partial(check_files, start=0, end=2))
            assert (found.name, found.fingerprint) == (REPOSITORY, open_folder(folder).fingerprint)
            assert found.download is None and set(found.hub_hashes) == {FIRST, SECOND, THIRD}
        with pytest.raises(ModelError, match=f"^lacks {THIRD}.*; `hf download brigade/tiny --revision {COMMIT}`, or"):
            ModelSources().open_own(REPOSITORY, known, partial(check_files, start=2, end=4))
    assert hub.asked == []
