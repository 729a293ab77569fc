"""What may be a model's place, by its name alone."""

from pathlib import Path

import pytest

from worker.errors import InputError
from worker.model.repository import require_model


@pytest.mark.parametrize("model", ["demo", "owner/name", "owner/name@main", "~", "."])
def test_the_bundled_model_a_repository_and_a_folder_may_be_a_model(model: str) -> None:
    require_model(model)


@pytest.mark.parametrize("model", ["", "nope", "./models/nope", "a/b/c", "~nobody-here/model", "a\0b"])
def test_a_name_that_is_neither_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^model: expected a folder, a hub repository \(owner/name\) or `demo`"):
        require_model(model)
