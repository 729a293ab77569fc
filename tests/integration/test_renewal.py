"""A coordinator that runs for long: the next chain is opened with its certificate as the file is by then."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.deploy.authority import Authority
from coordinator.planning.recovery import Limits
from tests.integration.certificates import Certificates
from tests.integration.conftest import Models
from tests.integration.many import Live, request, tokens_of
from tests.integration.test_recovery import COMES_BACK, LAYERS, assert_equal, supervised, tight, unfailed
from worker.errors import StageLost
from worker.node.certificates import Role

ASKED = request(tokens_of(5), 40)


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    return models("qwen3").folder


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def test_a_renewed_certificate_opens_the_next_chain(folder: Path, certificates: Certificates) -> None:
    """The authority is another one, since the file was read: to the worker the old certificate is worth nothing."""

    [expected] = await unfailed(folder, [ASKED])
    async with supervised(folder, COMES_BACK, network_of=certificates.of) as rig, rig.engine() as engine:
        live = Live(engine, ASKED)
        await live.wait_pieces(5)
        renewed = Authority.make(certificates.authority.folder, replace=True)
        for place in rig.places:
            renewed.issue(place.name, Role.WORKER)
        renewed.issue("coordinator", Role.COORDINATOR)
        for place in rig.places:
            await place.stop()
            await place.start()
        assert_equal([await live.answer()], [expected])
        assert rig.cluster.chain.plan.layers == list(LAYERS), "or this node alone has answered"


async def test_where_it_has_expired_the_reason_is_told_once_the_time_is_over(
    folder: Path, certificates: Certificates
) -> None:
    async with (
        supervised(folder, Limits(0, 0.5), memory=tight(folder), network_of=certificates.of) as rig,
        rig.engine() as engine,
    ):
        live = Live(engine, ASKED)
        await live.wait_pieces(5)
        expired = datetime.now(UTC) - timedelta(seconds=1)
        certificates.authority.issue("coordinator", Role.COORDINATOR, begins=expired - timedelta(days=1), until=expired)
        rig.cluster.chain.peers[0].detach()
        with pytest.raises(
            StageLost, match=r"did not come back within 0.5 s.* \(\S*coordinator\.pem: the certificate expired"
        ):
            await live.answer()
