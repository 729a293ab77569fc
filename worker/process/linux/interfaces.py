"""Network interfaces, from sysfs; their addresses from psutil."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

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

_SYSFS = Path(os.sep, "sys", "class", "net")
_LOOPBACK, _POINT_TO_POINT = "772", ("512", "65534")  # ARPHRD numbers in the file `type`


def read_interfaces(root: Path = _SYSFS) -> list[Interface]:
    """Those that are up."""
    found = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [each.address.partition("%")[0] for each in entries if each.family in families]
        for name, entries in found.items()
    }
    return interfaces_in(root, addresses)


def interfaces_in(root: Path, addresses: Mapping[str, Sequence[str]]) -> list[Interface]:
    """What the folder holds; nothing where there is none."""
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return [_interface(each, addresses.get(each.name, ())) for each in folders if _is_up(each)]


def _interface(folder: Path, addresses: Sequence[str]) -> Interface:
    mtu = _text(folder / "mtu")
    return Interface(
        name=folder.name,
        medium=_medium(folder),
        addresses=addresses,
        mtu=int(mtu) if re.fullmatch("[0-9]{1,9}", mtu) else 0,
        is_active=_text(folder / "carrier") != "0",
    )


def _medium(folder: Path) -> Medium:
    kind, uevent = _text(folder / "type"), _text(folder / "uevent").splitlines()
    if kind == _LOOPBACK:
        return MEDIUM_LOOPBACK
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return MEDIUM_WIFI
    if kind in _POINT_TO_POINT or (folder / "tun_flags").exists() or "DEVTYPE=wireguard" in uevent:
        return MEDIUM_TUNNEL
    if (folder / "device" / "driver").resolve().name == "thunderbolt-net":
        return MEDIUM_THUNDERBOLT
    return MEDIUM_ETHERNET if (folder / "device").exists() else MEDIUM_UNSPECIFIED


def _is_up(folder: Path) -> bool:
    flags = _text(folder / "flags")
    return folder.is_dir() and flags.startswith("0x") and bool(int(flags, 16) & 1)


def _text(file: Path) -> str:
    """An interface that is down refuses to tell some things."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
