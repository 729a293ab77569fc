"""The speeds of nodes and links, measured or assumed. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from coordinator.planning.costs import on_lines
from worker.model.model_spec import LayerSpec, ModelSpec

_COMPUTED_ROWS = 512  # of a frame whose time, and that per row of longer ones, is assumed
TimesByRows = tuple[tuple[int, float], ...]  # milliseconds by rows of a frame, ascending


@dataclass(frozen=True)
class NodeSpeed:
    """The times of one node for one model: of a layer of each of the `kinds`, and of norm, head and sampling."""

    kinds: tuple[TimesByRows, ...]
    head: TimesByRows
    gbps: float  # GB/s at which it reads weights
    is_measured: bool = True

    @classmethod
    def assumed(cls, spec: ModelSpec, gbps: float, tflops: float | None = None) -> "NodeSpeed":
        """Return the speed of a node that reads weights at so many GB/s.

        It computes so many 10^12 operations per second; without that number only frames of one row are known.
        """
        head_bytes = spec.head_bytes + (spec.embed_bytes if spec.tied else 0)
        kinds = [_roofline(kind, gbps, tflops) for kind in spec.kinds]
        return cls(tuple(kinds), _roofline(LayerSpec(head_bytes), gbps, tflops), gbps, is_measured=False)

    def knows(self, num_rows: int) -> bool:
        """Return whether the times of frames of so many rows are known or can be extrapolated."""
        return all(times[0][0] <= num_rows <= times[-1][0] or len(times) > 1 for times in (*self.kinds, self.head))

    def gbps_by_rows(self, spec: ModelSpec) -> dict[int, float]:
        """Return at how many GB/s frames of the measured numbers of rows read what one row reads of the layers.

        With free rows it is the same for all of them; a mixture of experts reads more than that for many rows.
        """
        num_bytes = sum(kind.read_bytes for kind in spec.layers)
        sizes = sorted(set.intersection(*({rows for rows, _ in times} for times in self.kinds)))
        return {rows: num_bytes / max(self.ms_up_to(spec, rows)[-1], 1e-6) / 1e6 for rows in sizes}

    def ms_up_to(
        self, spec: ModelSpec, num_rows: int, num_sampled: int = 0, context: int = 0, num_before: int = 0
    ) -> list[float]:
        """Return the milliseconds of a frame in the layers before each layer of the model, and in all of them.

        The frame takes the difference of two of these times on a stage that holds the layers between them. Sampled rows
        pass the head behind the last layer, and each step among them also reads a session's caches of `context` tokens.
        Every row attends to the `num_before` tokens before the frame, those of a canvas to `context`, at the rate at
        which the layer's matrices are multiplied.
        """
        num_steps = num_sampled // spec.step_rows
        if num_steps and spec.needs_canvas:
            num_before = context
        row_ms = {}
        for kind, times in zip(spec.kinds, self.kinds, strict=True):
            row_ms[kind] = ms = on_lines(times, num_rows)
            if kind.num_products:
                row_ms[kind] += ms * kind.num_attended * num_before / kind.num_products
        cache_ms = {kind: spec.remembered_bytes(kind, context) / self.gbps / 1e6 for kind in spec.kinds}
        found = list(accumulate((row_ms[kind] + num_steps * cache_ms[kind] for kind in spec.layers), initial=0.0))
        if num_sampled:
            found[-1] += on_lines(self.head, num_sampled)
        return found


def _roofline(layer: LayerSpec, gbps: float, tflops: float | None) -> TimesByRows:
    """Return the times of frames that read a layer's weights or multiply by them, whichever takes longer.

    Each further row reads as much as one row, other experts, until all weights are read.
    """
    read_ms, whole_ms = layer.read_bytes / gbps / 1e6, layer.weight_bytes / gbps / 1e6
    if tflops is None:
        return ((1, read_ms),)
    row_ms = 2 * layer.num_products / tflops / 1e9
    bends = (1, -(-layer.weight_bytes // max(1, layer.read_bytes)), int(whole_ms / max(row_ms, 1e-9)), _COMPUTED_ROWS)
    sizes = sorted({min(max(1, rows), _COMPUTED_ROWS) for rows in bends})
    return tuple((rows, max(min(rows * read_ms, whole_ms), rows * row_ms)) for rows in sizes)


@dataclass(frozen=True)
class LinkSpeed:
    """The link from one node to another: the round trip of a few bytes, and the bytes per second."""

    rtt_ms: float = 0.0
    bytes_per_s: float = math.inf

    def occupied_ms(self, num_bytes: int) -> float:
        """Return the milliseconds for which so many bytes occupy the link."""
        return 1e3 * num_bytes / self.bytes_per_s

    def ms(self, num_bytes: int = 0) -> float:
        """Return the milliseconds of so many bytes one way."""
        return self.rtt_ms / 2 + self.occupied_ms(num_bytes)


@dataclass(frozen=True)
class Survey:
    """The known speeds by node: of layers, of their own network `ports`, and of `links` between two nodes."""

    speeds: Mapping[str, NodeSpeed] = field(default_factory=dict)
    ports: Mapping[str, LinkSpeed] = field(default_factory=dict)
    links: Mapping[tuple[str, str], LinkSpeed] = field(default_factory=dict)

    def covers(self, names: Iterable[str]) -> bool:
        """Return whether the speeds of all these nodes are known."""
        return all(name in self.speeds for name in names)

    def link(self, sender: str, receiver: str) -> LinkSpeed:
        """Return the link as measured in either direction, else the worse of both ports."""
        if known := self.links.get((sender, receiver)) or self.links.get((receiver, sender)):
            return known
        one, other = (self.ports.get(name, LinkSpeed()) for name in (sender, receiver))
        return LinkSpeed(max(one.rtt_ms, other.rtt_ms), min(one.bytes_per_s, other.bytes_per_s))


NO_SPEEDS = Survey()
# For a link that could not be measured: its probe of 20 exchanges and 8 MiB took more than 5 s.
UNMEASURED = LinkSpeed(rtt_ms=5e3 / 20, bytes_per_s=8 * 2**20 / 5)


def format_ms(ms: float) -> str:
    """Return milliseconds as text with three digits."""
    return f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"
