"""What a server's log says of its requests: a line for each that ends, and one every few seconds while it is busy."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from coordinator.cluster.log import log
from coordinator.resident.model import ResidentModel
from coordinator.resident.tally import Ended, Tally
from coordinator.resident.watch import Now, Watch
from worker.process.beside import beside

EVERY_S = 5.0


@dataclass(frozen=True)
class Counts:
    """What the tally had counted at a moment."""

    prompt: int
    generated: int

    @classmethod
    def of(cls, tally: Tally) -> "Counts":
        return cls(tally.prompt_tokens, tally.generation_tokens)


@asynccontextmanager
async def logged(tally: Tally, watch: Watch, model: Callable[[], ResidentModel | None]) -> AsyncIterator[None]:
    """Log requests as they end, and what goes on, until left."""
    tally.on_end = log_ended
    async with beside(StatusLine(tally, watch, model).keep_telling()):
        yield


def log_ended(ended: Ended) -> None:
    """One line, without a word of prompt or answer."""
    first = "" if ended.first_token_s is None else f", the first after {ended.first_token_s:.2f} s"
    why = f": {ended.why}" if ended.why else ""
    log(
        "request",
        f"{ended.id or 'request'}: {ended.finish_reason}{why}; {ended.num_prompt} prompt tokens, "
        f"{ended.num_generated} tokens in {ended.total_s:.2f} s{first}",
        level="warning" if ended.finish_reason in ("error", "refused") else "info",
        request_id=ended.id or None,
        finish_reason=ended.finish_reason,
        prompt_tokens=ended.num_prompt,
        completion_tokens=ended.num_generated,
        steps=ended.num_steps,
        decoder=ended.decoder,
        total_s=round(ended.total_s, 4),
        ttft_s=None if ended.first_token_s is None else round(ended.first_token_s, 4),
        queue_s=None if ended.queue_s is None else round(ended.queue_s, 4),
        cached_tokens=ended.num_reused,
        recoveries=ended.num_recoveries,
    )


def log_status(before: Counts, tally: Tally, now: Now, passed_s: float) -> None:
    """What went on since `before`, `passed_s` seconds ago."""
    counts = Counts.of(tally)
    states = [each.state for each in now.requests]
    usage = max((node.cache_promised_bytes / max(1, node.cache_budget_bytes) for node in now.nodes), default=0.0)
    slowest = max(now.nodes, key=lambda node: node.utilisation, default=None)
    prompt, generated = ((counts.prompt - before.prompt) / passed_s, (counts.generated - before.generated) / passed_s)
    reused = tally.prefix_hits / tally.prefix_queries if tally.prefix_queries else 0.0
    running, waiting = states.count("running"), states.count("waiting")
    busiest = f", busiest {slowest.name} ({slowest.utilisation:.0%})" if slowest else ""
    log(
        "status",
        f"prompt {prompt:.0f} tok/s, answers {generated:.1f} tok/s, running {running}, waiting {waiting}, "
        f"cache {usage:.0%}, prefixes {reused:.0%}{busiest}",
        prompt_tokens_per_s=round(prompt, 1),
        tokens_per_s=round(generated, 1),
        running=running,
        waiting=waiting,
        cache_usage=round(usage, 4),
        prefix_hit_rate=round(reused, 4),
        busiest=slowest.name if slowest else None,
    )


class StatusLine:
    """Says what went on since it was last asked, if anything did."""

    def __init__(self, tally: Tally, watch: Watch, model: Callable[[], ResidentModel | None]) -> None:
        self._tally = tally
        self._watch = watch
        self._model = model
        self._before = Counts.of(tally)

    async def tell(self, passed_s: float) -> None:
        """Log one line, or none."""
        if self._tally.under_way or Counts.of(self._tally) != self._before:
            log_status(self._before, self._tally, await self._watch.look(self._model()), passed_s)
        self._before = Counts.of(self._tally)

    async def keep_telling(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self.tell(EVERY_S)
