"""`brigade smoke`: every node of the configuration in one chain, eight tokens, twice. Nothing that runs is ended."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment
from coordinator.cluster.open import joined, make_plan, members_of, open_peers, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import ASKING, STARTING, say, show_progress
from coordinator.cluster.runner import generate
from coordinator.examine.trial import Trial, hops_of
from coordinator.planning.plan import require_fit
from coordinator.sessions.request import Request
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec
from worker.process.machine import kept_awake

NUM_TOKENS = 8
_PROMPT = 8  # tokens, of any meaning: what is tried needs none


async def try_cluster(options: ClusterOptions) -> Trial:
    """Raises what the first node that fails fails with: a chain that is lost stays lost here."""
    began = time.monotonic()
    checkpoint, spec = await read_model(options.model)
    request = Request(tuple(token % spec.vocab_size for token in range(1, _PROMPT + 1)), NUM_TOKENS)
    async with _whole_chain(options, checkpoint, spec) as chain:
        opened = time.monotonic()
        before = await chain.statuses()
        first = await generate(chain, request, traced=True)
        hops = hops_of(first.usage.legs, before, first.statuses)
        second = await generate(chain, request)
        answered_s = time.monotonic() - opened
        return Trial(spec.name, chain.plan, first, second, hops, opened - began, answered_s)


@asynccontextmanager
async def _whole_chain(options: ClusterOptions, checkpoint: Checkpoint, spec: ModelSpec) -> AsyncIterator[Chain]:
    """Over every node, whether it makes anything faster or not, split by what each may hold."""
    async with AsyncExitStack() as stack:
        stack.enter_context(kept_awake())
        with show_progress() as progress:
            progress("", STARTING if options.local else ASKING)
            peers = await stack.enter_async_context(open_peers(options, spec))
            plan = await make_plan(options.cluster, spec, peers, options.context)
            require_fit(plan, spec)
            deployment = Deployment(checkpoint, spec, plan, members_of(plan, peers))
            chain = await stack.enter_async_context(joined(deployment, progress, say=say))
        yield chain
