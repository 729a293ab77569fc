"""All that a Linux machine tells of itself, likewise in parts that can be read at the same time."""

from collections.abc import Callable, Sequence

from protos.brigade_pb2 import Facts
from worker.process.commands import Ask
from worker.process.linux.interfaces import read_interfaces
from worker.process.linux.system import read_firewall, read_power

READINGS: Sequence[Callable[[Ask], Facts]] = (
    lambda ask: Facts(power=read_power(ask)),
    lambda ask: Facts(firewall=read_firewall(ask)),
    lambda ask: Facts(interfaces=read_interfaces()),
)
