"""Network interfaces, from `networksetup -listallhardwareports` and `ifconfig`."""

import re
from collections.abc import Mapping

from protos.brigade_pb2 import (
    MEDIUM_ETHERNET,
    MEDIUM_LOOPBACK,
    MEDIUM_THUNDERBOLT,
    MEDIUM_TUNNEL,
    MEDIUM_UNSPECIFIED,
    MEDIUM_WIFI,
    Interface,
    Medium,
)
from worker.process.commands import Ask

_HEAD = re.compile(r"(?P<name>\w+): flags=\w+<(?P<flags>[^>]*)> mtu (?P<mtu>[0-9]{1,9})\b")


def read_interfaces(ask: Ask) -> list[Interface]:
    """Those that are up."""
    return parse_interfaces(ask("ifconfig"), parse_ports(ask("networksetup", "-listallhardwareports")))


def parse_ports(text: str) -> dict[str, str]:
    """What people call each device: "Thunderbolt Bridge" for bridge0."""
    found = re.findall(r"^Hardware Port: (.*)\nDevice: (\S+)", text, re.MULTILINE)
    return {device: port.strip() for port, device in found}


def parse_interfaces(text: str, ports: Mapping[str, str]) -> list[Interface]:
    """Each that is up, with the addresses that it has."""
    blocks = re.split(r"^(?=\w+: flags=)", text, flags=re.MULTILINE)
    found = [(head, block) for block in blocks if (head := _HEAD.match(block))]
    return [_interface(head, block, ports) for head, block in found if "UP" in head["flags"].split(",")]


def _interface(head: re.Match[str], block: str, ports: Mapping[str, str]) -> Interface:
    status = re.search(r"^\s+status: (\S+)", block, re.MULTILINE)
    port = ports.get(head["name"], "")
    return Interface(
        name=head["name"],
        port=port,
        medium=_medium(head["name"], port, head["flags"].split(",")),
        addresses=re.findall(r"^\s+inet6? ([0-9a-f.:]+)", block, re.MULTILINE),
        mtu=int(head["mtu"]),
        is_active=status is None or status[1] == "active",
    )


def _medium(name: str, port: str, flags: list[str]) -> Medium:
    if "LOOPBACK" in flags:
        return MEDIUM_LOOPBACK
    if "POINTOPOINT" in flags or name.startswith("utun"):
        return MEDIUM_TUNNEL
    if port == "Wi-Fi":
        return MEDIUM_WIFI
    if "Ethernet" in port or "LAN" in port:  # an adapter may be called "Thunderbolt Ethernet"
        return MEDIUM_ETHERNET
    return MEDIUM_THUNDERBOLT if port.startswith("Thunderbolt") else MEDIUM_UNSPECIFIED
