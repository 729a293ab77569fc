"""Who is there, beside whom the configuration names."""

from coordinator.finding.browse import Found, addresses_in, merged
from coordinator.finding.media import Medium
from coordinator.finding.present import presence
from coordinator.finding.ways import Map
from worker.config import Cluster, Worker
from worker.node.announcement import About
from worker.process.interfaces import Interface

HERE = Map([Interface("lo", ("127.0.0.1",))], {"lo": Medium.UNSPECIFIED})


def about(name: str, process: str = "00000001", fingerprint: str = "") -> About:
    return About(name, "0.1.0", process, fingerprint)


def cluster(*workers: tuple[str, str]) -> Cluster:
    return Cluster(workers=tuple(Worker(name=name, address=address) for name, address in workers))


def test_a_node_that_is_heard_on_two_links_is_one_node() -> None:
    heard = [Found(about("mini"), ("10.0.0.2:1",)), Found(about("mini"), ("10.9.0.2:1", "10.0.0.2:1"))]
    assert merged(heard) == [Found(about("mini"), ("10.0.0.2:1", "10.9.0.2:1"))]


def test_two_processes_of_one_name_are_two() -> None:
    heard = [Found(about("mini", "00000001"), ("10.0.0.2:1",)), Found(about("mini", "00000002"), ("10.0.0.3:1",))]
    assert len(presence(heard, None, HERE)) == 2


def test_who_is_configured_comes_first_and_who_was_not_heard_last() -> None:
    heard = [Found(about("alien"), ("127.0.0.1:9",)), Found(about("mini"), ("127.0.0.1:1",))]
    found = presence(heard, cluster(("mini", "127.0.0.1:1"), ("gone", "127.0.0.1:2")), HERE)
    said = [(node.name, node.is_announced, node.is_configured, node.is_elsewhere) for node in found]
    assert said == [("mini", True, True, False), ("alien", True, False, False), ("gone", False, True, False)]


def test_a_name_at_another_address_is_told_from_the_configured_one() -> None:
    [node] = presence([Found(about("mini"), ("127.0.0.1:7",))], cluster(("mini", "127.0.0.1:1")), HERE)
    assert node.is_elsewhere
    assert node.to_json()["addresses"] == [
        {"address": "127.0.0.1:7", "interface": "lo", "medium": "loopback", "is_configured": False}
    ]


def test_without_a_configuration_nobody_is_in_it_or_not() -> None:
    [node] = presence([Found(about("mini", fingerprint="ab" * 32), ("127.0.0.1:7",))], None, HERE)
    assert node.to_json()["is_configured"] is None
    assert node.to_json()["addresses"][0]["is_configured"] is None


def test_only_what_can_be_called_is_an_address() -> None:
    assert addresses_in(["10.0.0.2", "fe80::1", "fd00::2", "224.0.0.1", "0.0.0.0", "no"], 50070) == (
        "10.0.0.2:50070",
        "[fd00::2]:50070",
    )
    assert addresses_in(["10.0.0.2"], 0) == ()
    assert len(addresses_in([f"10.0.0.{i}" for i in range(99)], 1)) == 8


def test_the_best_link_comes_first() -> None:
    media = {"bridge0": Medium.THUNDERBOLT, "en0": Medium.WIFI, "en7": Medium.ETHERNET}
    sends_by = {"192": "en0", "10": "en7", "169": "bridge0"}  # by what an address begins with
    interfaces = [Interface(name, (f"own of {name}",)) for name in media]
    here = Map(interfaces, media, lambda address: f"own of {sends_by.get(address.partition('.')[0])}")
    ways = here.ways(["192.168.1.7:1", "10.0.0.7:1", "169.254.10.2:1", "1.2.3.4:1"])
    assert [(way.address, way.medium) for way in ways] == [
        ("169.254.10.2:1", Medium.THUNDERBOLT),
        ("10.0.0.7:1", Medium.ETHERNET),
        ("192.168.1.7:1", Medium.WIFI),
        ("1.2.3.4:1", Medium.UNSPECIFIED),
    ]
    assert str(ways[0]) == "169.254.10.2:1 by Thunderbolt (bridge0)"
    assert str(ways[-1]) == "1.2.3.4:1 by no interface of this machine"
