"""What may go unencrypted: this machine's own, and everything if the user says so; nothing where there are keys."""

from pathlib import Path

import pytest

from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK, serving
from worker.errors import ConfigError
from worker.node.network import Network

ELSEWHERE = ["0.0.0.0:0", "[::]:0", "192.168.1.7:50070", "mini.local:50070"]


@pytest.mark.parametrize("address", ELSEWHERE)
async def test_nothing_leaves_this_machine_unencrypted(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^will not listen on .*not encrypted.*`tls:`.*`insecure: true`"):
        NETWORK.listen(NETWORK.server(), address)
    with pytest.raises(ConfigError, match=r"^will not connect to mini at .*not encrypted.*`tls:`.*`insecure: true`"):
        NETWORK.channel("mini", address)


async def test_it_may_if_the_user_trusts_the_network() -> None:
    network = Network(insecure=True)
    server = network.server()
    assert network.listen(server, "0.0.0.0:0") > 0
    await server.stop(None)
    await network.channel("mini", "192.168.1.7:50070").close()


async def test_it_may_if_it_is_encrypted(tmp_path: Path) -> None:
    network = Certificates(tmp_path).network("mini")
    server = network.server()
    assert network.listen(server, "0.0.0.0:0") > 0
    await server.stop(None)
    await network.channel("air", "192.168.1.7:50070").close()


async def test_a_port_that_is_in_use_is_refused_by_name() -> None:
    async with serving(1) as [node]:
        with pytest.raises(ConfigError, match=rf"^cannot listen on {node.address}: in use"):
            NETWORK.listen(NETWORK.server(), node.address)
