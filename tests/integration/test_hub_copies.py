"""Repositories and folders as copies of each other: of files that are not here the hub's hashes count, else bytes."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3

from tests.integration import test_hub
from tests.integration.test_hub import FIRST, SECOND, THIRD, Hub, _etag, serving, start

model, folder = test_hub.model, test_hub.folder  # fixtures

COMPARE = """
import json, sys
from worker.errors import ModelError
from worker.model.contents import check_contents, contents_of
from worker.node.loading import open_checkpoint

def said(ours, theirs):
    try:
        check_contents(ours, contents_of(theirs))
    except ModelError as error:
        return str(error)

names = json.loads(sys.argv[1])
copies = [open_checkpoint(name) for name in names]

def table():
    return [[said(ours, theirs) for theirs in copies] for ours in copies]

report = {"hashes": dict(contents_of(copies[0]).hub_hashes), "before": table()}
for checkpoint in copies:
    checkpoint.fetch(checkpoint.tensors, lambda nbytes: None)
print(json.dumps(report | {"after": table()}))
"""


@pytest.fixture(scope="module")
def tuned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other values in its second file."""
    copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("tuned") / "model"))
    tensors = {name: tensor * 1.01 for name, tensor in mx.load(str(copy / SECOND)).items()}
    mx.save_safetensors(str(copy / SECOND), tensors)
    return copy


def test_copies_from_hubs_and_folders_are_compared_in_what_both_know(
    model: qwen3.Model, folder: Path, tuned: Path, tmp_path: Path
) -> None:
    repositories = {
        f"brigade/{name}": {path.name: path.read_bytes() for path in copy.iterdir()}
        for name, copy in (("tiny", folder), ("tuned", tuned))
    }
    copies = ["brigade/tiny", "brigade/tuned", str(folder), str(tuned)]
    with serving(Hub(repositories)) as hub:
        process = start(COMPARE, json.dumps(copies), hub.endpoint, tmp_path)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["hashes"] == {file: _etag((folder / file).read_bytes()) for file in (FIRST, SECOND, THIRD)}
    differ = f"its weights in {SECOND} differ from the coordinator's; copy the same model to both nodes"
    everywhere = [[None, differ, None, differ], [differ, None, differ, None]] * 2
    assert report["after"] == everywhere
    unread = [[None, differ, None, None], [differ, None, None, None]]  # of a folder no hub's hash is known
    assert report["before"] == [*unread, [None, None, None, differ], [None, None, differ, None]]
