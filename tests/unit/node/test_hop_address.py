"""A node's two ports: that of its hops follows from the other."""

import pytest

from worker.errors import ConfigError
from worker.node.network import hop_address


@pytest.mark.parametrize(
    ("address", "hops"),
    [
        ("127.0.0.1:50070", "127.0.0.1:60070"),
        ("mini.local:1", "mini.local:10001"),
        ("[::1]:50070", "[::1]:60070"),
        ("mini:55535", "mini:65535"),
        ("mini:55536", "mini:45536"),
        ("mini:65535", "mini:55535"),
    ],
)
def test_hops_come_to_a_port_10000_higher_or_lower_where_there_is_none(address: str, hops: str) -> None:
    assert hop_address(address) == hops


def test_an_address_without_a_port_has_none_for_hops() -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        hop_address("mini")
