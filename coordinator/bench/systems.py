"""The systems that a benchmark compares: this code on a chain, and mlx_lm in this process."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import load_model

from coordinator.bench.results import MLX_LM, BenchTrial, sent_between
from coordinator.cluster.chain import Chain
from coordinator.engine.engine import Engine
from coordinator.sessions.request import Request, most_rows
from coordinator.sessions.slots import cache_costs
from worker.errors import InputError
from worker.model.checkpoint import open_folder
from worker.model.families import module_of
from worker.platform.tasks import together


class System(Protocol):
    """A system that answers several requests at once."""

    name: str
    layers: list[int] | None
    chain: Chain  # the system uses the memory of its nodes

    async def run(self, requests: Sequence[Request]) -> BenchTrial:
        """Raises InputError if it cannot serve such requests."""
        ...


class OnChain:
    """This code: in one process, or on the cluster."""

    def __init__(self, name: str, chain: Chain) -> None:
        self.name = name
        self.layers: list[int] | None = chain.plan.layers
        self.chain = chain

    async def run(self, requests: Sequence[Request], first: Request | None = None) -> BenchTrial:
        """Answer the requests; `first` is answered before, so that its prompt is in the caches."""
        before = await self.chain.statuses()
        async with Engine(self.chain) as engine:
            if first is not None:
                await engine.answer(first, traced=True)
            started, thread_s = time.monotonic(), time.thread_time()
            answers = await together(*(engine.answer(request, traced=True) for request in requests))
            loop_share = (time.thread_time() - thread_s) / (time.monotonic() - started)
        after = await self.chain.statuses()
        passages = {id(passage): passage for answer in answers for passage in answer.passages}
        return BenchTrial(
            num_prompt=sum(len(request.prompt) for request in requests),
            started=started,
            token_times=[[at / 1e9 for at in answer.token_times] for answer in answers],
            passages=list(passages.values()),
            offsets=self.chain.clock_offsets,
            sent_bytes=sent_between(before, after),
            loop_share=loop_share,
        )


class MlxLmModel:
    """The unsharded model of a folder, loaded and run by mlx_lm alone. MLX thread only."""

    def __init__(self, folder: Path) -> None:
        config = {"model_type": module_of(open_folder(folder).config)}
        self._model, _ = load_model(folder, model_config=config)

    def time_tokens(
        self, prompts: Sequence[list[int]], num_tokens: int, is_stopped: Callable[[], bool]
    ) -> list[list[float]]:
        """Return when each token of each prompt came, seconds on the monotonic clock, by mlx_lm's own generators.

        One prompt runs in `generate_step`, several in the BatchGenerator of `batch_generate`. Answers end early only
        if `is_stopped`, which is asked between two steps.
        """
        times: list[list[float]] = [[] for _ in prompts]
        if len(prompts) == 1:
            for _ in generate_step(mx.array(prompts[0]), self._model, max_tokens=num_tokens):
                times[0].append(time.monotonic())
                if is_stopped():
                    break
            return times
        batch = BatchGenerator(self._model, prefill_batch_size=len(prompts), completion_batch_size=len(prompts))
        places = dict(zip(batch.insert(list(prompts), [num_tokens] * len(prompts)), times, strict=True))
        while not is_stopped() and (responses := batch.next_generated()):
            now = time.monotonic()
            for response in responses:
                places[response.uid].append(now)
        batch.close()
        return times


class OnMlxLm:
    """mlx_lm in this process, on the chain's thread: its batch generator, or its stream for a single request."""

    name = MLX_LM
    layers: list[int] | None = None

    def __init__(self, model: MlxLmModel, chain: Chain) -> None:
        self.chain = chain
        self._model = model

    async def run(self, requests: Sequence[Request]) -> BenchTrial:
        """Raises InputError for caches that mlx_lm cannot batch."""
        prompts, num_tokens = [list(request.prompt) for request in requests], requests[0].max_tokens
        stop = threading.Event()
        started = time.monotonic()
        try:
            times = await self.chain.thread.run(lambda: self._model.time_tokens(prompts, num_tokens, stop.is_set))
        except ValueError as error:
            raise InputError("", f"mlx_lm cannot: {error}") from error
        finally:
            stop.set()  # on an interrupt the thread must end with this process
        return BenchTrial(sum(map(len, prompts)), started, times)


def most_at_once(chain: Chain, request: Request) -> int:
    """Return how many such requests the chain's nodes have memory for; more would wait, and distort the result."""
    costs = cache_costs(chain.plan, chain.spec)
    needed = costs.bytes_of(request.cache, most_rows(request, chain.spec.context))
    return min(budget // max(1, need) for budget, need in zip(costs.budgets, needed, strict=True))
