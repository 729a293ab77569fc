"""What Linux tells, from a folder that looks like its own, and from what systemd prints."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from protos.brigade_pb2 import (
    MEDIUM_ETHERNET,
    MEDIUM_LOOPBACK,
    MEDIUM_THUNDERBOLT,
    MEDIUM_TUNNEL,
    MEDIUM_UNSPECIFIED,
    MEDIUM_WIFI,
    Facts,
)
from worker.platform.commands import Commands
from worker.platform.linux import READINGS, parse_services, parse_targets, read_interfaces

ADDRESSES = [(socket.AF_INET, "192.0.2.2"), (socket.AF_INET6, "fe80::1%eth0"), (psutil.AF_LINK, "36:63:02:90:b7:40")]


def make_interface(root: Path, name: str, *, kind: str = "1", flags: str = "0x1003", **files: str) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for file, text in {"type": kind, "flags": flags, "mtu": "1500", "carrier": "1", **files}.items():
        (folder / file).write_text(f"{text}\n")
    return folder


def test_interfaces_that_are_up_with_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [SimpleNamespace(family=family, address=each) for family, each in ADDRESSES]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": entries})
    root = tmp_path / "net"
    make_interface(root, "lo", kind="772", mtu="65536")
    (make_interface(root, "eth0") / "device").mkdir()
    (make_interface(root, "wlan0", carrier="0") / "wireless").mkdir()
    make_interface(root, "wg0", kind="65534")
    make_interface(root, "tap0", tun_flags="0x2")
    make_interface(root, "veth1")
    make_interface(root, "eth1", flags="0x1002")  # down
    driver = tmp_path / "drivers" / "thunderbolt-net"
    driver.mkdir(parents=True)
    device = make_interface(root, "thunderbolt0") / "device"
    device.mkdir()
    (device / "driver").symlink_to(driver)
    found = {each.name: each for each in read_interfaces(Commands(), root)}
    assert {name: each.medium for name, each in found.items()} == {
        "lo": MEDIUM_LOOPBACK,
        "eth0": MEDIUM_ETHERNET,
        "wlan0": MEDIUM_WIFI,
        "wg0": MEDIUM_TUNNEL,
        "tap0": MEDIUM_TUNNEL,
        "veth1": MEDIUM_UNSPECIFIED,
        "thunderbolt0": MEDIUM_THUNDERBOLT,
    }
    assert list(found["eth0"].addresses) == ["192.0.2.2", "fe80::1"] and found["lo"].mtu == 65536
    assert not found["wlan0"].is_active and found["eth0"].is_active
    assert read_interfaces(Commands(), tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("printed", "minutes"),
    [
        ("masked\nmasked\n", 0),
        ("not-found\nnot-found\n", 0),
        ("", 0),
        ("static\nstatic\n", None),
        ("masked\nstatic", None),
    ],
)
def test_a_machine_without_targets_of_sleep_never_sleeps(printed: str, minutes: int | None) -> None:
    power = parse_targets(printed)
    assert (power.sleep_minutes if power.HasField("sleep_minutes") else None) == minutes


def test_a_firewall_is_on_if_one_of_its_services_is_active() -> None:
    services = {"inactive\nactive\n": "on", "inactive\ninactive\n": "off", "": "", "unknown": "off"}
    assert {text: parse_services(text) for text in services} == services


@pytest.mark.parametrize("plugged", [True, False, None, FileNotFoundError])
def test_an_unplugged_machine_is_on_battery_if_its_kernel_knows_power_supplies(
    monkeypatch: pytest.MonkeyPatch, plugged: Any
) -> None:
    def sensors_battery() -> Any:
        if plugged is FileNotFoundError:
            raise plugged
        return SimpleNamespace(power_plugged=plugged)

    monkeypatch.setattr(psutil, "sensors_battery", sensors_battery, raising=False)
    facts = Facts()
    for reading in READINGS:
        facts.MergeFrom(reading(lambda *command: ""))
    assert facts.power.is_on_battery == (plugged is False)
