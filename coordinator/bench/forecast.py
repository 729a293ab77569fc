"""`brigade plan --simulate`: forecasts for many requests at once from given or measured times. Loads no model."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, PositiveInt, ValidationError

from coordinator.bench.results import CLUSTER, FrameCosts, HopMs, StageMsByRows, measured_pipeline
from coordinator.bench.simulate import Hop, Pipeline, SecondsByRows, SimulatedLoad, simulate
from coordinator.cluster.open import choose_plan, open_peers, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.survey import is_worth_measuring
from coordinator.planning.costs import chunk_size
from coordinator.planning.plan import Plan
from coordinator.planning.prediction import Prediction
from coordinator.planning.speeds import Survey
from worker.errors import InputError
from worker.model.model_spec import ModelSpec

_MAX_STEPS = 100_000  # of all requests on all stages: at most about 15 seconds
_MAX_TOKENS = 1_000_000  # of all prompts: some 100 MiB
_MAX_BETWEEN = 32  # decoding steps between one chunk of a prompt and the next
_ROWS = 64  # up to which --row-ms is applied linearly

# GB/s at which an M5 Pro reads 4-bit weights for a matrix product, by rows of a frame. Sabesh, "Squeezing a 26B
# diffusion LLM onto a Mac", 15 June 2026, "The physics ceiling". The time of a frame is inversely proportional to it.
PUBLISHED_GBPS = {1: 220, 2: 190, 4: 107, 8: 56, 16: 80, 32: 84, 64: 80}

_NullIsEmpty = BeforeValidator(lambda value: () if value is None else value)  # mlx_lm's rows have no stages


class _Row(BaseModel):
    """The fields of a row of `brigade bench --json` that a forecast needs."""

    system: str
    decode: str
    concurrency: PositiveInt
    layers: Annotated[tuple[int, ...], _NullIsEmpty]
    stage_ms: Annotated[tuple[StageMsByRows, ...], _NullIsEmpty]
    hop_ms: Annotated[tuple[HopMs, ...], _NullIsEmpty]


class _File(BaseModel):
    prompt_tokens: PositiveInt
    generated_tokens: Annotated[int, Field(ge=2)]
    rows: list[_Row]
    frame_costs: list[FrameCosts] = []  # missing in files of older versions


@dataclass(frozen=True)
class Assumed:
    """The inputs of a forecast: times from flags or from a file, and the load."""

    stage_ms: tuple[float, ...]
    row_ms: tuple[float, ...] | None  # None: as in PUBLISHED_GBPS
    hop_ms: tuple[float, ...]
    gbps: float | None
    measured: Path | None
    concurrency: tuple[int, ...]
    num_prompt: int | None  # None, also for `num_tokens`: as measured, or a default
    num_tokens: int | None
    chunk: int | None
    canvas: tuple[int, int] | None = None  # places, and steps until they are known


@dataclass(frozen=True)
class ForecastTimes:
    """The times of a chain: usual ones, and those measured with certain numbers of requests."""

    usual: Pipeline
    by_count: Mapping[int, Pipeline] = field(default_factory=dict)
    num_prompt: int = 128  # tokens per request
    num_tokens: int = 64
    rows_are: Literal["measured", "given", "published"] = "measured"  # the source of the cost of further rows

    def of(self, count: int) -> Pipeline:
        return self.by_count.get(count, self.usual)

    @property
    def sizes(self) -> tuple[int, int]:
        """The fewest and the most rows of a frame for which the time of every stage is known."""
        return max(stage[0][0] for stage in self.usual.stages), min(stage[-1][0] for stage in self.usual.stages)

    def check(self, counts: Sequence[int]) -> None:
        """Raise InputError if a number of requests was not measured and does not follow from the others.

        It does not if all measured frames had one size: the cost of further rows is unknown then.
        """
        unknown = [count for count in counts if count not in self.by_count]
        if self.by_count and unknown and self.sizes[0] == self.sizes[1]:
            measured, found = (", ".join(map(str, numbers)) for numbers in (self.by_count, unknown))
            raise InputError(
                "concurrency",
                f"expected {measured}, as measured, got {found}: all frames had one size, "
                "so the cost of further rows is unknown; run bench with --concurrency 1,8 or a longer prompt",
            )


@dataclass(frozen=True)
class Forecast:
    """The simulated figures of `concurrency` requests at once."""

    concurrency: int
    tokens_per_s_per_request: float  # while all decode; likewise `tokens_per_s`, `gap_mean_ms` and `utilisation`
    tokens_per_s: float  # of all requests together
    ttft_p50_s: float
    gap_mean_ms: float  # between one token of a request and the next
    gap_p50_ms: float  # while prompts are fed, too; likewise `gap_max_ms`
    gap_max_ms: float
    utilisation: list[float]  # by stage


async def find_times(options: ClusterOptions, assumed: Assumed) -> ForecastTimes:
    """Return the measured or given times, or else those that the nodes measure of themselves.

    The model's configuration is read only if a bandwidth is given or nodes are asked.
    """
    if assumed.measured:
        return read_times(assumed.measured, "canvas" if assumed.canvas else "ar")
    if not assumed.stage_ms:
        return ForecastTimes(await _ask_pipeline(options, assumed.canvas))
    row_bytes = answer_bytes = 0
    if assumed.gbps is not None:
        _, spec = await read_model(options.model)
        row_bytes, answer_bytes = spec.row_bytes, spec.soft_row_bytes if assumed.canvas else 0
    pipeline = given_pipeline(assumed.stage_ms, assumed.row_ms, assumed.hop_ms, assumed.gbps, row_bytes, answer_bytes)
    return ForecastTimes(pipeline, rows_are="published" if assumed.row_ms is None else "given")


def forecast(times: ForecastTimes, assumed: Assumed) -> list[Forecast]:
    """Return one forecast per number of requests, all of which arrive at once.

    Raises:
        InputError: it would take too long, or the times do not cover a number of requests.
    """
    times.check(assumed.concurrency)
    num_prompt, num_tokens = assumed.num_prompt or times.num_prompt, assumed.num_tokens or times.num_tokens
    chunks = {
        count: assumed.chunk or chunk_size(num_prompt, times.of(count).stages_s, beside_streams=count > 1)
        for count in assumed.concurrency
    }
    length, steps = assumed.canvas or (1, 1)
    # upper bound: chunks of prompts with the decoding steps between them, then steps of all requests
    num_frames = sum(
        count * (num_prompt // chunk * min(count, _MAX_BETWEEN) + (1 + -(-num_tokens // length)) * steps)
        for count, chunk in chunks.items()
    )
    num_steps, num_fed = num_frames * len(times.usual.stages), max(assumed.concurrency) * num_prompt
    if num_steps > _MAX_STEPS or num_fed > _MAX_TOKENS:
        raise InputError(
            "simulate",
            f"expected at most {_MAX_STEPS} steps on all stages and {_MAX_TOKENS} tokens of "
            f"prompts, found {num_steps} and {num_fed}; use a smaller --concurrency, -p, -g or --canvas-steps",
        )
    found = []
    for count in assumed.concurrency:
        load = SimulatedLoad((0.0,) * count, num_prompt, num_tokens, assumed.chunk, goes_on=True, canvas=assumed.canvas)
        run = simulate(times.of(count), load)
        found.append(
            Forecast(
                concurrency=count,
                tokens_per_s_per_request=run.tokens_per_s / count,
                tokens_per_s=run.tokens_per_s,
                ttft_p50_s=median(run.ttft_s),
                gap_mean_ms=1e3 * count / run.tokens_per_s,
                gap_p50_ms=1e3 * median(run.gaps_s),
                gap_max_ms=1e3 * max(run.gaps_s),
                utilisation=run.utilisation,
            )
        )
    return found


def given_pipeline(
    stage_ms: Sequence[float],
    row_ms: Sequence[float] | None,
    hop_ms: Sequence[float],
    gbps: float | None,
    row_bytes: int,
    answer_bytes: int = 0,
) -> Pipeline:
    """Return the pipeline that flags describe.

    Args:
        stage_ms: milliseconds of a frame of one row, by stage.
        row_ms: milliseconds of each further row, one number or one per stage; None: as in PUBLISHED_GBPS.
        hop_ms: milliseconds of each hop, one number or one per stage; the last leads back to the coordinator.
        gbps: bandwidth of the hops, Gbit/s.
        row_bytes, answer_bytes: of a row on a hop between stages, and on the one back.
    Raises:
        InputError: a list has neither one number nor one per stage.
    """

    def spread(name: str, values: Sequence[float]) -> Sequence[float]:
        if len(values) not in (1, len(stage_ms)):
            raise InputError(name, f"expected one number, or one per stage ({len(stage_ms)}), found {len(values)}")
        return values if len(values) == len(stage_ms) else [values[0]] * len(stage_ms)

    hops = spread("hop_ms", hop_ms)
    stages: list[SecondsByRows]
    if row_ms is None:
        stages = [
            tuple((rows, first * PUBLISHED_GBPS[1] / each / 1e3) for rows, each in PUBLISHED_GBPS.items())
            for first in stage_ms
        ]
    else:
        stages = [
            ((1, first / 1e3), (_ROWS, (first + (_ROWS - 1) * more) / 1e3))
            for first, more in zip(stage_ms, spread("row_ms", row_ms), strict=True)
        ]
    bytes_per_s = gbps * 1e9 / 8 if gbps else float("inf")
    sizes = [row_bytes] * (len(hops) - 1) + [answer_bytes]
    links = tuple(Hop(ms / 1e3, bytes_per_s, size) for ms, size in zip(hops, sizes, strict=True))
    return Pipeline(tuple(stages), links)


def read_times(path: Path, decode: str = "ar") -> ForecastTimes:
    """Read the cluster's stage and hop times with this decoder from the output of `brigade bench --json`.

    Raises:
        InputError: the file has another format, or does not hold exactly one split of a cluster.
    """
    file = _read(path)
    measured = [row for row in file.rows if row.system == CLUSTER and row.decode == decode]
    splits = {row.layers for row in measured}
    if len(splits) != 1:
        advice = "run bench with one --layers" if splits else f"run bench with workers and --decode {decode}"
        raise InputError("measured", f"{path}: expected one split of a cluster, found {len(splits)}; {advice}")
    num_stages = len(splits.pop())
    if any(not 0 < num_stages == len(row.stage_ms) == len(row.hop_ms) for row in measured):
        expected = f"stage_ms and hop_ms of {num_stages} stages in every row"
        raise InputError("measured", f"{path}: expected {expected}, found others")
    by_count = {row.concurrency: measured_pipeline(row.stage_ms, row.hop_ms) for row in measured}
    costs = [costs for costs in file.frame_costs if tuple(costs.layers) == measured[0].layers]
    if any(not num_stages == len(found.stage_ms) == len(found.hop_ms) for found in costs):
        raise InputError("measured", f"{path}: expected frame_costs of {num_stages} stages, found others")
    return ForecastTimes(_usual(measured, costs), by_count, file.prompt_tokens, file.generated_tokens)


def _usual(rows: Sequence[_Row], costs: Sequence[FrameCosts]) -> Pipeline:
    """Return the means over all rows; the frame costs of busy stages instead where they are known."""
    stages: list[dict[int, list[float]]] = [defaultdict(list) for _ in rows[0].stage_ms]
    for row in rows:
        for stage, by_rows in zip(stages, row.stage_ms, strict=True):
            for num_rows, ms in by_rows.items():
                stage[num_rows].append(ms)
    means = [{num_rows: mean(ms) for num_rows, ms in stage.items()} for stage in stages]
    hops_ms: Sequence[float] = [mean(column) for column in zip(*(row.hop_ms for row in rows), strict=True)]
    for found in costs:
        means = [usual | busy for usual, busy in zip(means, found.stage_ms, strict=True)]
        hops_ms = found.hop_ms
    return measured_pipeline(means, hops_ms)


def _read(path: Path) -> _File:
    try:
        return _File.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError("measured", f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            fault = f"nothing at {where}"
        else:
            fault = f"another value at {where}, got {first['input']!r:.40}" if where else "no such object of JSON"
        message = f"expected what `brigade bench --json` prints, found in {path}: {fault}"
        raise InputError("measured", message) from error


async def _ask_pipeline(options: ClusterOptions, canvas: tuple[int, int] | None) -> Pipeline:
    """Return the times of the cluster's own plan. Raises InputError if the nodes have not measured their speeds."""
    checkpoint, spec = await read_model(options.model)
    async with open_peers(options, spec) as peers:
        if not is_worth_measuring(peers):
            expected = (
                "expected --stage-ms 26.5,6.5 or --measured FILE, or workers on other machines, which are measured"
            )
            raise InputError("simulate", expected)
        several = replace(options, may_be_alone=False)
        found, known, _ = await choose_plan(several, checkpoint, peers)
    if lacking := [name for name in found.names if name not in known.speeds]:
        raise InputError("simulate", f"expected nodes that have measured themselves, found {', '.join(lacking)}")
    return profiled_pipeline(spec, found, known, canvas[0] if canvas else 0)


def profiled_pipeline(spec: ModelSpec, plan: Plan, survey: Survey, num_places: int = 0) -> Pipeline:
    """Return the times of a plan over nodes with known speeds, for all frame sizes that any of them has measured.

    Long frames hold a canvas of `num_places`, or are prompts.
    """
    times = Prediction(spec, plan, survey)
    sizes = sorted({*times.sizes, *([num_places] if num_places else [])})
    by_size = {rows: times.stages_ms(rows, num_places) for rows in sizes}
    columns = zip(*by_size.values(), strict=True)
    stages = [tuple((rows, ms / 1e3) for rows, ms in zip(by_size, column, strict=True)) for column in columns]
    hops = [Hop(link.rtt_ms / 2e3, link.bytes_per_s, spec.row_bytes) for link in times.links[:-1]]
    answer_bytes = spec.soft_row_bytes if num_places else 0
    back = [Hop(link.rtt_ms / 2e3, link.bytes_per_s, answer_bytes) for link in times.links[-1:]]
    return Pipeline(tuple(stages), tuple([*hops, *back] or [Hop(0.0)]))
