"""Trial: what a short answer through every node showed. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from coordinator.planning.plan import Plan
from coordinator.sessions.answer import Answer
from coordinator.sessions.waterfall import Leg, spans
from protos.brigade_pb2 import StatusReply
from worker.errors import BrigadeError, ConfigError, ModelError, NodeBusy, OutOfMemory


@dataclass(frozen=True)
class TriedHop:
    """One hop while the answer went over it; the last one leads back to the coordinator, with tokens."""

    source: str
    target: str
    sent_bytes: int
    frame_ms: float  # a frame's mean


@dataclass(frozen=True)
class Trial:
    """Two times the same question, through every node."""

    model: str
    plan: Plan
    first: Answer
    second: Answer
    hops: Sequence[TriedHop]
    opened_s: float  # asked, loaded and joined
    answered_s: float  # both times

    @property
    def is_same(self) -> bool:
        return self.first.tokens == self.second.tokens

    def as_json(self) -> dict[str, Any]:
        waterfall = self.first.waterfall()
        return {
            "model": self.model,
            "works": self.is_same,
            "tokens": self.first.tokens,
            "tokens_again": self.second.tokens,
            "opened_s": self.opened_s,
            "answered_s": self.answered_s,
            "stages": [
                {
                    "node": time.node.name, "start": time.node.start, "end": time.node.end,
                    "compute_ms": time.compute_ms, "wire_ms": time.wire_ms, "queue_ms": time.queue_ms,
                }
                for time in waterfall.stages
            ],
            "hops": [asdict(hop) for hop in self.hops],
            "waterfall": {"wall_ms": waterfall.wall_ms, **waterfall.parts},
        }  # fmt: skip


def hops_of(legs: Sequence[Leg], before: Sequence[StatusReply], after: Sequence[StatusReply]) -> list[TriedHop]:
    """What went over each hop of one chain, of more than one node, between two statuses of its stages."""
    names = [node.name for node in legs[-1].route.nodes]
    ways = [tile for leg in legs for passage in leg.passages for tile in spans(passage, leg.route.offsets)]
    into = {  # by target
        target: [
            (end - begin) / 1e6 for part, stage, begin, end in ways if stage == target and part in ("wire", "return")
        ]
        for target in range(len(names))
    }
    sent = [now.sent_bytes - then.sent_bytes for then, now in zip(before, after, strict=True)]
    ends = zip(names, [*names[1:], names[0]], [*range(1, len(names)), 0], sent, strict=True)
    return [TriedHop(source, to, size, mean(into[target])) for source, to, target, size in ends] if names[1:] else []


def advice(error: BrigadeError, flags: str) -> str:
    """What to do about a trial that failed; `flags` are those of the command that say which cluster it is."""
    if isinstance(error, NodeBusy):
        return "end what uses this worker, or ask that server: brigade generate --server http://localhost:9338 Hello"
    if isinstance(error, OutOfMemory):
        return f"close other programs there, or keep less memory: brigade plan {flags}".strip()
    if isinstance(error, ModelError | ConfigError):
        return f"mend that; brigade plan {flags}".strip() + " tells whether it fits and where each layer goes"
    return f"brigade doctor {flags}".strip() + " tells what is wrong with nodes and links"
