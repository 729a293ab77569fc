"""Workers that announced themselves are asked who they are; only a certificate counts."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.deploy import cluster_file
from coordinator.deploy.cluster_file import coordinator_in, unproven
from coordinator.deploy.discovery import Endpoint, FoundNode
from protos.brigade_pb2 import MEDIUM_LOOPBACK
from tests.integration.certificates import Certificates
from tests.integration.conftest import serving
from worker.node.certificates import Role
from worker.node.network import Network


def chosen(address: str, names: Sequence[str]) -> list[FoundNode]:
    endpoints = [Endpoint(address, "lo", MEDIUM_LOOPBACK)]
    return [FoundNode(name, "0.1.0", "ab" * 32, True, None, endpoints) for name in names]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def test_a_worker_has_the_name_of_its_certificate_and_no_other(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(1, network_of=certificates.network) as [node]:
        workers = chosen(node.address, ("node-1", "air"))
        monkeypatch.setattr(cluster_file, "_HELLO_S", 30.0)  # however busy the machine is
        [(name, why)] = (await unproven(workers, certificates.coordinator())).items()
        assert name == "air" and "certificate carries another name" in why
        stranger = certificates.wrong("foreign", "coordinator", Role.COORDINATOR)
        monkeypatch.setattr(cluster_file, "_HELLO_S", 0.3)  # which the next one waits for
        assert list(await unproven(workers, stranger)) == ["node-1", "air"]


async def test_without_certificates_a_worker_is_at_least_one_of_that_name() -> None:
    async with serving(1) as [node]:
        whys = await unproven(chosen(node.address, ("node-1", "air")), Network())
        assert whys == {"air": f"the worker at {node.address} has another name"}


def test_the_coordinator_is_whose_certificate_is_there(certificates: Certificates) -> None:
    folder = certificates.authority.folder
    certificates.authority.issue("mini", Role.WORKER)
    (folder / "notes.pem").write_text("no certificate")
    assert coordinator_in(folder) is None and coordinator_in(folder / "nowhere") is None
    certificates.authority.issue("studio", Role.COORDINATOR)
    assert coordinator_in(folder) == "studio"
    certificates.authority.issue("laptop", Role.COORDINATOR)
    assert coordinator_in(folder) is None
