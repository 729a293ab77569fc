"""Nodes on this machine: the shard and the thread of this process, and workers that it starts itself."""

from contextlib import closing
from pathlib import Path

import pytest

from coordinator.cluster.deployment import Deployment, OwnNode
from coordinator.cluster.local import LocalWorker
from coordinator.planning.plan import Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS
from protos.brigade_pb2 import LoadProgress
from tests.tiny import make_model
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.platform.threads import MlxThread


def deployment_of(folder: Path) -> Deployment:
    checkpoint = open_folder(folder)
    spec = describe(checkpoint)
    return Deployment(checkpoint, spec, plan(spec, [Node("coordinator", 1 << 40)], NO_SPEEDS, Objective(128)), [])


async def test_a_shard_is_kept_only_for_the_checkpoint_that_it_is_of(tmp_path: Path) -> None:
    one, other = (deployment_of(make_model(tmp_path / str(seed), seed=seed)) for seed in (1, 2))
    assert one.plan.layers == other.plan.layers
    phases: list[str] = []

    def note(node: str, report: LoadProgress) -> None:
        if report.phase == "kept" or phases[-1:] != [report.phase]:
            phases.append(report.phase)

    async with OwnNode() as own:
        for deployment in (one, one, other, other):
            await own.load(deployment, note)
    assert phases == ["load", "kept", "load", "kept"]


async def test_a_thread_that_others_use_too_outlives_the_node() -> None:
    with closing(MlxThread()) as thread:
        async with OwnNode(thread):
            pass
        assert await thread.run(lambda: 3) == 3
    async with OwnNode() as own:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        await own.thread.run(lambda: 3)


@pytest.mark.parametrize("search_path", [None, "", ":"])
async def test_a_worker_of_our_own_runs_no_code_of_the_folder_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search_path: str | None
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('not what was meant')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if search_path is not None:
        monkeypatch.setenv("PYTHONPATH", search_path)
    worker = await LocalWorker.start("worker-1", "demo")
    await worker.stop()
