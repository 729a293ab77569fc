"""Thunderbolt ports, from `system_profiler SPThunderboltDataType -json`.

Its keys are those of captures from a MacBook Pro and a Mac Studio, in github.com/jundot/omlx (tests of its topology).
"""

import re

from pydantic import BaseModel, Field, ValidationError

from protos.brigade_pb2 import ThunderboltPort
from worker.process.commands import Ask


class _Receptacle(BaseModel):
    number: str = Field("", alias="receptacle_id_key")
    speed: str = Field("", alias="current_speed_key")  # "80 Gb/s" of a connection, "Up to 120 Gb/s" without one
    status: str = Field("", alias="receptacle_status_key")


class _Device(BaseModel):
    name: str = Field("", alias="_name")
    id: str = Field("", alias="domain_uuid_key")  # another computer's port has one, a drive has none


class _Bus(BaseModel):
    id: str = Field("", alias="domain_uuid_key")
    receptacle: _Receptacle | None = Field(None, alias="receptacle_1_tag")
    devices: list[_Device] = Field([], alias="_items")


class _Report(BaseModel):
    buses: list[_Bus] = Field([], alias="SPThunderboltDataType")


def read_ports(ask: Ask) -> list[ThunderboltPort]:
    """Those of this Mac, by the number of the receptacle."""
    return parse_ports(ask("system_profiler", "SPThunderboltDataType", "-json"))


def parse_ports(text: str) -> list[ThunderboltPort]:
    """None at all where this is not what it usually prints."""
    try:
        report = _Report.model_validate_json(text or "{}")
    except ValidationError:
        return []
    return sorted((_port(bus, bus.receptacle) for bus in report.buses if bus.receptacle), key=lambda port: port.name)


def _port(bus: _Bus, receptacle: _Receptacle) -> ThunderboltPort:
    peer = next((device for device in bus.devices if device.id), None)
    return ThunderboltPort(
        name=receptacle.number,
        gbit=_gbit(receptacle.speed),
        is_connected=receptacle.status == "receptacle_connected",
        id=bus.id,
        peer=peer.name if peer else "",
        peer_id=peer.id if peer else "",
    )


def _gbit(speed: str) -> float:
    found = re.search(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) Gb/s", speed)
    return float(found[1]) if found else 0.0
