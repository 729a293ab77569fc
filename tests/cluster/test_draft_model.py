"""A draft model over real processes: the tokens are those without it, and drafts that held are counted everywhere."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.commands import answer_here
from tests.cluster.processes import Starter, write_cluster
from tests.cluster.servers import start_server

PROMPT = "Hello"


def test_a_draft_model_changes_no_token_and_its_drafts_are_counted(
    start: Starter, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter is the model itself, which the last worker lacks and is sent."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    workers = [start.worker("mini", "--model", talker), start.worker("air")]
    nodes = [(worker.name, worker.address) for worker in workers]
    config = write_cluster(tmp_path / "cluster.yaml", *nodes, model=str(talker), layers="[1, 1, 2]")
    flags = (PROMPT, "--config", config, "--max-tokens", "12", "--seed", "3", "--temp", "0.8")
    drafted = answer_here(*flags, "--draft-model", talker, "--num-draft-tokens", "3")
    expected = answer_here(*flags)
    assert drafted["tokens"] == expected["tokens"]
    assert drafted["stats"]["drafts_held"] == [1.0, 1.0, 1.0] and expected["stats"]["drafts_held"] == []
    assert drafted["stats"]["steps"] < expected["stats"]["steps"]

    server = start_server(start, talker, "--local", "0", "--draft-model", talker)
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
    assert server.post("/v1/completions", **body, num_draft_tokens=2).status_code == 200
    families = text_string_to_metric_families(server.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if "drafts" in sample.name]
    found = {(each.name, each.labels["place"]): each.value for each in samples}
    assert {place for _, place in found} == {"1", "2"}
    for place in ("1", "2"):
        assert found["brigade_drafts_total", place] == found["brigade_drafts_held_total", place] > 0
