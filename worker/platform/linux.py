"""Facts about a Linux machine, from sysfs, psutil and systemd if they exist. READINGS are like those of mac.py."""

import contextlib
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from protos.brigade_pb2 import Facts, Interface, Medium, Power
from worker.platform.commands import RunProgram

_SYSFS = Path(os.sep, "sys", "class", "net")
_LOOPBACK, _POINT_TO_POINT = "772", ("512", "65534")  # ARPHRD numbers in the file `type`


def read_interfaces(ask: RunProgram, root: Path = _SYSFS) -> list[Interface]:
    """Return the network interfaces that are up; [] without sysfs."""
    addresses = {
        name: [each.address.partition("%")[0] for each in entries if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, entries in psutil.net_if_addrs().items()
    }
    found = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        flags, mtu = _text(folder / "flags"), _text(folder / "mtu")
        if flags.startswith("0x") and int(flags, 16) & 1:  # IFF_UP
            found.append(
                Interface(
                    name=folder.name,
                    medium=_medium(folder),
                    addresses=addresses.get(folder.name, ()),
                    mtu=int(mtu) if re.fullmatch("[0-9]{1,9}", mtu) else 0,
                    is_active=_text(folder / "carrier") != "0",
                )
            )
    return found


def _medium(folder: Path) -> Medium:
    kind, uevent = _text(folder / "type"), _text(folder / "uevent").splitlines()
    if kind == _LOOPBACK:
        return Medium.MEDIUM_LOOPBACK
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return Medium.MEDIUM_WIFI
    if kind in _POINT_TO_POINT or (folder / "tun_flags").exists() or "DEVTYPE=wireguard" in uevent:
        return Medium.MEDIUM_TUNNEL
    if (folder / "device" / "driver").resolve().name == "thunderbolt-net":
        return Medium.MEDIUM_THUNDERBOLT
    return Medium.MEDIUM_ETHERNET if (folder / "device").exists() else Medium.MEDIUM_UNSPECIFIED


def _text(file: Path) -> str:
    """Read a file of sysfs; "" if the kernel refuses, as it does for some files of an interface that is down."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_power(ask: RunProgram) -> Power:
    power = parse_targets(ask("systemctl", "is-enabled", "sleep.target", "suspend.target"))
    battery = None
    if hasattr(psutil, "sensors_battery"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without power supplies
            battery = psutil.sensors_battery()
    power.is_on_battery = battery is not None and battery.power_plugged is False
    return power


def parse_targets(text: str) -> Power:
    """Parse `systemctl is-enabled`: a machine without sleep targets, or with masked ones, is not put to sleep."""
    may_sleep = any(state not in ("masked", "masked-runtime", "not-found") for state in text.split())
    return Power() if may_sleep else Power(sleep_minutes=0)


def parse_services(text: str) -> str:
    """Parse `systemctl is-active` of firewalls, a line each; "" without systemd."""
    states = text.split()
    return ("on" if "active" in states else "off") if states else ""


READINGS: Sequence[Callable[[RunProgram], Facts]] = (
    lambda ask: Facts(power=read_power(ask)),
    lambda ask: Facts(firewall=parse_services(ask("systemctl", "is-active", "firewalld", "ufw"))),
    lambda ask: Facts(interfaces=read_interfaces(ask)),
)
