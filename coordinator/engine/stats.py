"""Statistics of one server: what its requests took and what its stages did. A few additions per step; no I/O."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram

from coordinator.engine.caller import ARRIVED, KEY_HOLDER, REQUEST_ID
from coordinator.sessions.output import Output, Usage
from coordinator.sessions.request import Request
from coordinator.sessions.waterfall import COMPUTING, PARTS, Passage, Route, spans
from worker.errors import BrigadeError, ContextExceeded, InputError, NodeBusy, QueueFull, WaitedTooLong

if TYPE_CHECKING:  # it imports mlx, for which --help should not wait
    from coordinator.cluster.recovery_record import Recovered

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = tuple(float(2**power) for power in range(18))
RATES_S = 120  # for which rates are kept
_NUM_RECENT = 24
_LAST_PLACE = 16  # from here on drafts are counted together
_REFUSALS = (QueueFull, WaitedTooLong, NodeBusy, ContextExceeded, InputError)  # the request was never run
_COUNTERS = {
    "prompt_tokens": ("Tokens of prompts whose answers began.", ()),
    "generation_tokens": ("Tokens of answers.", ()),
    "prefix_cache_queries": ("Prompt tokens looked up in caches.", ()),
    "prefix_cache_hits": ("Of those, tokens found there.", ()),
    "request_success": (
        "Answers and embeddings that ended, by reason; a request may have several.",
        ("finished_reason",),
    ),
    "requests_rejected": ("Requests that were never run.", ("reason",)),
    "key_requests": ("Answers and embeddings that ended, by the name of their API key.", ("key",)),
    "key_tokens": ("Tokens of their answers.", ("key",)),
    "recoveries": ("Lost chains that another one took over from.", ("cause",)),
    "decoder_tokens": ("Tokens of answers that ended.", ("decoder",)),
    "decoder_steps": ("Steps that they took.", ("decoder",)),
    "drafts": ("Drafts that these steps verified, by place.", ("decoder", "place")),
    "drafts_held": ("Of those, drafts that became tokens.", ("decoder", "place")),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": SECONDS,
    "inter_token_latency_seconds": SECONDS,
    "e2e_request_latency_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "request_decode_time_seconds": SECONDS,
    "recovery_seconds": SECONDS,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
}


class TokenRates:
    """Tokens and steps by second, for the last two minutes."""

    def __init__(self) -> None:
        self._seconds: dict[int, list[int]] = {}

    def add(self, second: int, num_tokens: int, num_steps: int = 1) -> None:
        """Count steps. Seconds need not come in order: some readers are slower than others."""
        counts = self._seconds.setdefault(second, [0, 0])
        counts[0] += num_tokens
        counts[1] += num_steps
        if len(self._seconds) > RATES_S + 1:  # with the present second
            del self._seconds[min(self._seconds)]

    def until(self, second: int) -> list[tuple[int, int]]:
        """Return (tokens, steps) of each of the seconds before this one, the oldest first."""
        zero = [0, 0]
        return [(at[0], at[1]) for at in (self._seconds.get(second - ago, zero) for ago in range(RATES_S, 0, -1))]


@dataclass(frozen=True)
class FinishedRequest:
    """A request that has ended. Times are in seconds; None for a stage of its life that it did not reach."""

    id: str
    key: str  # the name of its API key; empty without keys
    decoder: str  # empty, like `num_prompt` 0, if it was not read so far
    num_prompt: int
    num_generated: int
    num_steps: int
    finish_reason: str  # "stop", "length", "abort", "error" or "refused"
    why: str  # of an error
    ended_at: float  # since 1970
    total_s: float
    first_token_s: float | None
    queue_s: float | None
    num_recoveries: int
    num_reused: int
    parts_ms: dict[str, float]


class Stats:
    """The statistics of one server. They outlive the model, which may be loaded anew."""

    def __init__(self, on_end: Callable[[FinishedRequest], None] = lambda finished: None) -> None:
        """`on_end` is called with every request that has ended."""
        self._on_end = on_end
        self._started = time.monotonic()
        self.registry = CollectorRegistry(auto_describe=False)  # the global one belongs to the whole process
        self.counters = {
            name: Counter(f"brigade_{name}", text, labels, registry=self.registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self.histograms = {
            name: Histogram(
                f"brigade_{name}", name.replace("_", " ").capitalize(), buckets=buckets, registry=self.registry
            )
            for name, buckets in _HISTOGRAMS.items()
        }
        self.stages = StageTimes()
        self.rates = TokenRates()
        self.under_way: list[RequestStats] = []
        self.recent: deque[FinishedRequest] = deque(maxlen=_NUM_RECENT)
        # with seconds since 1970, and on the clock that is never set
        self.recovered: deque[tuple[float, float, Recovered]] = deque(maxlen=_NUM_RECENT)

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started

    def counts(self, name: str) -> dict[str, int]:
        """Return the values of a counter by its label; without a label by the empty text."""
        [family] = self.counters[name].collect()
        samples = [sample for sample in family.samples if sample.name.endswith("_total")]
        return {"".join(sample.labels.values()): int(sample.value) for sample in samples}

    def total(self, name: str) -> int:
        """Return the value of a counter, summed over its labels."""
        return sum(self.counts(name).values())

    def begin(self, request: Request) -> RequestStats:
        """Return the statistics of a request that begins; call `end` on them."""
        begun = RequestStats(self, request, REQUEST_ID.get(), KEY_HOLDER.get(), ARRIVED.get() or time.monotonic_ns())
        if not self.under_way:
            self.stages.rest(begun.started)
        begun.parts_before = dict(self.stages.parts)
        self.under_way.append(begun)
        return begun

    def refuse(self, error: BrigadeError) -> None:
        """Count a request that was refused before it was run."""
        self.counters["requests_rejected"].labels(type(error).__name__).inc()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request as refused if its prompt leaves no room for an answer: it never begins."""
        started = time.monotonic()
        try:
            yield
        except ContextExceeded as error:
            self.refuse(error)
            total_s = time.monotonic() - started
            self._keep(
                FinishedRequest(
                    REQUEST_ID.get(), KEY_HOLDER.get(), "", error.num_tokens, 0, 0, "refused", str(error), time.time(),
                    total_s, first_token_s=None, queue_s=None, num_recoveries=0, num_reused=0, parts_ms={},
                )
            )  # fmt: skip
            raise

    def recover(self, recovered: Recovered) -> None:
        self.counters["recoveries"].labels(recovered.cause).inc()
        self.histograms["recovery_seconds"].observe(recovered.took_s)
        self.recovered.append((time.time(), time.monotonic(), recovered))

    def finish(self, request: RequestStats, finished: FinishedRequest) -> None:
        """Count a request that has ended, in whatever way."""
        self.under_way.remove(request)
        self._keep(finished)

    def _keep(self, finished: FinishedRequest) -> None:
        self.recent.append(finished)
        self._on_end(finished)


class RequestStats:
    """The statistics of one request under way."""

    def __init__(self, stats: Stats, request: Request, request_id: str, key: str, started: int) -> None:
        self.id = request_id
        self.key = key
        self.request = request
        self.num_generated = 0
        self.started = started  # nanoseconds, monotonic
        self._stats = stats
        self._num_steps = 0  # up to the last output with tokens: a canvas takes several
        self._first_at = self._last_at = 0  # nanoseconds, monotonic
        self._usage = Usage()
        self._finish_reason = ""
        self.parts_before: dict[str, int] = {}  # of all stages' time, as it began

    @property
    def decoder(self) -> str:
        return self.request.decode.kind

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    def take(self, output: Output) -> None:
        """Count an output's tokens, and the steps that made them."""
        if num_tokens := len(output.tokens):
            counters = self._stats.counters
            num_later = num_tokens
            if not self._first_at:
                self._first_at = output.at
                counters["prompt_tokens"].inc(self.num_prompt)
                num_later -= 1
            gap_s = (output.at - self._last_at) / 1e9 / num_tokens if self._last_at else 0.0
            for _ in range(num_later):
                self._stats.histograms["inter_token_latency_seconds"].observe(gap_s)
            self._last_at = output.at
            num_steps, self._num_steps = output.num_steps - self._num_steps, output.num_steps
            self.num_generated += num_tokens
            counters["generation_tokens"].inc(num_tokens)
            self._stats.rates.add(output.at // 1_000_000_000, num_tokens, num_steps)
        if output.finish_reason is not None:
            self._finish_reason, self._usage = output.finish_reason, output.usage or self._usage

    def end(self, error: BaseException | None = None, usage: Usage | None = None) -> None:
        """Count the request as ended: finished, by this error, or aborted by its reader, at this cost."""
        if usage and not self._finish_reason:
            self._usage = usage
        if self._finish_reason:
            reason = self._finish_reason
        elif isinstance(error, _REFUSALS) and not self.num_generated:
            reason = "refused"
        else:
            reason = "error" if isinstance(error, Exception) else "abort"
        finished = self._finished(reason, str(error) if isinstance(error, BrigadeError) else "")
        if reason == "refused" and isinstance(error, BrigadeError):
            self._stats.refuse(error)
        else:
            self._observe(finished)
        self._stats.finish(self, finished)

    def _finished(self, reason: str, why: str) -> FinishedRequest:
        now = time.monotonic_ns()
        usage = self._usage
        return FinishedRequest(
            id=self.id,
            key=self.key,
            decoder=self.decoder,
            num_prompt=self.num_prompt,
            num_generated=self.num_generated,
            num_steps=usage.num_steps or self._num_steps,
            finish_reason=reason,
            why=why,
            ended_at=time.time(),
            total_s=(now - self.started) / 1e9,
            first_token_s=(self._first_at - self.started) / 1e9 if self._first_at else None,
            queue_s=max(0, usage.begun - self.started) / 1e9 if usage.begun else None,
            num_recoveries=usage.num_recoveries,
            num_reused=usage.num_reused,
            parts_ms={part: (ns - self.parts_before[part]) / 1e6 for part, ns in self._stats.stages.parts.items()},
        )

    def _observe(self, finished: FinishedRequest) -> None:
        counters, histograms = self._stats.counters, self._stats.histograms
        counters["request_success"].labels(finished.finish_reason).inc()
        if finished.key:
            counters["key_requests"].labels(finished.key).inc()
            counters["key_tokens"].labels(finished.key).inc(finished.num_generated)
        counters["decoder_tokens"].labels(finished.decoder).inc(finished.num_generated)
        counters["decoder_steps"].labels(finished.decoder).inc(finished.num_steps)
        drafts = zip(self._usage.num_drafts, self._usage.num_drafts_held, strict=True)
        for place, (tried, held) in enumerate(drafts, 1):
            labels = finished.decoder, str(place) if place < _LAST_PLACE else f"{_LAST_PLACE}+"
            counters["drafts"].labels(*labels).inc(tried)
            counters["drafts_held"].labels(*labels).inc(held)
        histograms["e2e_request_latency_seconds"].observe(finished.total_s)
        histograms["request_prompt_tokens"].observe(finished.num_prompt)
        histograms["request_generation_tokens"].observe(finished.num_generated)
        if finished.first_token_s is None:
            return
        histograms["time_to_first_token_seconds"].observe(finished.first_token_s)
        if finished.queue_s is None:
            return
        counters["prefix_cache_queries"].inc(finished.num_prompt)
        counters["prefix_cache_hits"].inc(finished.num_reused)
        histograms["request_queue_time_seconds"].observe(finished.queue_s)
        histograms["request_prefill_time_seconds"].observe(max(0.0, finished.first_token_s - finished.queue_s))
        histograms["request_decode_time_seconds"].observe((self._last_at - self._first_at) / 1e9)


_WINDOW_NS = 10_000_000_000
_MARK_NS = 500_000_000


@dataclass
class StageTotals:
    """One stage's sums, nanoseconds. Waits are counted whole: other frames may have been computed meanwhile."""

    stage: int
    worker: str
    num_frames: int = 0
    compute: int = 0
    wire: int = 0  # of the hop into this stage; on the first one of the way back to it
    queue: int = 0
    num_hops: int = 0  # of frames that found the stage idle
    hops: int = 0  # their times
    busy: int = 0  # no moment counts twice
    bubble: int = 0  # idle while a frame was on its way
    busy_until: int = 0  # on the coordinator's clock

    def add(self, part: str, begin: int, end: int) -> int:
        """Add a part of a frame's time; return for how long the stage computed only this frame."""
        took = max(0, end - begin)
        if part in COMPUTING:
            at_work = max(0, end - max(begin, self.busy_until))
            self.compute += took
            self.busy += at_work
            self.busy_until = max(self.busy_until, end)
            return at_work
        if part == "queue":  # every frame has one at every stage that it passes
            self.num_frames += 1
            self.queue += took
        else:
            self.add_hop(took, max(0, min(end, self.busy_until) - begin))
        return 0

    def add_hop(self, took: int, waited: int) -> None:
        """Add a hop into this stage, of which the message waited until the stage's step had ended and it was read."""
        self.wire += took - waited
        self.queue += waited
        if not waited:  # otherwise it is not known when it came
            self.num_hops += 1
            self.hops += took


@dataclass
class _WayBack:
    """A result's way to the first stage, during which that may have computed frames whose results are not back yet."""

    begin: int
    end: int
    seen: int  # the steps of the first stage are known until then
    waited: int = 0

    def skip(self, begin: int, end: int) -> None:
        """Count a step of the first stage."""
        self.waited += max(0, min(end, self.end) - max(begin, self.seen))
        self.seen = max(self.seen, end)


class StageTimes:
    """All stages' sums, and the parts of the time in which a frame was on its way. Pure.

    A request's waterfall is the growth of these sums while it ran: requests that ran together share their moments.
    """

    def __init__(self) -> None:
        self.parts = dict.fromkeys(PARTS, 0)  # nanoseconds; each moment is in one of them
        self._all: dict[tuple[int, str], StageTotals] = {}
        self._now: list[StageTotals] = []  # of the present chain
        self._route: Route | None = None
        self._until = 0  # everything before is in the parts
        self._ways_back: deque[_WayBack] = deque()  # those that are not in the sums yet
        self._marks: deque[tuple[int, list[tuple[StageTotals, int]]]] = deque()  # moments, and stages' `busy` then

    @property
    def totals(self) -> list[StageTotals]:
        """The sums of every pair of a stage and a worker since the start."""
        return list(self._all.values())

    def rest(self, until: int) -> None:
        """Leave out the time until this moment: no frame was on its way."""
        self._until = max(self._until, until)

    def end_chain(self) -> None:
        """Note that the present chain ended on purpose: the next one is no recovery."""
        self._route = None

    def take(self, route: Route, passage: Passage) -> None:
        """Count a frame; the first one of another chain ends a recovery."""
        between = "scheduling"
        if route is not self._route:
            between = "recovery" if self._route else between
            self._begin_chain(route)
        tiles = spans(passage, route.offsets)
        self._spend(between, tiles[0][2])
        before = self._until
        worked = [0] * len(self._now)  # a frame may stay on the first stage
        self._add_ways_back(tiles[1][2], tiles[5][3])
        for part, stage, begin, end in tiles:
            self._spend(part, min(end, passage.returned))
            if part == "return":
                self._ways_back.append(_WayBack(begin, max(begin, end), seen=begin))
            else:
                worked[stage] += self._now[stage].add(part, begin, end)
        for totals, at_work in zip(self._now, worked, strict=True):
            totals.bubble += max(0, self._until - before - at_work)
        self._mark(passage.returned)

    def utilisation(self, now: int) -> dict[str, float]:
        """Return by worker of the present chain the busy share of the last ten seconds, 0 to 1."""
        marks = list(self._marks)
        before = [busy for at, busy in marks if at <= now - _WINDOW_NS] or [busy for _, busy in marks[:1]]
        return {
            totals.worker: min(1.0, (totals.busy - busy) / _WINDOW_NS) for mark in before[-1:] for totals, busy in mark
        }

    def _begin_chain(self, route: Route) -> None:
        self._route = route
        places = [(stage, node.name) for stage, node in enumerate(route.nodes)]
        self._now = [self._all.setdefault(place, StageTotals(*place)) for place in places]
        self._ways_back.clear()
        self._marks.clear()
        self._mark(0)  # all that follows is this chain's work

    def _add_ways_back(self, begin: int, end: int) -> None:
        """Add those that ended before this step of the first stage; the others may have waited for it."""
        while self._ways_back and self._ways_back[0].end <= begin:
            way = self._ways_back.popleft()
            self._now[0].add_hop(way.end - way.begin, way.waited)
        for way in self._ways_back:
            way.skip(begin, end)

    def _spend(self, part: str, until: int) -> None:
        """Count the time from the end of the last part until then; nothing if a clock is wrong."""
        if until > self._until:
            self.parts[part] += until - self._until
            self._until = until

    def _mark(self, now: int) -> None:
        """Note what the stages have done: the last mark is of the last frame, one is older than the window."""
        mark = now, [(totals, totals.busy) for totals in self._now]
        if len(self._marks) > 1 and now - self._marks[-2][0] < _MARK_NS:
            self._marks[-1] = mark
        else:
            self._marks.append(mark)
        while len(self._marks) > 1 and self._marks[1][0] < now - _WINDOW_NS:
            self._marks.popleft()
