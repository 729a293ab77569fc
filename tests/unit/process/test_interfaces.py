"""Where a node that listens on an address is reached."""

import pytest

from worker.process.interfaces import Interface, listened_on, own_interfaces

LO = Interface("lo0", ("127.0.0.1", "::1"))
BRIDGE = Interface("bridge0", ("169.254.10.2",))
WIFI = Interface("en0", ("192.168.1.7", "fd00::7"))
VPN = Interface("utun3", ("100.64.0.1",), is_tunnel=True)
ALL = [LO, BRIDGE, WIFI, VPN]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", [("lo0", ("127.0.0.1",))]),
        ("169.254.10.2", [("bridge0", ("169.254.10.2",))]),
        ("100.64.0.1", [("utun3", ("100.64.0.1",))]),
        ("10.0.0.1", []),
        ("0.0.0.0", [("bridge0", ("169.254.10.2",)), ("en0", ("192.168.1.7",))]),
        ("::", [("bridge0", ("169.254.10.2",)), ("en0", ("192.168.1.7", "fd00::7"))]),
    ],
)
def test_a_wildcard_is_every_link_and_an_address_its_own(
    host: str, expected: list[tuple[str, tuple[str, ...]]]
) -> None:
    assert [(each.name, each.addresses) for each in listened_on(host, ALL)] == expected


def test_a_wildcard_is_loopback_where_there_is_nothing_else() -> None:
    assert [each.name for each in listened_on("0.0.0.0", [LO])] == ["lo0"]


def test_this_machine_has_loopback_and_no_address_of_a_link_alone() -> None:
    found = own_interfaces()
    assert any(each.is_loopback for each in found)
    assert not [a for each in found for a in each.addresses if a.startswith("fe80")]
