"""How fast nodes and the links between them are, measured or assumed. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.planning.costs import on_lines
from worker.model.modelspec import ModelSpec

Times = tuple[tuple[int, float], ...]  # milliseconds by rows of a frame, ascending


@dataclass(frozen=True)
class Speed:
    """What one node takes for one model: a layer of each of its `kinds`, and its norm, head and sampling."""

    kinds: tuple[Times, ...]
    head: Times
    gbps: float  # GB/s at which it reads weights
    is_measured: bool = True

    @classmethod
    def assumed(cls, spec: ModelSpec, gbps: float) -> "Speed":
        """Of a node that takes as long as reading what a token reads. What further rows cost is not known then."""
        head_bytes = spec.head_bytes + (spec.embed_bytes if spec.tied else 0)
        sizes = [*(kind.read_bytes for kind in spec.kinds), head_bytes]
        *kinds, head = (((1, size / gbps / 1e6),) for size in sizes)
        return cls(tuple(kinds), head, gbps, is_measured=False)

    def knows(self, num_rows: int) -> bool:
        """Whether frames of so many rows can be told from those that are known."""
        return all(times[0][0] <= num_rows <= times[-1][0] or len(times) > 1 for times in (*self.kinds, self.head))

    def layers_ms(self, spec: ModelSpec, num_rows: int) -> list[float]:
        """Of each layer of the model."""
        by_kind = {kind: on_lines(times, num_rows) for kind, times in zip(spec.kinds, self.kinds, strict=True)}
        return [by_kind[layer] for layer in spec.layers]

    def caches_ms(self, spec: ModelSpec, context: int) -> list[float]:
        """Of each layer of the model: what reading one session's caches of so many tokens adds to a step."""
        by_kind = {kind: spec.remembered_bytes(kind, context) / self.gbps / 1e6 for kind in spec.kinds}
        return [by_kind[layer] for layer in spec.layers]

    def head_ms(self, num_rows: int) -> float:
        return on_lines(self.head, num_rows)


@dataclass(frozen=True)
class Link:
    """From one node to another: how long a few bytes take there and back, and how many it carries per second."""

    rtt_ms: float = 0.0
    bytes_per_s: float = math.inf

    def occupied_ms(self, num_bytes: int) -> float:
        """How long nothing else can be sent."""
        return 1e3 * num_bytes / self.bytes_per_s

    def ms(self, num_bytes: int = 0) -> float:
        """One way."""
        return self.rtt_ms / 2 + self.occupied_ms(num_bytes)

    def with_worse(self, other: "Link") -> "Link":
        """The worse of both in each respect."""
        return Link(max(self.rtt_ms, other.rtt_ms), min(self.bytes_per_s, other.bytes_per_s))


@dataclass(frozen=True)
class Survey:
    """What is known of the nodes, by name, beside their memory.

    `ports` tells how well a node is connected at all, `links` how well it is with another one.
    """

    speeds: Mapping[str, Speed] = field(default_factory=dict)
    ports: Mapping[str, Link] = field(default_factory=dict)
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)

    def covers(self, names: Iterable[str]) -> bool:
        """Whether the speed of all these nodes is known."""
        return all(name in self.speeds for name in names)

    def link(self, sender: str, receiver: str) -> Link:
        """As it is known in either direction, else the worse of both ports."""
        known = self.links.get((sender, receiver)) or self.links.get((receiver, sender))
        return known or self._port(sender).with_worse(self._port(receiver))

    def _port(self, name: str) -> Link:
        return self.ports.get(name, Link())


NOTHING_KNOWN = Survey()
