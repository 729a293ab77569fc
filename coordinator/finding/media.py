"""Which kind of link an interface of this machine is, and which of several is the best."""

import platform
from enum import StrEnum

from protos.brigade_pb2 import Medium as Number
from worker.process.commands import Commands
from worker.process.linux.interfaces import read_interfaces as read_on_linux
from worker.process.mac.interfaces import read_interfaces as read_on_mac


class Medium(StrEnum):
    """In order of preference: what a token waits for less comes first. LOOPBACK is within this machine."""

    LOOPBACK = "loopback"
    THUNDERBOLT = "thunderbolt"
    ETHERNET = "ethernet"
    WIFI = "wifi"
    TUNNEL = "tunnel"
    UNSPECIFIED = "unspecified"

    @property
    def rank(self) -> int:
        return list(Medium).index(self)

    @property
    def said(self) -> str:
        """For people."""
        return _SAID[self]

    @classmethod
    def of(cls, number: Number) -> "Medium":
        """As nodes tell each other of it."""
        return cls(Number.Name(number).removeprefix("MEDIUM_").lower())


_SAID = {
    Medium.LOOPBACK: "this machine",
    Medium.THUNDERBOLT: "Thunderbolt",
    Medium.ETHERNET: "Ethernet",
    Medium.WIFI: "Wi-Fi",
    Medium.TUNNEL: "a VPN",
    Medium.UNSPECIFIED: "another link",
}


def media_now() -> dict[str, Medium]:
    """Of all interfaces that are up, by name. Blocks for as long as commands take."""
    found = read_on_mac(Commands()) if platform.system() == "Darwin" else read_on_linux()
    return {each.name: Medium.of(each.medium) for each in found}
