"""`brigade smoke`: every node of the configuration in one chain, eight tokens, twice. Nothing that runs is ended."""

import time

from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.runner import generate
from coordinator.examine.trial import Trial, hops_of
from coordinator.sessions.request import Request

NUM_TOKENS = 8
_PROMPT = 8  # tokens, of any meaning: what is tried needs none


async def try_cluster(options: ClusterOptions) -> Trial:
    """Raises what the first node that fails fails with: a chain that is lost stays lost here."""
    began = time.monotonic()
    checkpoint, spec = await read_model(options.model)
    request = Request(tuple(token % spec.vocab_size for token in range(1, _PROMPT + 1)), NUM_TOKENS)
    async with open_chain(options, checkpoint, spec, options.context, every_node=True) as chain:
        opened = time.monotonic()
        before = await chain.statuses()
        first = await generate(chain, request, traced=True)
        hops = hops_of(first.usage.legs, before, first.statuses)
        second = await generate(chain, request)
        answered_s = time.monotonic() - opened
        return Trial(spec.name, chain.plan, first, second, hops, opened - began, answered_s)
