"""Tokenizers of hub repositories: what is only data always comes, code only once it is trusted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.engine.tokenizer import Tokenizer
from tests.code_tokenizer import CODE, IMPORTED, code_kept_in, write_code_tokenizer, write_model_code
from tests.integration.test_hub import COMMIT, Ask, Hub, asking, serving
from tests.tiny import make_model
from worker.errors import ModelError
from worker.model.hub import open_repository

__all__ = ["asking"]  # a fixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi") / "model"
    make_model(folder)
    write_model_code(folder)
    return write_code_tokenizer(folder)


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    with serving(Hub({"brigade/kimi": {path.name: path.read_bytes() for path in folder.iterdir()}})) as hub:
        yield hub


def test_code_is_not_even_fetched_before_it_is_trusted(hub: Hub, asking: Ask, tmp_path: Path) -> None:
    with asking(hub.endpoint, tmp_path):
        checkpoint = open_repository("brigade/kimi")
        with pytest.raises(
            ModelError, match=f"{hub.endpoint}/brigade/kimi/blob/{COMMIT}/{CODE}\n.*--trust-remote-code"
        ):
            Tokenizer(checkpoint)
    assert "tiktoken.model" in hub.downloads()
    assert not [file for file in hub.downloads() if file.endswith(".py")]


def test_of_code_that_is_trusted_what_the_tokenizer_needs_is_fetched_and_no_more(
    hub: Hub, asking: Ask, tmp_path: Path
) -> None:
    with asking(hub.endpoint, tmp_path), code_kept_in(tmp_path / "modules"):
        tokenizer = Tokenizer(open_repository("brigade/kimi"), trust_remote_code=True)
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert {file for file in hub.downloads() if file.endswith(".py")} == {CODE, IMPORTED}
    asked = [path for _, path, _ in hub.asked if path.endswith(CODE)]
    assert asked and all(f"/{COMMIT}/" in path for path in asked), "in the state that was read, whatever is there now"
