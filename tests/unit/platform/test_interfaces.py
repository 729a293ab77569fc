"""Where a node that listens on an address is reached."""

import socket
from types import SimpleNamespace as Made

import psutil
import pytest

from worker.platform.interfaces import Interface, listened_on, own_interfaces

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
def test_a_wildcard_is_every_link_or_else_loopback(host: str, expected: list[tuple[str, tuple[str, ...]]]) -> None:
    assert [(each.name, each.addresses) for each in listened_on(host, ALL)] == expected
    assert [each.name for each in listened_on("0.0.0.0", [LO])] == ["lo0"]


def test_this_machine_has_loopback_and_no_address_of_a_link_alone() -> None:
    found = own_interfaces()
    assert any(each.is_loopback for each in found)
    assert not [a for each in found for a in each.addresses if a.startswith("fe80")]


def test_interfaces_are_those_that_are_up_with_an_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(*addresses: str, ptp: str | None = None) -> list[Made]:
        return [
            Made(family=socket.AF_INET6 if ":" in each else socket.AF_INET, address=each, ptp=ptp) for each in addresses
        ]

    entries = {
        "en0": at("10.0.0.2", "fd00::2", "fe80::2%en0"), "en1": at("10.0.0.3"), "en2": at("fe80::3%en2"),
        "en3": at("169.254.1.1"), "utun0": at("100.64.0.1", ptp="100.64.0.1"), "lo": at("127.0.0.1"),
    }  # fmt: skip
    states = {name: Made(isup=name != "en1") for name in entries if name != "en3"}  # of which nothing is known
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    assert own_interfaces() == [
        Interface("en0", ("10.0.0.2", "fd00::2")), Interface("en3", ("169.254.1.1",)),
        Interface("utun0", ("100.64.0.1",), is_tunnel=True), Interface("lo", ("127.0.0.1",)),
    ]  # fmt: skip
