"""A draft model over real processes: the tokens are those without it, and every place says how many drafts held."""

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.commands import parse, run_here
from tests.cluster.models import make_talker
from tests.cluster.processes import Starter, write_cluster
from tests.cluster.servers import start_server

PROMPT = "Hello"


def counted(text: str) -> dict[tuple[str, str], float]:
    """The counters of drafts, by name and place."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(each.name, each.labels["place"]): each.value for each in samples if "drafts" in each.name}


def test_a_draft_model_changes_no_token_and_its_drafts_are_counted(
    start: Starter, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter is the model itself, which the last worker lacks and is sent."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    workers = [start.worker("mini", "--model", talker), start.worker("air")]
    nodes = [(worker.name, worker.address) for worker in workers]
    config = write_cluster(tmp_path / "cluster.yaml", *nodes, model=str(talker), layers="[1, 1, 2]")
    flags = ("generate", PROMPT, "--config", config, "--max-tokens", "12", "--seed", "3", "--temp", "0.8", "--json")
    drafted = parse(run_here(*flags, "--draft-model", talker, "--num-draft-tokens", "3"))
    expected = parse(run_here(*flags))
    assert drafted["tokens"] == expected["tokens"]
    assert drafted["stats"]["drafts_held"] == [1.0, 1.0, 1.0] and expected["stats"]["drafts_held"] == []
    assert drafted["stats"]["steps"] < expected["stats"]["steps"]

    other = make_talker(tmp_path / "other")
    tokenizer = other / "tokenizer.json"
    swapped = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizer.write_text(json.dumps(swapped), encoding="utf-8")
    refused = run_here(*flags, "--draft-model", other)
    assert (refused.code, refused.out) == (2, "")
    assert "--draft-model" in refused.err and len(refused.err.splitlines()) == 1

    server = start_server(start, talker, "--local", "1", "--draft-model", talker)
    assert counted(server.get("/metrics").text) == {}
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
    assert server.post("/v1/completions", **body, num_draft_tokens=2).status_code == 200
    found = counted(server.get("/metrics").text)
    assert {place for _, place in found} == {"1", "2"}
    for place in ("1", "2"):
        assert found["brigade_drafts_total", place] == found["brigade_drafts_held_total", place] > 0
