"""What a command says that is interrupted."""

import asyncio

import pytest

from coordinator.bench import bench as measuring
from coordinator.bench.bench import Workload
from coordinator.cli import bench
from coordinator.cluster.options import cluster_options


def test_whoever_interrupts_a_bench_is_told_that_there_are_no_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure(*arguments: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(measuring, "measure", measure)
    options = cluster_options(None, "demo", 1, None, None)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(bench.run_bench(options, Workload((1,), 8, 8, (), (), 1), as_json=False, plot=None))
    assert capsys.readouterr() == ("", "interrupted before all was measured: no figures\n")
