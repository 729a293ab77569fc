"""What the system tells of its interfaces, on samples of what it prints: no Mac was asked."""

from pathlib import Path

import pytest

from coordinator.finding.media import Medium, medium_in_sysfs, medium_of_port, parse_hardware_ports

PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: a0:ce:c8:01:02:03

Hardware Port: USB 10/100/1000 LAN
Device: en7
Ethernet Address: 00:e0:4c:68:01:02

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:a1:0b:22:33:40

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 88:66:5a:36:48:71

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 36:a1:0b:22:33:40

VLAN Configurations
===================
"""


def test_every_port_has_its_device() -> None:
    assert parse_hardware_ports(PORTS) == {
        "en0": "Ethernet",
        "en7": "USB 10/100/1000 LAN",
        "bridge0": "Thunderbolt Bridge",
        "en1": "Wi-Fi",
        "en2": "Thunderbolt 1",
    }
    assert parse_hardware_ports("networksetup: command not found") == {}


@pytest.mark.parametrize(
    ("port", "medium"),
    [
        ("Ethernet", Medium.ETHERNET),
        ("USB 10/100/1000 LAN", Medium.ETHERNET),
        ("Thunderbolt Ethernet Slot 1", Medium.ETHERNET),
        ("Thunderbolt Bridge", Medium.THUNDERBOLT),
        ("Thunderbolt 1", Medium.THUNDERBOLT),
        ("Wi-Fi", Medium.WIFI),
        ("iPhone USB", Medium.OTHER),
        ("", Medium.OTHER),
    ],
)
def test_a_port_is_of_the_kind_that_its_name_says(port: str, medium: Medium) -> None:
    assert medium_of_port(port) is medium


def test_a_cable_comes_before_ethernet_and_that_before_wifi() -> None:
    assert sorted(Medium, key=lambda medium: medium.rank) == [
        Medium.HERE,
        Medium.THUNDERBOLT,
        Medium.ETHERNET,
        Medium.WIFI,
        Medium.OTHER,
    ]


def test_linux_tells_by_what_stands_in_sysfs(tmp_path: Path) -> None:
    for name in ("virtio_net", "thunderbolt-net"):
        (tmp_path / "drivers" / name).mkdir(parents=True)
    for name, driver in (("eth0", "virtio_net"), ("thunderbolt0", "thunderbolt-net")):
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    (tmp_path / "wlan0" / "wireless").mkdir(parents=True)
    (tmp_path / "docker0").mkdir()
    found = {name: medium_in_sysfs(tmp_path / name) for name in ("eth0", "thunderbolt0", "wlan0", "docker0")}
    assert found == {
        "eth0": Medium.ETHERNET,
        "thunderbolt0": Medium.THUNDERBOLT,
        "wlan0": Medium.WIFI,
        "docker0": Medium.OTHER,
    }
