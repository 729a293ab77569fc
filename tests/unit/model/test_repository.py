"""What may be a model's place, by its name alone."""

from pathlib import Path

import pytest

from worker.errors import InputError, ModelError
from worker.model.repository import is_on_hub, require_model
from worker.node.loading import open_checkpoint


@pytest.mark.parametrize("model", ["demo", "owner/name", "owner/name@main", "~", "."])
def test_the_bundled_model_a_repository_and_a_folder_may_be_a_model(model: str) -> None:
    require_model(model)


@pytest.mark.parametrize("model", ["", "nope", "./models/nope", "models/nope", "a/b/c", "~nobody-here/model", "a\0b"])
def test_a_name_that_is_neither_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(InputError, match=r"^model: expected a folder, a hub repository \(owner/name\) or `demo`"):
        require_model(model)


def test_a_name_below_a_folder_needs_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_on_hub("owner/name")
    (tmp_path / "owner").mkdir()
    assert is_on_hub("owner/name@main") and not is_on_hub("owner/name")
    with pytest.raises(ModelError, match=r"^model folder owner/name does not exist"):
        open_checkpoint("owner/name")
