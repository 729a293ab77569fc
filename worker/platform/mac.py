"""Facts about a Mac, from the system's own commands.

READINGS are independent of each other, so that they can run at the same time. The parsers accept any text and leave out
what they do not recognise.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from protos.brigade_pb2 import Facts, Interface, Medium, Power, ThunderboltPort
from worker.platform.commands import RunProgram

_FIREWALL = Path(os.sep, "usr", "libexec", "ApplicationFirewall", "socketfilterfw")
_IFCONFIG_HEAD = re.compile(r"(?P<name>\w+): flags=\w+<(?P<flags>[^>]*)> mtu (?P<mtu>[0-9]{1,9})\b")


def read_interfaces(ask: RunProgram) -> list[Interface]:
    """Return the network interfaces that are up."""
    ports = parse_hardware_ports(ask("networksetup", "-listallhardwareports"))
    return parse_interfaces(ask("ifconfig"), ports)


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Return the name that System Settings shows for each device: "Thunderbolt Bridge" for bridge0."""
    found = re.findall(r"^Hardware Port: (.*)\nDevice: (\S+)", text, re.MULTILINE)
    return {device: port.strip() for port, device in found}


def parse_interfaces(text: str, ports: Mapping[str, str]) -> list[Interface]:
    """Parse the output of `ifconfig`; `ports` are the hardware ports by device."""
    found = []
    for block in re.split(r"^(?=\w+: flags=)", text, flags=re.MULTILINE):
        head = _IFCONFIG_HEAD.match(block)
        if head is None or "UP" not in (flags := head["flags"].split(",")):
            continue
        status = re.search(r"^\s+status: (\S+)", block, re.MULTILINE)
        port = ports.get(head["name"], "")
        found.append(
            Interface(
                name=head["name"],
                port=port,
                medium=_medium(head["name"], port, flags),
                addresses=re.findall(r"^\s+inet6? ([0-9a-f.:]+)", block, re.MULTILINE),
                mtu=int(head["mtu"]),
                is_active=status is None or status[1] == "active",
            )
        )
    return found


def _medium(name: str, port: str, flags: Sequence[str]) -> Medium:
    if "LOOPBACK" in flags:
        return Medium.MEDIUM_LOOPBACK
    if "POINTOPOINT" in flags or name.startswith("utun"):
        return Medium.MEDIUM_TUNNEL
    if port in ("Wi-Fi", "WLAN"):  # in German
        return Medium.MEDIUM_WIFI
    if "Ethernet" in port or "LAN" in port:  # an adapter may be called "Thunderbolt Ethernet"
        return Medium.MEDIUM_ETHERNET
    if "Thunderbolt" in port or name == "bridge0":  # "Pont Thunderbolt" in French
        return Medium.MEDIUM_THUNDERBOLT
    return Medium.MEDIUM_UNSPECIFIED


# The keys of `system_profiler SPThunderboltDataType -json`, as captured from a MacBook Pro and a Mac Studio in
# github.com/jundot/omlx (tests of its topology).
class _Receptacle(BaseModel):
    number: str = Field("", alias="receptacle_id_key")
    speed: str = Field("", alias="current_speed_key")  # "80 Gb/s" of a connection, "Up to 120 Gb/s" without one
    status: str = Field("", alias="receptacle_status_key")


class _Device(BaseModel):
    name: str = Field("", alias="_name")
    id: str = Field("", alias="domain_uuid_key")  # another computer's port has one, a drive has none
    behind: list["_Device"] = Field([], alias="_items")  # of a dock or a hub

    @property
    def all(self) -> Iterator["_Device"]:
        yield self
        for device in self.behind:
            yield from device.all


class _Bus(BaseModel):
    id: str = Field("", alias="domain_uuid_key")
    receptacle: _Receptacle | None = Field(None, alias="receptacle_1_tag")
    devices: list[_Device] = Field([], alias="_items")


class _Report(BaseModel):
    buses: list[_Bus] = Field([], alias="SPThunderboltDataType")


def parse_thunderbolt(text: str) -> list[ThunderboltPort]:
    """Parse the report on Thunderbolt ports, sorted by receptacle number; [] if the text has another form."""
    try:
        report = _Report.model_validate_json(text or "{}")
    except ValidationError:
        return []
    found = []
    for bus in report.buses:
        if bus.receptacle is None:
            continue
        peer = next((each for device in bus.devices for each in device.all if each.id), None)
        speed = re.search(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) Gb/s", bus.receptacle.speed)
        found.append(
            ThunderboltPort(
                name=bus.receptacle.number,
                gbit=float(speed[1]) if speed else 0.0,
                is_connected=bus.receptacle.status == "receptacle_connected",
                id=bus.id,
                peer=peer.name if peer else "",
                peer_id=peer.id if peer else "",
            )
        )
    return sorted(found, key=lambda port: port.name)


def read_power(ask: RunProgram) -> Power:
    power = parse_settings(ask("pmset", "-g"))
    power.is_on_battery = "'Battery Power'" in ask("pmset", "-g", "batt")
    power.may_nap = ask("defaults", "read", "NSGlobalDomain", "NSAppSleepDisabled").strip() != "1"
    return power


def parse_settings(text: str) -> Power:
    """Parse `pmset -g`: ` sleep  1 (sleep prevented by powerd, caffeinate)` among settings with similar names."""
    found = {
        name: (value, note)
        for name, value, note in re.findall(r"^ *(\w+)[ \t]+([0-9]{1,9})\b(.*)$", text, re.MULTILINE)
    }
    power = Power()
    if "sleep" in found:
        minutes, note = found["sleep"]
        power.sleep_minutes, power.is_kept_awake = int(minutes), "caffeinate" in note
    if found.get("SleepDisabled", ("0",))[0] == "1":
        power.sleep_minutes = 0
    # Macs with three energy modes have a `powermode`, of which 1 is low
    power.is_saving = any(found.get(name, ("0",))[0] == "1" for name in ("lowpowermode", "powermode"))
    return power


def read_firewall(ask: RunProgram) -> str:
    program = os.path.realpath(sys.executable)
    questions = (("--getglobalstate",), ("--getblockall",), ("--getappblocked", program))
    return parse_firewall(*(ask(str(_FIREWALL), *question) for question in questions))


def parse_firewall(state: str, block_all: str, program: str) -> str:
    """Return `Facts.firewall`. `state` is like "Firewall is enabled. (State = 1)"; state 2 blocks all connections."""
    if "State = " not in state:
        return ""
    if "State = 0" in state:
        return "off"
    if "State = 2" in state or "set to enabled" in block_all:
        return "blocks all"
    return "blocks this program" if "is blocked" in program else "on"


def parse_wired_limit(text: str) -> int | None:
    """Parse `sysctl iogpu.wired_limit_mb`, the MiB that the GPU may wire down; 0 is macOS's own limit."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text := text.strip()) else None


def read_rdma(ask: RunProgram) -> Facts:
    """Read the state of RDMA over Thunderbolt and its devices (TN3205); macOS before 26.2 has neither command."""
    state = ask("rdma_ctl", "status").strip()
    if state not in ("enabled", "disabled"):
        return Facts()
    # such as rdma_en2, one per Thunderbolt port, below two lines of headings
    devices = re.findall(r"^\s*(rdma_\w+)", ask("ibv_devices"), re.MULTILINE) if state == "enabled" else []
    return Facts(rdma=state, rdma_devices=devices)


READINGS: Sequence[Callable[[RunProgram], Facts]] = (
    lambda ask: Facts(wired_limit_mb=parse_wired_limit(ask("sysctl", "-n", "iogpu.wired_limit_mb"))),
    lambda ask: Facts(power=read_power(ask)),
    lambda ask: Facts(firewall=read_firewall(ask)),
    lambda ask: Facts(interfaces=read_interfaces(ask)),
    lambda ask: Facts(thunderbolt=parse_thunderbolt(ask("system_profiler", "SPThunderboltDataType", "-json"))),
    read_rdma,
)
