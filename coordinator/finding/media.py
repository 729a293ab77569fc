"""Which kind of link an interface is, as far as the system tells. Only this file knows how macOS and Linux tell it."""

import platform
import re
import subprocess
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

_SYSFS = Path("/") / "sys" / "class" / "net"
_PORTS = ["networksetup", "-listallhardwareports"]
_PORTS_S = 5.0


class Medium(StrEnum):
    """In order of preference: what bytes of a token wait for less comes first."""

    HERE = "this machine"
    THUNDERBOLT = "Thunderbolt"
    ETHERNET = "Ethernet"
    WIFI = "Wi-Fi"
    OTHER = "other"

    @property
    def rank(self) -> int:
        return list(Medium).index(self)


def media_of(interfaces: Collection[str]) -> dict[str, Medium]:
    """The kinds of these interfaces. Blocks for as long as a command takes."""
    if platform.system() != "Darwin":
        return {name: medium_in_sysfs(_SYSFS / name) for name in interfaces}
    ports = parse_hardware_ports(_hardware_ports())
    return {name: medium_of_port(ports.get(name, "")) for name in interfaces}


def parse_hardware_ports(text: str) -> dict[str, str]:
    """The names of ports by device, of `networksetup -listallhardwareports`:

    Hardware Port: Thunderbolt Bridge
    Device: bridge0
    Ethernet Address: 36:5e:12:9a:b0:80
    """
    found = re.findall(r"^Hardware Port: (.*)\nDevice: (\S+)", text, re.MULTILINE)
    return {device: port.strip() for port, device in found}


def medium_of_port(port: str) -> Medium:
    """By macOS's own names; an adapter may be called "Thunderbolt Ethernet" and is one."""
    if port == "Wi-Fi":
        return Medium.WIFI
    if "Ethernet" in port or "LAN" in port:
        return Medium.ETHERNET
    return Medium.THUNDERBOLT if port.startswith("Thunderbolt") else Medium.OTHER


def medium_in_sysfs(interface: Path) -> Medium:
    """By what the kernel shows of an interface in its folder of /sys/class/net."""
    if (interface / "wireless").exists() or (interface / "phy80211").exists():
        return Medium.WIFI
    if (interface / "device" / "driver").resolve().name == "thunderbolt-net":
        return Medium.THUNDERBOLT
    return Medium.ETHERNET if (interface / "device").exists() else Medium.OTHER


def _hardware_ports() -> str:
    try:
        done = subprocess.run(_PORTS, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PORTS_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
