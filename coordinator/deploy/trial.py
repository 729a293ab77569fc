"""A trial: a short answer through every node of the configuration, twice, and the traffic of each hop."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.decoding.decode_options import Decode, suit
from coordinator.engine.engine import generate_once
from coordinator.planning.plan import Plan
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from coordinator.sessions.waterfall import Leg, spans
from protos.brigade_pb2 import Cache, StatusReply
from worker.errors import BrigadeError, ConfigError, ModelError, NodeBusy, OutOfMemory

NUM_TOKENS = 8
_PROMPT = 8  # arbitrary tokens


@dataclass(frozen=True)
class TriedHop:
    """The traffic of a hop; the last hop leads back to the coordinator, with tokens."""

    source: str
    target: str
    sent_bytes: int
    frame_ms: float  # mean of all frames


@dataclass(frozen=True)
class ChainTrial:
    """Two answers to the same prompt, through every node."""

    model: str
    plan: Plan
    first: Answer
    second: Answer
    hops: Sequence[TriedHop]
    opened_s: float  # to ask, load and connect all nodes
    answered_s: float  # for both answers

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
            "stages": [stage.as_json() for stage in waterfall.stages],
            "hops": [asdict(hop) for hop in self.hops],
            "waterfall": waterfall.as_json(),
        }


async def try_cluster(options: ClusterOptions) -> ChainTrial:
    """Load every node, answer twice, and leave the workers running.

    Raises:
        NodeBusy: a worker serves another coordinator, and was left alone. BrigadeError: a node failed.
    """
    began = time.monotonic()
    checkpoint, spec = await read_model(options.model, options.draft_model)
    prompt = tuple(token % spec.vocab_size for token in range(1, _PROMPT + 1))
    request = Request(prompt, NUM_TOKENS, decode=suit(Decode("canvas" if spec.needs_canvas else "ar"), Cache(), spec))
    async with open_chain(options, checkpoint, every_node=True) as chain:
        opened = time.monotonic()
        before = await chain.statuses()
        first = await generate_once(chain, request, traced=True)
        hops = hops_of(first.usage.legs, before, first.statuses)
        second = await generate_once(chain, request)
        answered_s = time.monotonic() - opened
        return ChainTrial(spec.name, chain.plan, first, second, hops, opened - began, answered_s)


def hops_of(legs: Sequence[Leg], before: Sequence[StatusReply], after: Sequence[StatusReply]) -> list[TriedHop]:
    """Return the traffic of each hop of one chain between two statuses of its stages.

    Returns:
        [] for a single node, and where one node makes answers and computed the prompt, too.
    """
    names = [node.name for node in legs[-1].route.nodes]
    walked = [(passage, leg) for leg in legs for passage in leg.passages if len(passage.timings) == len(names)]
    if len(names) == 1 or not walked:
        return []
    ways = [span for passage, leg in walked for span in spans(passage, leg.route.offsets)]
    hops = []
    for source, (then, now) in enumerate(zip(before, after, strict=True)):
        target = (source + 1) % len(names)
        times = [end - begin for part, stage, begin, end in ways if stage == target and part in ("wire", "return")]
        hops.append(TriedHop(names[source], names[target], now.sent_bytes - then.sent_bytes, mean(times) / 1e6))
    return hops


def advice(error: BrigadeError, flags: str) -> str:
    """Return how to fix a trial that failed; `flags` name the cluster, for further commands."""
    plan = f"brigade plan {flags}".strip()
    if isinstance(error, NodeBusy):
        return "end its coordinator; if that is `brigade serve`, ask it: brigade generate --server URL Hello"
    if isinstance(error, OutOfMemory):
        return f"close other programs there, or keep less memory: {plan}"
    if isinstance(error, ModelError | ConfigError):
        return f"fix that; {plan} tells whether it fits and where each layer goes"
    return f"brigade doctor {flags}".strip() + " tells what is wrong with nodes and links"
