"""Smoke on real nodes: the whole way is tried, hop by hop, and nobody who serves is disturbed."""

from pathlib import Path

import pytest

from coordinator.cluster import deployment
from coordinator.cluster.options import ClusterOptions
from coordinator.examine.smoke import NUM_TOKENS, try_cluster
from tests.integration.certificates import Certificates
from tests.integration.conftest import Models, answer, opened, serving
from worker.config import Cluster, Tls, Worker
from worker.errors import NodeBusy
from worker.model.checkpoint import open_folder
from worker.model.describe import describe


def options_of(folder: Path, *addresses: str, keys: Path | None = None) -> ClusterOptions:
    workers = tuple(Worker(name=f"node-{i}", address=each) for i, each in enumerate(addresses, 1))
    return ClusterOptions(Cluster(workers=workers, tls=Tls(keys=str(keys)) if keys else None), str(folder), None, 128)


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
async def test_the_tokens_are_the_models_and_every_hop_is_told(
    models: Models, tmp_path: Path, is_encrypted: bool
) -> None:
    whole, certificates = models("qwen3"), Certificates(tmp_path)
    certificates.coordinator()
    network_of = {"network_of": certificates.network} if is_encrypted else {}
    async with serving(2, **network_of) as nodes:
        keys = certificates.authority.folder if is_encrypted else None
        trial = await try_cluster(options_of(whole.folder, *(node.address for node in nodes), keys=keys))
    assert trial.is_same and trial.first.tokens == whole.tokens(range(1, 9), NUM_TOKENS)
    assert [f"{hop.source} → {hop.target}" for hop in trial.hops] == [
        "coordinator → node-1", "node-1 → node-2", "node-2 → coordinator",
    ]  # fmt: skip
    rows = 8 + NUM_TOKENS - 1  # of the prompt, and each token but the last
    least = rows * describe(open_folder(whole.folder)).row_bytes
    assert all(least < hop.sent_bytes < least + 8192 for hop in trial.hops[:2]) and 0 < trial.hops[2].sent_bytes < 8192
    assert all(0 <= hop.frame_ms < 1000 for hop in trial.hops)


async def test_a_worker_that_serves_somebody_else_goes_on(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = models("qwen3")
    async with serving(1) as nodes, opened(whole.folder, (2, 2), nodes) as chain:
        monkeypatch.setattr(deployment, "COORDINATOR_ID", "another process")
        with pytest.raises(NodeBusy, match="already serves another coordinator"):
            await try_cluster(options_of(whole.folder, nodes[0].address))
        monkeypatch.undo()
        assert (await answer(chain, [1, 2, 3], 4)).tokens == whole.tokens([1, 2, 3], 4)
