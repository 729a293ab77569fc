"""`plan --simulate --config`: a forecast by what nodes have measured of themselves."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.bench import forecast
from coordinator.bench.forecast import profiled_pipeline
from coordinator.cli.app import app
from coordinator.cluster.peer import Peer
from coordinator.planning.plan import Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS, LinkSpeed, NodeSpeed, Survey
from tests.unit.planning.test_planner import GB, ROOMY, model, nodes
from worker.errors import InputError

FIRST = NodeSpeed((((1, 1.0), (8, 29.0)),), ((1, 1.0), (8, 1.0)), 100)
SECOND = NodeSpeed((((1, 2.0), (8, 58.0)),), ((1, 1.0), (8, 1.0)), 50)
KNOWN = Survey({"n0": FIRST, "n1": SECOND}, {"n1": LinkSpeed(rtt_ms=1.0, bytes_per_s=1e6)})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text("workers: [{name: n1, address: '127.0.0.1:1'}]", encoding="utf-8")
    return path


def test_a_plan_whose_nodes_have_measured_themselves_is_simulated_with_what_rows_cost() -> None:
    """Two layers each, of 1 ms and 4 more per further row, and twice that on the other node, which has the head."""
    spec = model([GB] * 4, hidden=500)
    found = profiled_pipeline(spec, plan(spec, nodes(ROOMY, ROOMY), NO_SPEEDS, Objective(1, layers=[2, 2])), KNOWN)
    assert found.stages_s(1) == pytest.approx([0.002, 0.005]) and found.stages_s(8) == pytest.approx([0.058, 0.117])
    assert [hop.seconds(2) for hop in found.hops] == pytest.approx([0.0025, 0.0005])
    alone = profiled_pipeline(spec, plan(spec, nodes(ROOMY), NO_SPEEDS, Objective(1)), KNOWN)
    assert alone.stages_s(1) == pytest.approx([0.005]) and alone.hops_s(1) == 0


def test_nodes_of_one_machine_are_not_simulated_from_themselves(config: Path) -> None:
    with pytest.raises(InputError, match="or workers on other machines, which are measured"):
        app(["plan", "--simulate", "--config", str(config)], standalone_mode=False)


@pytest.mark.parametrize("unknown", ["", "n1"])
def test_the_plan_of_a_cluster_is_simulated(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unknown: str
) -> None:
    """On the bundled model's 8 layers; a node that does not know its speed is named."""

    @asynccontextmanager
    async def open_peers(*given: object) -> AsyncIterator[list[Peer]]:
        yield []

    async def ask_nodes(*given: object) -> list[Node]:
        return nodes(ROOMY, ROOMY)

    async def known_speeds(*given: object) -> Survey:
        return Survey({name: each for name, each in KNOWN.speeds.items() if name != unknown}, KNOWN.ports)

    for fake in (open_peers, ask_nodes, known_speeds):
        monkeypatch.setattr(forecast, fake.__name__, fake)
    monkeypatch.setattr(forecast, "is_worth_measuring", lambda peers: True)
    arguments = ["plan", "--simulate", "--config", str(config), "--model", "demo", "--concurrency", "1", "--json"]
    if unknown:
        with pytest.raises(InputError, match="measured themselves, found n1"):
            app(arguments, standalone_mode=False)
        return
    app(arguments, standalone_mode=False)
    [found] = json.loads(capsys.readouterr().out)["simulated"]
    assert len(found["utilisation"]) == 2
    assert found["tokens_per_s"] == pytest.approx(1000 / (7 * 1 + 1 * 2 + 1 + 1.5), rel=0.05), "7 layers and one"
