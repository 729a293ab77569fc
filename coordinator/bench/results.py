"""The results of a benchmark: trials become rows, rows become ratios. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Annotated, Any

from pydantic import Field

from coordinator.bench.simulate import (
    Hop,
    Pipeline,
    SimulatedLoad,
    aggregate_tokens_per_s,
    busy_share,
    simulate,
    steady_span,
)
from coordinator.planning.prediction import Prediction
from coordinator.sessions.output import speed_after_first
from coordinator.sessions.waterfall import Passage, joined, overlap
from protos.brigade_pb2 import StatusReply
from worker.errors import BrigadeError

# as `plan --simulate --measured` reads them
StageMsByRows = Annotated[  # rows of a frame -> mean
    dict[Annotated[int, Field(ge=1, le=1_000_000)], Annotated[float, Field(ge=0.001, le=1e6, allow_inf_nan=False)]],
    Field(min_length=1),
]
HopMs = Annotated[float, Field(le=1e6, allow_inf_nan=False)]  # may be negative because of clock errors

ONE_PROCESS, MLX_LM, CLUSTER = "one process", "mlx_lm", "cluster"


@dataclass(frozen=True)
class BenchTrial:
    """One run of several requests at once. Times are seconds on the coordinator's clock; defaults mean no chain."""

    num_prompt: int  # tokens of all prompts
    started: float
    token_times: list[list[float]]
    passages: list[Passage] = field(default_factory=list)
    offsets: Sequence[int] = ()  # nanoseconds, by stage
    sent_bytes: Sequence[int | None] = ()  # by stage; None if unknown
    loop_share: float | None = None  # of a core, used by the coordinator's event loop
    first_steps: int = 1  # up to a request's first tokens, the most: several for a canvas

    @property
    def prefill_s(self) -> float:
        """The time until every request has its first token."""
        return max(times[0] for times in self.token_times) - self.started

    @property
    def tokens_per_s(self) -> float | None:
        """Return the speed of all requests together over the steady span; None if all tokens come in one step."""
        return aggregate_tokens_per_s(self.token_times) or None

    def utilisation(self) -> list[float]:
        """Return the share of the steady span in which each stage computes."""
        span = steady_span(self.token_times)

        def computed(stage: int, offset: int) -> Iterator[tuple[float, float]]:
            for passage in self.passages:
                for timing in passage.timings[stage : stage + 1]:  # it may have stayed on stages before
                    yield (timing.started - offset) / 1e9, (timing.sampled - offset) / 1e9

        return [busy_share(computed(stage, offset), *span) for stage, offset in enumerate(self.offsets)]


@dataclass(frozen=True)
class BenchRow:
    """Medians over the trials of one system; percentiles are over all tokens of all trials."""

    system: str
    layers: list[int] | None
    decode: str
    concurrency: int
    prompt_tokens_per_s: float | None  # None if the first tokens take several steps
    tokens_per_s_per_request: float | None  # None, like the gaps and the stages' shares, if all tokens come in one step
    tokens_per_s: float | None  # of all requests together, over the steady span
    ttft_p50_s: float
    ttft_p95_s: float
    gap_p50_ms: float | None  # between one token of a request and the next
    gap_p95_ms: float | None
    utilisation: list[float] | None = None  # by stage
    bubble: float | None = None  # the share of the time in which a stage is idle, mean over the stages
    bytes_per_token: list[float | None] | None = None  # by stage: bytes sent on per token, prompts included
    loop_share: float | None = None
    overhead_ms_per_token: float | None = None  # against one process
    predicted_tokens_per_s: float | None = None  # by simulation with the measured stage times
    planned_tokens_per_s: float | None = None  # from the speeds that the nodes measured of themselves
    # by stage: rows of a frame -> mean; None, like `hop_ms`, if frames did not all pass the chain
    stage_ms: list[dict[int, float]] | None = None
    # by stage: mean from the end of computing to the arrival at the next stage, while that is idle
    hop_ms: list[float] | None = None


@dataclass(frozen=True)
class FrameCosts:
    """Times of frames of several sizes on one split while all stages are busy, milliseconds."""

    layers: list[int]
    stage_ms: list[StageMsByRows]  # by stage
    hop_ms: list[HopMs]


@dataclass(frozen=True)
class PromptRow:
    """How long one system takes for a prompt of this length, alone: until the first token, median over the trials."""

    system: str
    layers: list[int] | None
    prompt_tokens: int
    prompt_s: float
    prompt_tokens_per_s: float
    planned_s: float | None  # from the speeds that the nodes measured of themselves


@dataclass
class Bench:
    machine: str
    model: str
    num_prompt: int  # tokens per request
    num_tokens: int
    most_requests: int  # the largest number at once that was asked for
    rows: list[BenchRow]
    frame_costs: list[FrameCosts] = field(default_factory=list)  # by split
    prompts: list[PromptRow] = field(default_factory=list)
    failure: BrigadeError | None = None  # of the cluster, which ended the run early

    def as_json(self) -> dict[str, Any]:
        """Return the object of `bench --json`; its ratios are of one-token decoding on the first split, or null."""

        def ratio(value: str, count: int, of: str, to: str) -> float | None:
            one, other = (getattr(self._find(system, count), value, None) for system in (of, to))
            return one / other if one and other else None

        single = self._find(CLUSTER, 1)
        return {
            "machine": self.machine,
            "model": self.model,
            "prompt_tokens": self.num_prompt,
            "generated_tokens": self.num_tokens,
            "rows": [asdict(row) for row in self.rows],
            "overhead_ms_per_token": single and single.overhead_ms_per_token,
            "ratio_vs_one_process": ratio("tokens_per_s_per_request", 1, CLUSTER, ONE_PROCESS),
            "prefill_ratio_vs_one_process": ratio("prompt_tokens_per_s", self.most_requests, CLUSTER, ONE_PROCESS),
            "ratio_vs_mlx_lm_batch": ratio("tokens_per_s", self.most_requests, CLUSTER, MLX_LM),
            "fastest": [
                {key: getattr(row, key) for key in ("concurrency", "layers", "decode", "tokens_per_s")}
                for row in fastest_splits(self.rows)
            ],
            "frame_costs": [asdict(costs) for costs in self.frame_costs],
            "prompts": [asdict(row) for row in self.prompts],
        }

    def _find(self, system: str, count: int) -> BenchRow | None:
        return next((r for r in self.rows if (r.system, r.decode, r.concurrency) == (system, "ar", count)), None)


def fastest_splits(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the rows of the fastest splits: at the largest number of requests, and at one request.

    Only numbers of requests with which every split was measured count; a single split has no rows to compare.
    """
    by_split: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    rows = [row for row in rows if row.system == CLUSTER and row.tokens_per_s]
    for row in rows:
        by_split[tuple(row.layers or ())].add(row.concurrency)
    counts = set.intersection(*by_split.values()) if len(by_split) > 1 else set()
    compared = sorted({max(counts), 1} & counts, reverse=True) if counts else []
    return [
        max((row for row in rows if row.concurrency == count), key=lambda row: row.tokens_per_s or 0.0)
        for count in compared
    ]


def system_name(system: str, layers: Sequence[int] | None) -> str:
    """Return the name of a system in tables and messages, for a cluster with its split."""
    return f"{system} {','.join(map(str, layers))}" if system == CLUSTER and layers else system


def summarise(system: str, layers: list[int] | None, decode: str, trials: Sequence[BenchTrial]) -> BenchRow:
    """Return the row of one system's trials."""
    ttfts = [times[0] - trial.started for trial in trials for times in trial.token_times]
    gaps = [1e3 * (b - a) for trial in trials for times in trial.token_times for a, b in pairwise(times)]
    found = (speed_after_first(times) for trial in trials for times in trial.token_times)
    speeds = [speed for speed in found if speed is not None]
    together = [speed for trial in trials if (speed := trial.tokens_per_s) is not None]
    has_prompt_time = max(trial.first_steps for trial in trials) < 2  # or else the time of the first canvas is in it
    row = BenchRow(
        system=system,
        layers=layers,
        decode=decode,
        concurrency=len(trials[0].token_times),
        prompt_tokens_per_s=median(trial.num_prompt / trial.prefill_s for trial in trials) if has_prompt_time else None,
        tokens_per_s_per_request=median(speeds) if speeds else None,
        tokens_per_s=median(together) if together else None,
        ttft_p50_s=median(ttfts),
        ttft_p95_s=_percentile(ttfts, 0.95),
        gap_p50_ms=median(gaps) if speeds else None,
        gap_p95_ms=_percentile(gaps, 0.95) if speeds else None,
    )
    return _with_stages(row, trials) if trials[0].passages else row


def with_overheads(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the rows; those of the cluster with the extra time per token against one process with the same decoder."""
    alone = {(r.decode, r.concurrency): r.tokens_per_s_per_request for r in rows if r.system == ONE_PROCESS}

    def overhead(row: BenchRow) -> float | None:
        base = alone.get((row.decode, row.concurrency))
        if row.system != CLUSTER or not base or not row.tokens_per_s_per_request:
            return None
        return 1e3 / row.tokens_per_s_per_request - 1e3 / base

    return [replace(row, overhead_ms_per_token=overhead(row)) for row in rows]


def with_plan(row: BenchRow, plan: Prediction) -> BenchRow:
    """Return the row with the planned speed if it is a cluster's with one-token decoding."""
    is_planned = row.system == CLUSTER and row.decode == "ar"
    return replace(row, planned_tokens_per_s=plan.tokens_per_s(row.concurrency)) if is_planned else row


def with_predictions(rows: Sequence[BenchRow], num_prompt: int, num_tokens: int) -> list[BenchRow]:
    """Return the rows with the speed that a simulation with their own stage and hop times predicts."""

    def predicted(row: BenchRow) -> float | None:
        if row.stage_ms is None or row.hop_ms is None or row.decode != "ar":
            return None
        pipeline = measured_pipeline(row.stage_ms, row.hop_ms)
        return simulate(pipeline, SimulatedLoad((0.0,) * row.concurrency, num_prompt, num_tokens)).tokens_per_s

    return [replace(row, predicted_tokens_per_s=predicted(row)) for row in rows]


def measured_pipeline(stage_ms: Sequence[Mapping[int, float]], hop_ms: Sequence[float]) -> Pipeline:
    """Return a row's times for simulation; hops that are negative because of clock errors count as 0."""
    stages = (tuple(sorted((int(rows), ms / 1e3) for rows, ms in by_rows.items())) for by_rows in stage_ms)
    return Pipeline(tuple(stages), tuple(Hop(max(0.0, ms) / 1e3) for ms in hop_ms))


def sent_between(before: Sequence[StatusReply], after: Sequence[StatusReply]) -> list[int | None]:
    """Return the bytes that each stage sent on; None for a stage that did not answer: its status is all zeros."""
    return [
        new.sent_bytes - old.sent_bytes if old.clock and new.clock else None
        for old, new in zip(before, after, strict=True)
    ]


def frame_costs(layers: list[int], trials: Sequence[BenchTrial]) -> FrameCosts:
    """Return the mean times of the trials' frames, which have passed all stages, by their numbers of rows."""
    num_stages = len(trials[0].offsets)
    times: list[dict[int, list[float]]] = [defaultdict(list) for _ in range(num_stages)]
    hops: list[list[tuple[float, float]]] = [[] for _ in range(num_stages)]  # and waits in them
    for trial in trials:
        busy = [
            joined((p.timings[stage].started - offset, p.timings[stage].sampled - offset) for p in trial.passages)
            for stage, offset in enumerate(trial.offsets)
        ]
        for passage in trial.passages:
            for stage, (computed_ms, hop_ms) in enumerate(passage_ms(passage, trial.offsets)):
                left = passage.timings[stage].sampled - trial.offsets[stage]
                # a node reads a message after its step: when it came is not known
                waited = overlap(busy[(stage + 1) % num_stages], left, left + round(1e6 * hop_ms))
                times[stage][passage.num_rows].append(computed_ms)
                hops[stage].append((hop_ms, waited / 1e6))
    stage_ms = [{rows: fmean(taken) for rows, taken in sorted(by_rows.items())} for by_rows in times]
    free_ms = [[ms for ms, waited in taken if not waited] or [ms - waited for ms, waited in taken] for taken in hops]
    return FrameCosts(layers, stage_ms, [fmean(taken) for taken in free_ms])


def _with_stages(row: BenchRow, trials: Sequence[BenchTrial]) -> BenchRow:
    num_stages = len(trials[0].offsets)
    shares = [trial.utilisation() for trial in trials if trial.tokens_per_s is not None]
    utilisation = [median(column) for column in zip(*shares, strict=True)]
    # not so if one node makes answers alone
    pass_all_stages = all(len(passage.timings) == num_stages for trial in trials for passage in trial.passages)
    costs = frame_costs(row.layers or [], trials) if pass_all_stages else None
    return replace(
        row,
        utilisation=utilisation or None,
        bubble=1 - sum(utilisation) / num_stages if utilisation else None,
        bytes_per_token=[_bytes_per_token(trials, stage) for stage in range(num_stages)],
        loop_share=median(trial.loop_share or 0.0 for trial in trials),
        stage_ms=costs.stage_ms if costs else None,
        hop_ms=costs.hop_ms if costs else None,
    )


def _bytes_per_token(trials: Sequence[BenchTrial], stage: int) -> float | None:
    known = [
        sent / (trial.num_prompt + sum(map(len, trial.token_times)))
        for trial in trials
        if (sent := trial.sent_bytes[stage]) is not None
    ]
    return median(known) if known else None


def passage_ms(passage: Passage, offsets: Sequence[int]) -> Iterator[tuple[float, float]]:
    """Yield for each stage the milliseconds of computing, and from then to the arrival at the next stage or back."""
    arrivals = [timing.received - offset for timing, offset in zip(passage.timings, offsets, strict=True)]
    for timing, offset, arrival in zip(passage.timings, offsets, [*arrivals[1:], passage.returned], strict=True):
        yield (timing.sampled - timing.started) / 1e6, (arrival - (timing.sampled - offset)) / 1e6


def _percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1]
