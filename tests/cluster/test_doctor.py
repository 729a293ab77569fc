"""`brigade doctor` as a command, with real workers: what it prints, and its exit code."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.deploy import checks
from tests.cluster.commands import run_here
from tests.cluster.processes import Worker, starting, write_cluster


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Worker, Worker]]:
    with starting() as start:
        yield start.worker("one"), start.worker("two")


@pytest.fixture(autouse=True)
def no_hop_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with other tests: how fast one is, is no claim here."""
    monkeypatch.setattr(checks, "_VERY_SLOW_MS", 10_000.0)


@pytest.fixture
def cluster(workers: tuple[Worker, Worker], tmp_path: Path) -> Path:
    return write_cluster(tmp_path / "cluster.yaml", *((each.name, each.address) for each in workers))


def test_it_prints_a_line_per_finding_and_ends_with_0_where_there_is_nothing_to_fix(cluster: Path) -> None:
    done = run_here("doctor", "--config", cluster)
    assert done.code == 0, done.err  # progress is told once it takes long
    lines = done.out.splitlines()
    for about in ("coordinator", "one", "two", "coordinator → one", "one → two", "coordinator ← two", "all nodes"):
        assert about in lines
    assert lines[-1].startswith("nothing to fix; ") and not any("FIX" in line for line in lines)
    assert sum(" of each token (round trip " in line for line in lines) == 3
    assert sum("8 tokens through every node, twice, in " in line for line in lines) == 1


def test_without_a_configuration_this_machine_alone_is_examined() -> None:
    done = run_here("doctor", "--json")
    found = json.loads(done.out)
    assert done.code == (1 if found["must_be_mended"] else 0)
    assert ([node["node"] for node in found["nodes"]], found["hops"], found["trial"]) == (["coordinator"], [], None)


def test_a_problem_makes_the_exit_code_1(workers: tuple[Worker, Worker], tmp_path: Path) -> None:
    one, _ = workers
    config = write_cluster(tmp_path / "cluster.yaml", ("one", one.address), ("gone", "127.0.0.1:1"))
    done = run_here("doctor", "--config", config, "--model", tmp_path / "nowhere", "--json")
    found = json.loads(done.out)
    assert (done.code, found["must_be_mended"]) == (1, 2)
    worst = {each["kind"]: each for each in found["findings"] if each["level"] == "must be mended"}
    assert set(worst) == {"unreachable", "model"} and worst["unreachable"]["about"] == "gone"
    assert worst["unreachable"]["fix"] == f"there: brigade worker --config {config} --name gone"
    assert [node["error"] is None for node in found["nodes"]] == [True, True, False]
    assert found["trial"] is None
