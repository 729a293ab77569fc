"""Which nodes are there, over which links they are reached, and what the configuration has of them."""

import errno
import socket
from types import SimpleNamespace

import pytest

from coordinator.deploy import discovery
from coordinator.deploy.discovery import (
    Endpoint,
    Heard,
    LocalNetwork,
    found_nodes,
    source_address,
    usable_addresses,
)
from protos.brigade_pb2 import (
    MEDIUM_ETHERNET,
    MEDIUM_LOOPBACK,
    MEDIUM_THUNDERBOLT,
    MEDIUM_TUNNEL,
    MEDIUM_UNSPECIFIED,
    MEDIUM_WIFI,
    Medium,
)
from worker.config import ClusterConfig, WorkerConfig
from worker.node.announce import About
from worker.platform.interfaces import Interface

HERE = LocalNetwork([Interface("lo", ("127.0.0.1",))], {"lo": MEDIUM_UNSPECIFIED})


def about(name: str, process: str = "00000001", fingerprint: str = "") -> About:
    return About(name, "0.1.0", process, fingerprint)


def cluster(*workers: tuple[str, str]) -> ClusterConfig:
    return ClusterConfig(workers=tuple(WorkerConfig(name=name, address=address) for name, address in workers))


def test_a_node_that_is_heard_on_two_links_is_one_node_and_two_processes_are_two() -> None:
    heard = Heard()
    heard.add(about("mini"), ("10.0.0.2:1",))
    heard.add(about("mini"), ("10.9.0.2:1", "10.0.0.2:1"))
    [node] = found_nodes(heard.nodes, None, HERE)
    assert {each.address for each in node.endpoints} == {"10.0.0.2:1", "10.9.0.2:1"}
    heard.add(about("mini", "00000002"), ("10.0.0.3:1",))
    assert len(found_nodes(heard.nodes, None, HERE)) == 2


def test_who_is_configured_comes_first_and_who_was_not_heard_last() -> None:
    heard = {about("alien"): ["127.0.0.1:9"], about("mini"): ["127.0.0.1:1"]}
    found = found_nodes(heard, cluster(("mini", "127.0.0.1:1"), ("gone", "127.0.0.1:2")), HERE)
    said = [(node.name, node.is_announced, node.is_configured, node.is_elsewhere) for node in found]
    assert said == [("mini", True, True, False), ("alien", True, False, False), ("gone", False, True, False)]


def test_a_name_at_another_address_is_told_from_the_configured_one() -> None:
    heard = {about("mini", fingerprint="ab" * 32): ["127.0.0.1:7"]}
    [node] = found_nodes(heard, cluster(("mini", "127.0.0.1:1")), HERE)
    assert node.is_elsewhere
    assert node.as_json()["addresses"] == [
        {"address": "127.0.0.1:7", "interface": "lo", "medium": "loopback", "is_configured": False}
    ]
    [node] = found_nodes(heard, None, HERE)  # without a configuration
    assert node.as_json()["is_configured"] is None and node.as_json()["addresses"][0]["is_configured"] is None


def test_only_what_can_be_called_is_an_address() -> None:
    called = ("10.0.0.2:50070", "[fd00::2]:50070")
    assert usable_addresses(["10.0.0.2", "fe80::1", "fd00::2", "224.0.0.1", "0.0.0.0", "no"], 50070) == called
    assert usable_addresses(["10.0.0.2"], 0) == ()
    assert len(usable_addresses([f"10.0.0.{i}" for i in range(99)], 1)) == 8


def test_a_cable_comes_before_ethernet_that_before_wifi_and_what_is_unknown_last() -> None:
    media = {f"en{number}": number for number in Medium.values()}
    interfaces = [Interface(name, (f"own of {name}",)) for name in media]
    here = LocalNetwork(interfaces, media, lambda address: f"own of en{address[0]}")
    assert [each.medium for each in here.endpoints([f"{number}.0.0.1:1" for number in Medium.values()])] == [
        MEDIUM_LOOPBACK, MEDIUM_THUNDERBOLT, MEDIUM_ETHERNET, MEDIUM_WIFI, MEDIUM_TUNNEL, MEDIUM_UNSPECIFIED,
    ]  # fmt: skip
    assert all(Endpoint("10.0.0.2:1", "en0", number).link for number in Medium.values())
    assert Endpoint("127.0.0.1:1", "lo", MEDIUM_LOOPBACK).link == "this machine"
    assert MEDIUM_LOOPBACK in LocalNetwork.read().media.values(), "this machine has loopback"


def test_a_kernel_without_ipv6_reaches_no_such_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*kind: int) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    without = SimpleNamespace(socket=refuse, AF_INET6=socket.AF_INET6, SOCK_DGRAM=socket.SOCK_DGRAM)
    monkeypatch.setattr(discovery, "socket", without)
    assert source_address("[fe80::1]:50070") == ""
