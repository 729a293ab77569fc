"""What a benchmark compares: this code on a chain, and mlx_lm in this process. Each answers requests all at once."""

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from coordinator.cluster.chain import Chain
from coordinator.cluster.runner import Runner
from coordinator.cluster.together import together
from coordinator.measure.bench_results import MLX_LM, Trial, sent_between
from coordinator.measure.reference import Reference
from coordinator.sessions.answer import Answer
from coordinator.sessions.request import Request, most_rows
from coordinator.sessions.slots import cache_costs
from worker.errors import InputError


class System(Protocol):
    """Something that answers requests, all of them at once."""

    name: str
    layers: list[int] | None
    chain: Chain  # whose nodes' memory it takes

    async def run(self, requests: Sequence[Request]) -> Trial:
        """Raises InputError if it cannot serve such requests."""
        ...


class OnChain:
    """This code: in one process, or on the cluster."""

    def __init__(self, name: str, chain: Chain) -> None:
        self.name = name
        self.layers: list[int] | None = chain.plan.layers
        self.chain = chain

    async def run(self, requests: Sequence[Request], first: Request | None = None) -> Trial:
        """`first` is answered before them: whoever begins alike finds that prompt in the caches."""
        before = await self.chain.statuses()
        async with Runner(self.chain) as runner:
            if first is not None:
                await _answer(runner, first)
            started, thread_s = time.monotonic(), time.thread_time()
            answers = await together(*(_answer(runner, request) for request in requests))
            loop_share = (time.thread_time() - thread_s) / (time.monotonic() - started)
        after = await self.chain.statuses()
        passages = {id(passage): passage for answer in answers for passage in answer.passages}
        return Trial(
            num_prompt=sum(len(request.prompt) for request in requests),
            started=started,
            token_times=[[at / 1e9 for at in answer.token_times] for answer in answers],
            passages=list(passages.values()),
            offsets=self.chain.clock_offsets,
            sent_bytes=sent_between(before, after),
            loop_share=loop_share,
        )


class OnMlxLm:
    """mlx_lm in this process, on the thread of that chain: its batch generator, or its stream for a single request."""

    name = MLX_LM
    layers: list[int] | None = None

    def __init__(self, reference: Reference, chain: Chain) -> None:
        self.chain = chain
        self._reference = reference

    async def run(self, requests: Sequence[Request]) -> Trial:
        prompts, num_tokens = [request.prompt for request in requests], requests[0].max_tokens
        stop = threading.Event()
        started = time.monotonic()
        try:
            times = await self.chain.thread.run(
                lambda: self._reference.time_batch(prompts, num_tokens, lambda: not stop.is_set())
            )
        except ValueError as error:  # it has caches that it cannot batch
            raise InputError("", f"mlx_lm cannot: {error}") from error
        finally:
            stop.set()  # if the user has had enough, the thread must end with this process
        return Trial(sum(map(len, prompts)), started, times)


def most_at_once(chain: Chain, request: Request) -> int:
    """How many such requests the chain's nodes have memory for; any more would wait, and be measured waiting."""
    costs = cache_costs(chain.plan, chain.spec)
    needed = costs.bytes_of(request.cache, most_rows(request, chain.spec.context))
    return min(budget // max(1, need) for budget, need in zip(costs.budgets, needed, strict=True))


async def _answer(runner: Runner, request: Request) -> Answer:
    """With the passages of all its frames."""
    return await runner.answer(request, traced=True)
