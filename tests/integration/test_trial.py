"""Smoke on real nodes: every hop is tried, and no worker that serves is disturbed."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.cluster import deployment
from coordinator.cluster.options import ClusterOptions
from coordinator.deploy import doctor
from coordinator.deploy.checks import ModelInUse
from coordinator.deploy.doctor import Examination, try_answer
from coordinator.deploy.findings import ExaminedCluster, Finding, Kind, Level, problem
from coordinator.deploy.trial import NUM_TOKENS, ChainTrial, try_cluster
from tests.integration.certificates import Certificates
from tests.integration.conftest import Models, Whole, answer, opened, serving
from tests.unit.deploy import cases
from worker.config import ClusterConfig, TlsConfig, WorkerConfig
from worker.errors import NodeBusy, StageLost
from worker.model.checkpoint import open_folder
from worker.model.describe import describe


def options_of(folder: Path, *addresses: str, keys: Path | None = None) -> ClusterOptions:
    workers = tuple(WorkerConfig(name=f"node-{i}", address=each) for i, each in enumerate(addresses, 1))
    return ClusterOptions(
        ClusterConfig(workers=workers, tls=TlsConfig(keys=str(keys)) if keys else None), str(folder), None, 128
    )


async def test_the_tokens_are_the_models_and_every_hop_is_told_over_tls(models: Models, tmp_path: Path) -> None:
    whole, certificates = models("qwen3"), Certificates(tmp_path)
    certificates.coordinator()
    async with serving(2, network_of=certificates.network) as nodes:
        addresses = (node.address for node in nodes)
        trial = await try_cluster(options_of(whole.folder, *addresses, keys=certificates.authority.folder))
    assert trial.is_same and trial.first.tokens == whole.tokens(range(1, 9), NUM_TOKENS)
    assert [f"{hop.source} → {hop.target}" for hop in trial.hops] == [
        "coordinator → node-1", "node-1 → node-2", "node-2 → coordinator",
    ]  # fmt: skip
    rows = 8 + NUM_TOKENS - 1  # of the prompt, and each token but the last
    least = rows * describe(open_folder(whole.folder)).row_bytes
    assert all(least < hop.sent_bytes < least + 8192 for hop in trial.hops[:2]) and 0 < trial.hops[2].sent_bytes < 8192
    assert all(hop.frame_ms >= 0 for hop in trial.hops)


def examined(*findings: Finding) -> Examination:
    return Examination(ExaminedCluster([]), ModelInUse(), "toy", findings)


async def test_an_examination_ends_with_a_trial_unless_there_is_a_problem(models: Models) -> None:
    whole, wrong = models("qwen3"), problem(Kind.DISK, "node-1", "it is full", "free some space")
    async with serving(1) as nodes:
        options = options_of(whole.folder, nodes[0].address)
        found = await try_answer(options, examined())
        assert [(each.level, each.kind) for each in found.findings] == [(Level.OK, Kind.TRIAL)]
        assert found.trial and found.trial.is_same and found.as_json()["trial"] == found.trial.as_json()
        assert (await try_answer(options, examined(wrong))).findings == (wrong,)
    assert (await try_answer(options_of(whole.folder), examined())).findings == ()


async def test_memory_that_other_programs_hold_is_not_taken_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, spec = [cases.node("studio", cases.STUDIO), cases.node()], cases.model()
    found = Examination(ExaminedCluster(nodes), ModelInUse(spec), "big", ())
    free = SimpleNamespace(available=cases.GIB // 2)  # of the layer that the coordinator holds at least
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: free)
    [finding] = (await try_answer(options_of(Path("nowhere"), "127.0.0.1:1"), found)).findings
    assert (finding.level, finding.kind, finding.about) == (Level.NOTE, Kind.TRIAL, "studio")
    assert "512.0 MiB are free" in finding.text
    small = replace(found, cluster=ExaminedCluster([nodes[0], replace(nodes[1], configured_bytes=cases.GIB // 2)]))
    assert await try_answer(options_of(Path("nowhere"), "127.0.0.1:1"), small) is small, "a plan leaves it out"


async def test_a_trial_that_fails_is_a_problem(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(options: ClusterOptions) -> ChainTrial:
        raise StageLost("ended", node="node-1")

    monkeypatch.setattr(doctor, "try_cluster", fails)
    found = await try_answer(options_of(folder, "127.0.0.1:1"), examined())
    [finding] = found.findings
    assert (finding.level, finding.kind, found.is_healthy, found.trial) == (Level.PROBLEM, Kind.TRIAL, False, None)
    assert "node-1" in finding.text and finding.fix


async def test_a_trial_leaves_another_coordinators_worker_alone(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(1) as nodes, opened(whole.folder, (2, 2), nodes) as chain:
        monkeypatch.setattr(deployment, "COORDINATOR_ID", "another process")
        options = options_of(whole.folder, nodes[0].address)
        with pytest.raises(NodeBusy, match="already serves another coordinator"):
            await try_cluster(options)
        [finding] = (await try_answer(options, examined())).findings
        assert (finding.level, finding.kind) == (Level.NOTE, Kind.TRIAL) and "serves another" in finding.text
        monkeypatch.undo()
        assert (await answer(chain, [1, 2, 3], 4)).tokens == whole.tokens([1, 2, 3], 4)
