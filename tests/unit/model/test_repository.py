"""What may be a model's place, by its name alone."""

from pathlib import Path

import pytest

from worker.errors import InputError, ModelError
from worker.model.repository import require_model
from worker.node.loading import open_checkpoint


@pytest.mark.parametrize("model", ["demo", "owner/name", "owner/name@main", "~", "."])
def test_the_bundled_model_a_repository_and_a_folder_may_be_a_model(model: str) -> None:
    require_model(model)


@pytest.mark.parametrize("model", ["", "nope", "./models/nope", "a/b/c", "~nobody-here/model", "a\0b"])
def test_what_is_neither_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=r"^model: expected a folder, a hub repository \(owner/name\) or `demo`, found"
    ):
        require_model(model)


def test_the_home_of_nobody_is_a_folder_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="~nobody-here/model does not exist here"):
        open_checkpoint("~nobody-here/model")
