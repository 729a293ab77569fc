"""Simulation: the product's own scheduler on a simulated clock, with given times of stages and hops. Pure."""

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from coordinator.decoding.decoders import Canvas, Decoder
from coordinator.planning.costs import ChainCosts, LaneChooser, chunk_size, on_lines
from coordinator.sessions.cache_costs import CacheCosts
from coordinator.sessions.request import Request
from coordinator.sessions.scheduler import Scheduler
from coordinator.sessions.session import Session
from protos.brigade_pb2 import Frame, Result, Sample
from worker.compute.header import num_rows as count_rows
from worker.model.model_spec import CanvasTraining

SecondsByRows = tuple[tuple[int, float], ...]  # of a frame on one stage, ascending: linear between these points


@dataclass(frozen=True)
class Hop:
    """The way of a frame to the next stage, or of a result back; `row_bytes` is the size of a row, or of an answer."""

    latency_s: float
    bytes_per_s: float = math.inf
    row_bytes: int = 0

    def seconds(self, num_rows: int) -> float:
        return self.latency_s + num_rows * self.row_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Pipeline:
    """The times of a chain: a hop follows every stage; the last one leads back to the coordinator."""

    stages: tuple[SecondsByRows, ...]
    hops: tuple[Hop, ...]

    def stage_s(self, stage: int, num_rows: int) -> float:
        """Return the time of a frame; 0 if it has no rows."""
        return on_lines(self.stages[stage], num_rows) if num_rows else 0.0

    def stages_s(self, num_rows: int) -> list[float]:
        return [self.stage_s(stage, num_rows) for stage in range(len(self.stages))]

    def hops_s(self, num_rows: int) -> float:
        return sum(hop.seconds(num_rows) for hop in self.hops)


@dataclass(frozen=True)
class SimulatedLoad:
    """Requests by their times of arrival, seconds, each with `num_prompt` tokens and `num_tokens` to generate.

    Prompts go in chunks of `chunk` rows, or of as many as the scheduler chooses.
    With `goes_on`, requests continue until all have generated `num_tokens` tokens while all of them decode.
    With a `canvas`, places and steps, so many tokens become known together after so many steps.
    """

    arrivals_s: tuple[float, ...]
    num_prompt: int
    num_tokens: int
    chunk: int | None = None
    goes_on: bool = False
    canvas: tuple[int, int] | None = None

    def make_decoder(self) -> Decoder | None:
        """Return the decoder of one request; None: one token per step."""
        if self.canvas is None:
            return None
        length, num_steps = self.canvas
        return Canvas(CanvasTraining(0, length), length, lambda guesses, step: [], num_steps, frozenset())


@dataclass
class Simulated:
    """The result of a simulation. All times are seconds of the simulated clock."""

    arrivals_s: tuple[float, ...]
    token_times: list[list[float]]
    busy: list[list[tuple[float, float]]] = field(default_factory=list)  # by stage: intervals of computing
    together: tuple[float, float] | None = None  # with `goes_on`: the span in which all decode

    @property
    def span(self) -> tuple[float, float]:
        """The span over which speeds are taken."""
        return self.together or steady_span(self.token_times)

    @property
    def tokens_per_s(self) -> float:
        """The speed of all requests together."""
        return aggregate_tokens_per_s(self.token_times, self.span)

    @property
    def ttft_s(self) -> list[float]:
        return [times[0] - arrival for times, arrival in zip(self.token_times, self.arrivals_s, strict=True)]

    @property
    def gaps_s(self) -> list[float]:
        """All pauses between one token of a request and the next."""
        return [after - before for times in self.token_times for before, after in itertools.pairwise(times)]

    @property
    def utilisation(self) -> list[float]:
        """The busy share of each stage over the span."""
        return [busy_share(intervals, *self.span) for intervals in self.busy]


def steady_span(token_times: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the span in which all requests decode: from the latest first token to the earliest last token.

    If less than half of the tokens come in that span, return that from the very first to the very last token.
    """
    begin, end = max(times[0] for times in token_times), min(times[-1] for times in token_times)
    if 2 * _num_within(token_times, begin, end) >= sum(map(len, token_times)):
        return begin, end
    return min(times[0] for times in token_times), max(times[-1] for times in token_times)


def aggregate_tokens_per_s(token_times: Sequence[Sequence[float]], span: tuple[float, float] | None = None) -> float:
    """Return tokens per second of all requests over a span, by default the steady one; 0 if it has no length."""
    begin, end = span or steady_span(token_times)
    return _num_within(token_times, begin, end) / (end - begin) if begin < end else 0.0


def _num_within(token_times: Sequence[Sequence[float]], begin: float, end: float) -> int:
    return sum(begin < at <= end for times in token_times for at in times)


def busy_share(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Return the share of [begin, end] that these intervals, which do not overlap, cover."""
    covered = sum(max(0.0, min(ended, end) - max(started, begin)) for started, ended in intervals)
    return covered / (end - begin) if begin < end else 0.0


def simulate(pipeline: Pipeline, load: SimulatedLoad, costs: ChainCosts | None = None) -> Simulated:
    """Run the load through the scheduler: one token per step or canvas, unlimited memory.

    `costs` choose the chunks and learn from each frame; without them the pipeline's own times are known.
    """
    return _Run(pipeline, load, costs).run()


_ENDLESS = 10**9  # tokens of a request with `goes_on`


class _Run:
    def __init__(self, pipeline: Pipeline, load: SimulatedLoad, costs: ChainCosts | None) -> None:
        num_stages = len(pipeline.stages)
        unlimited = CacheCosts(
            budgets=(1,) * num_stages,
            nodes=tuple(f"stage {stage}" for stage in range(num_stages)),
            bytes_of=lambda cache, rows: (0,) * num_stages,
            rows_that_can_be_cut=lambda cache: 0,
            snapshot_bytes=lambda cache: (2,) * num_stages,  # no room for any: nobody comes back
        )
        self._pipeline = pipeline
        num_tokens = _ENDLESS if load.goes_on else load.num_tokens
        self._load = load
        self._most_steps = load.canvas[1] if load.canvas else 1  # of a canvas
        lanes = LaneChooser(num_stages, pipeline.stages_s, pipeline.hops_s)
        self._costs = costs
        choose = costs.chunk_size if costs else partial(chunk_size, stages_s=pipeline.stages_s)
        self._scheduler = Scheduler(
            *(num_stages, unlimited),
            max_waiting=len(load.arrivals_s),
            lanes=lanes.choose,
            chunk_rows=lambda session, unfed, beside: session.chunk or choose(unfed, beside_streams=beside),
        )
        self._sessions = [
            # different prompts, so that no prefix is shared
            Session(Request((number, *range(1, load.num_prompt)), num_tokens), load.make_decoder(), chunk=load.chunk)
            for number in range(len(load.arrivals_s))
        ]
        self._token_times: dict[Session, list[float]] = {session: [] for session in self._sessions}
        self._simulated = Simulated(load.arrivals_s, list(self._token_times.values()), [[] for _ in range(num_stages)])
        self._free_at = [0.0] * num_stages  # by stage
        self._link_free_at = [0.0] * num_stages
        self._events: list[tuple[float, int, int, Frame | Session]] = []  # when, tie breaker, stage, what
        self._order = itertools.count()

    def run(self) -> Simulated:
        for arrival_s, session in zip(self._simulated.arrivals_s, self._sessions, strict=True):
            self._at(arrival_s, 0, session)
        while self._events and self._simulated.together is None:
            now, _, stage, what = heapq.heappop(self._events)
            if isinstance(what, Session):
                self._scheduler.slots.add(what)
                self._send_all(now)
            elif stage < len(self._pipeline.stages):
                self._compute(now, stage, what)
            else:
                self._commit(now, what)
                self._send_all(now)
        return self._simulated

    def _at(self, when: float, stage: int, what: Frame | Session) -> None:
        heapq.heappush(self._events, (when, next(self._order), stage, what))

    def _send_all(self, now: float) -> None:
        while (frame := self._scheduler.schedule()) is not None:
            self._at(now, 0, frame)

    def _compute(self, now: float, stage: int, frame: Frame) -> None:
        """Each frame waits for the one before it, at the stage and on the link behind it."""
        num_rows = sum(map(count_rows, frame.windows))
        compute_s, hop = self._pipeline.stage_s(stage, num_rows), self._pipeline.hops[stage]
        if stage == len(self._pipeline.stages) - 1:
            # the last step of a canvas sends nothing back: no step follows that would need it
            num_rows = sum(w.wanted + w.guessed * (w.canvas_step < self._most_steps) for w in frame.windows)
        started = max(now, self._free_at[stage])
        done = self._free_at[stage] = started + compute_s
        self._simulated.busy[stage].append((started, done))
        sent = max(done, self._link_free_at[stage]) + hop.seconds(num_rows) - hop.latency_s
        self._link_free_at[stage] = sent
        self._at(sent + hop.latency_s, stage + 1, frame)

    def _commit(self, now: float, frame: Frame) -> None:
        if self._costs and (num_rows := sum(map(count_rows, frame.windows))):
            self._costs.observe(num_rows, self._pipeline.stages_s(num_rows), 0.0, was_alone=False)
        samples = [Sample(slot=window.slot, token=7) for window in frame.windows if window.wanted]
        guesses = [Sample(slot=w.slot, token=7, likeliest=7) for w in frame.windows for _ in range(w.guessed)]
        result = Result(epoch=frame.epoch, step=frame.step, samples=samples, guesses=guesses)
        for session, known in self._scheduler.commit(result):
            self._token_times[session] += [now] * len(known)
            if session.finish_reason is not None:
                self._scheduler.close(session)
        if self._load.goes_on:
            self._simulated.together = self._span_of_all(now)

    def _span_of_all(self, now: float) -> tuple[float, float] | None:
        """Return the span from the latest first token until now once all have made enough tokens in it."""
        times = self._simulated.token_times
        if min(map(len, times)) <= self._load.num_tokens:
            return None
        begin = max(each[0] for each in times)
        return (begin, now) if all(each[-self._load.num_tokens] > begin for each in times) else None
