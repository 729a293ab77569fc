"""The speeds of nodes and links, measured or assumed. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.planning.costs import on_lines
from worker.model.modelspec import ModelSpec

TimesByRows = tuple[tuple[int, float], ...]  # milliseconds by rows of a frame, ascending


@dataclass(frozen=True)
class Speed:
    """The times of one node for one model: a layer of each of its `kinds`, and its norm, head and sampling."""

    kinds: tuple[TimesByRows, ...]
    head: TimesByRows
    gbps: float  # GB/s at which it reads weights
    is_measured: bool = True

    @classmethod
    def assumed(cls, spec: ModelSpec, gbps: float) -> "Speed":
        """Return the speed of a node that only reads weights, at so many GB/s; frames of several rows are not known."""
        head_bytes = spec.head_bytes + (spec.embed_bytes if spec.tied else 0)
        sizes = [*(kind.read_bytes for kind in spec.kinds), head_bytes]
        *kinds, head = (((1, size / gbps / 1e6),) for size in sizes)
        return cls(tuple(kinds), head, gbps, is_measured=False)

    def knows(self, num_rows: int) -> bool:
        """Whether the times of frames of so many rows follow from the known ones."""
        return all(times[0][0] <= num_rows <= times[-1][0] or len(times) > 1 for times in (*self.kinds, self.head))

    def layers_ms(self, spec: ModelSpec, num_rows: int) -> list[float]:
        """Return the milliseconds of each layer of the model."""
        by_kind = {kind: on_lines(times, num_rows) for kind, times in zip(spec.kinds, self.kinds, strict=True)}
        return [by_kind[layer] for layer in spec.layers]

    def caches_ms(self, spec: ModelSpec, context: int) -> list[float]:
        """Return the milliseconds that one session's caches of so many tokens add to a step, by layer of the model."""
        by_kind = {kind: spec.remembered_bytes(kind, context) / self.gbps / 1e6 for kind in spec.kinds}
        return [by_kind[layer] for layer in spec.layers]

    def head_ms(self, num_rows: int) -> float:
        return on_lines(self.head, num_rows)


@dataclass(frozen=True)
class LinkSpeed:
    """The way from one node to another: the round trip of a few bytes, and the bytes per second."""

    rtt_ms: float = 0.0
    bytes_per_s: float = math.inf

    def occupied_ms(self, num_bytes: int) -> float:
        """Return the milliseconds in which nothing else can be sent."""
        return 1e3 * num_bytes / self.bytes_per_s

    def ms(self, num_bytes: int = 0) -> float:
        """Return the milliseconds of one way."""
        return self.rtt_ms / 2 + self.occupied_ms(num_bytes)

    def with_worse(self, other: "LinkSpeed") -> "LinkSpeed":
        """Return the worse of both in each respect."""
        return LinkSpeed(max(self.rtt_ms, other.rtt_ms), min(self.bytes_per_s, other.bytes_per_s))


@dataclass(frozen=True)
class Survey:
    """The known speeds of nodes, by name: of their layers, of their own `ports`, and of `links` between two of them."""

    speeds: Mapping[str, Speed] = field(default_factory=dict)
    ports: Mapping[str, LinkSpeed] = field(default_factory=dict)
    links: Mapping[tuple[str, str], LinkSpeed] = field(default_factory=dict)

    def covers(self, names: Iterable[str]) -> bool:
        """Whether the speed of all these nodes is known."""
        return all(name in self.speeds for name in names)

    def link(self, sender: str, receiver: str) -> LinkSpeed:
        """Return the link as known in either direction, else the worse of both ports."""
        known = self.links.get((sender, receiver)) or self.links.get((receiver, sender))
        return known or self._port(sender).with_worse(self._port(receiver))

    def _port(self, name: str) -> LinkSpeed:
        return self.ports.get(name, LinkSpeed())


NOTHING_KNOWN = Survey()
# A link that could not be measured: a probe of 20 exchanges and 8 MiB was not done within 5 s.
UNMEASURED = LinkSpeed(rtt_ms=5e3 / 20, bytes_per_s=8 * 2**20 / 5)


def format_ms(ms: float) -> str:
    """Return milliseconds as text with three digits."""
    return f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"
