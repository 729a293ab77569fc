"""Many requests at once on real worker processes: the tokens of each alone, and no stream stalls behind a prompt."""

import json
from pathlib import Path
from typing import Any

from tests.cluster.models import make_talker
from tests.cluster.processes import Starter, write_cluster

NAMES = ("first", "last")


def run_scenario(start: Starter, folder: Path, scenario: str, **config: Any) -> dict[str, Any]:
    """What `tests.cluster.side_by_side` prints on three nodes."""
    model = make_talker(folder / "model", mask_token_id=0, head_dim=64, **config)
    workers = [start.worker(name, "--model", model) for name in NAMES]
    cluster = write_cluster(
        folder / "cluster.yaml", *((worker.name, worker.address) for worker in workers), model=str(model)
    )
    outcome = start.python("-m", "tests.cluster.side_by_side", scenario, cluster).wait(90)
    assert outcome.code == 0, outcome.err
    for worker in workers:
        worker.wait_slots(0, 10.0)
    return dict(json.loads(outcome.out))


def test_sixteen_mixed_requests_at_once_are_each_what_they_are_alone(start: Starter, tmp_path: Path) -> None:
    """Prompts, lengths, decoders, seeds and temperatures all differ; over three nodes."""
    found = run_scenario(start, tmp_path, "mixed")
    assert found["together"] == found["alone"]
    assert found["overlapped"], "one after another proves little"
    assert len({tuple(tokens) for tokens in found["alone"]}) == 16


def test_no_stream_waits_for_more_than_one_chunk_of_a_long_prompt(start: Starter, tmp_path: Path) -> None:
    """Between two tokens of a stream at most one chunk comes back, of a model that is slower than its coordinator."""
    found = run_scenario(
        start, tmp_path, "long prompt", num_hidden_layers=6, hidden_size=256, intermediate_size=1024
    )  # fmt: skip
    assert found["num_chunks"] >= 8
    assert found["tokens_meanwhile"] >= 3 * found["num_chunks"] / 2, "the streams stood still"
    assert max(found["chunks_between"]) == 1
