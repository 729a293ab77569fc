"""A model type that no test has seen: it runs, says so once, and steps alone."""

import asyncio
from pathlib import Path

import pytest

from coordinator.cluster.open import read_model
from tests.tiny import make_model
from worker.model import families
from worker.model.checkpoint import open_folder
from worker.model.families import LaneForm, lane_form


def test_a_type_that_no_test_has_seen_says_so_once_and_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model(tmp_path / "model")
    asyncio.run(read_model(str(folder)))
    assert capsys.readouterr().err == "" and lane_form(open_folder(folder).config) is LaneForm.ROWS
    monkeypatch.delitem(families._LANE_OF, "qwen3")
    asyncio.run(read_model(str(folder)))
    said = "note: no test has seen a qwen3 model yet; compare with `brigade verify` before you rely on it\n"
    assert capsys.readouterr().err == said
    assert lane_form(open_folder(folder).config) is LaneForm.ALONE
