"""What a survey makes of the replies of peers, which may send anything."""

import asyncio
from dataclasses import dataclass
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.survey import known_speeds
from coordinator.planning.speeds import NO_SPEEDS, UNMEASURED, LinkSpeed
from protos.brigade_pb2 import LinkReply, MeasureRequest
from worker.config import ClusterConfig
from worker.errors import StageLost

OPTIONS = ClusterOptions(ClusterConfig(), "", None, 128)


@dataclass
class FakePeer:
    """A worker on another machine that only measures links."""

    name: str
    reply: LinkReply
    address = "192.168.1.7:50070"

    async def measure(self, request: MeasureRequest) -> Any:
        raise StageLost("does not say", node=self.name)

    async def measure_link(self, successor: Any = None) -> LinkReply:
        return self.reply


@pytest.mark.parametrize(
    ("rtt_ms", "bytes_per_s", "expected"),
    [
        (0.0, 1e9, LinkSpeed(0.0, 1e9)),
        (0.5, 1e9, LinkSpeed(0.5, 1e9)),
        *((rtt_ms, 1e9, UNMEASURED) for rtt_ms in (nan, inf, -50.0, 1e308)),
        *((0.5, bytes_per_s, UNMEASURED) for bytes_per_s in (0.0, nan, inf, -1.0, 5e-324)),
    ],
)
def test_a_link_whose_speed_makes_no_sense_counts_as_not_measured(
    rtt_ms: float, bytes_per_s: float, expected: LinkSpeed
) -> None:
    """Plans divide by it, and compare."""
    checkpoint: Any = SimpleNamespace(name="tiny", fingerprint=None, tensors={})
    peers: Any = [FakePeer(name, LinkReply(rtt_ms=rtt_ms, bytes_per_s=bytes_per_s)) for name in "ab"]
    found = asyncio.run(known_speeds(OPTIONS, checkpoint, peers, NO_SPEEDS, anew=True))
    assert found.ports == {"a": expected, "b": expected} and found.links == {("a", "b"): expected}
