"""All that a Mac tells of itself, each part by commands of its own, so that they can be asked at the same time."""

from collections.abc import Callable, Sequence

from protos.brigade_pb2 import Facts
from worker.process.commands import Ask
from worker.process.mac.firewall import read_firewall
from worker.process.mac.interfaces import read_interfaces
from worker.process.mac.memory import read_wired_limit
from worker.process.mac.power import read_power
from worker.process.mac.rdma import read_rdma
from worker.process.mac.thunderbolt import read_ports


def _rdma(ask: Ask) -> Facts:
    state, devices = read_rdma(ask)
    return Facts(rdma=state, rdma_devices=devices)


READINGS: Sequence[Callable[[Ask], Facts]] = (
    lambda ask: Facts(wired_limit_mb=read_wired_limit(ask)),
    lambda ask: Facts(power=read_power(ask)),
    lambda ask: Facts(firewall=read_firewall(ask)),
    lambda ask: Facts(interfaces=read_interfaces(ask)),
    lambda ask: Facts(thunderbolt=read_ports(ask)),
    _rdma,
)
