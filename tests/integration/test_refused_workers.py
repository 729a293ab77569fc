"""Workers that this node does not trust, or that do not trust it: reported at once, and not counted as missing."""

import asyncio
from pathlib import Path

import pytest

from coordinator.cluster.open import open_cluster
from coordinator.cluster.options import ClusterOptions
from coordinator.planning.recovery import Limits
from tests.integration.certificates import Certificates
from tests.integration.conftest import Models, RunningNode, serving
from worker.config import ClusterConfig, TlsConfig, WorkerConfig
from worker.errors import BrigadeError, CallerRefused, ConfigError
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.node.certificates import Role

FOREVER = Limits(arrival_s=3600)
NOBODY = WorkerConfig(name="ghost", address=("127.0.0.1:1",))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def refusal(folder: Path, node: RunningNode, keys: Path | None, kind: type[BrigadeError]) -> str:
    """What opening a cluster over this node and one that never answers fails with."""
    workers = (WorkerConfig(name=node.name, address=(node.address,)), NOBODY)
    cluster = ClusterConfig(workers=workers, tls=TlsConfig(keys=str(keys)) if keys else None)
    checkpoint = open_folder(folder)
    options = ClusterOptions(cluster, str(folder), None, 128, limits=FOREVER)
    async with asyncio.timeout(60):
        with pytest.raises(kind) as caught:
            async with open_cluster(options, checkpoint, describe(checkpoint), 128):
                pass
    assert caught.value.node == node.name
    return caught.value.message


async def test_a_worker_of_another_authority_is_reported_while_another_one_is_awaited(
    models: Models, certificates: Certificates
) -> None:
    certificates.coordinator()
    async with serving(1, network_of=lambda name: certificates.wrong("foreign", name, Role.WORKER)) as [node]:
        found = await refusal(models("qwen3").folder, node, certificates.authority.folder, ConfigError)
    assert found == "its certificate is of another authority; brigade keys issue node-1 makes one of ours"


async def test_a_coordinator_without_tls_is_told_that_the_worker_expects_it(
    models: Models, certificates: Certificates
) -> None:
    async with serving(1, network_of=certificates.network) as [node]:
        found = await refusal(models("qwen3").folder, node, None, CallerRefused)
    assert "expects TLS" in found and "set `tls:` in cluster.yaml" in found
