"""`brigade plan --simulate`: what a chain would make of many requests, from given or measured times. Loads nothing."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, PositiveInt, ValidationError

from coordinator.cluster.open import read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.measure.bench_results import CLUSTER, measured_pipeline
from coordinator.measure.profiled import ask_pipeline
from coordinator.measure.simulate import Hop, Load, Pipeline, StageTimes, simulate
from coordinator.planning.costs import chunk_size
from worker.errors import InputError

_MOST_STEPS = 100_000  # of all requests, on all stages: a quarter of a minute at worst
_MOST_TOKENS = 1_000_000  # of prompts at once: some 100 MiB
_MOST_BETWEEN = 32  # steps of lanes that decode, between one chunk of a prompt and the next
_ROWS = 64  # between which a further row's cost is drawn as a line

# By rows of a frame: at how many GB/s an M5 Pro reads 4-bit weights for a matrix product. Sabesh, "Squeezing a 26B
# diffusion LLM onto a Mac", 15 June 2026, "The physics ceiling". What a frame takes is the longer the lower this is.
PUBLISHED_GBPS = {1: 220, 2: 190, 4: 107, 8: 56, 16: 80, 32: 84, 64: 80}

RowsAre = Literal["measured", "given", "published"]  # where it is known from what further rows of a frame cost

_StageMs = Annotated[float, Field(ge=0.001, le=1e6, allow_inf_nan=False)]
_HopMs = Annotated[float, Field(le=1e6, allow_inf_nan=False)]  # clocks compared a little wrong may make it negative
_NumRows = Annotated[int, Field(ge=1, le=1_000_000)]
_ByRows = Annotated[dict[_NumRows, _StageMs], Field(min_length=1)]
_NullIsEmpty = BeforeValidator(lambda value: () if value is None else value)  # mlx_lm's rows have no stages


class _Row(BaseModel):
    """A row of `brigade bench --json`, as far as a forecast goes by it."""

    system: str
    decode: str
    concurrency: PositiveInt
    layers: Annotated[tuple[int, ...], _NullIsEmpty]
    stage_ms: Annotated[tuple[_ByRows, ...], _NullIsEmpty]
    hop_ms: Annotated[tuple[_HopMs, ...], _NullIsEmpty]


class _Costs(BaseModel):
    """What frames took while all stages had some; files of an older bench have none."""

    layers: tuple[int, ...]
    stage_ms: tuple[_ByRows, ...]
    hop_ms: tuple[_HopMs, ...]


class _File(BaseModel):
    prompt_tokens: PositiveInt
    generated_tokens: Annotated[int, Field(ge=2)]
    rows: list[_Row]
    frame_costs: list[_Costs] = []


@dataclass(frozen=True)
class Assumed:
    """What a forecast goes by: times from flags or from a file, and the load."""

    stage_ms: tuple[float, ...]
    row_ms: tuple[float, ...] | None  # None: as in PUBLISHED_GBPS
    hop_ms: tuple[float, ...]
    gbps: float | None
    measured: Path | None
    concurrency: tuple[int, ...]
    num_prompt: int | None  # None, as of `num_tokens`: what was measured, else a usual number
    num_tokens: int | None
    chunk: int | None


@dataclass(frozen=True)
class Times:
    """A chain as numbers, and the same as it was with so many requests, where that was measured.

    What was measured with some requests says nothing of others if all frames had one size: what do rows cost?
    """

    usual: Pipeline
    by_count: Mapping[int, Pipeline] = field(default_factory=dict)
    num_prompt: int = 128  # tokens per request
    num_tokens: int = 64
    rows_are: RowsAre = "measured"

    def of(self, count: int) -> Pipeline:
        return self.by_count.get(count, self.usual)

    @property
    def sizes(self) -> tuple[int, int]:
        """The fewest and the most rows of a frame whose time is known on every stage."""
        stages = [stage.by_rows for stage in self.usual.stages]
        return max(stage[0][0] for stage in stages), min(stage[-1][0] for stage in stages)

    def check(self, counts: Sequence[int]) -> None:
        """Raise InputError if one of these numbers of requests was not measured and cannot be told from the others."""
        unknown = [count for count in counts if count not in self.by_count]
        if self.by_count and unknown and self.sizes[0] == self.sizes[1]:
            raise InputError(
                "concurrency",
                f"expected {listed(self.by_count)}, as measured, got {listed(unknown)}: all frames had one size, "
                "which does not tell what further rows cost; run bench with --concurrency 1,8 or a longer prompt",
            )


@dataclass(frozen=True)
class Forecast:
    """What simulation says of so many requests at once."""

    concurrency: int
    tokens_per_s_per_request: float  # while all decode, as of `tokens_per_s`, `gap_mean_ms` and `utilisation`
    tokens_per_s: float  # of all requests together
    ttft_p50_s: float
    gap_mean_ms: float  # between one token of a request and the next
    gap_p50_ms: float  # while prompts are fed, too, as of `gap_max_ms`
    gap_max_ms: float
    utilisation: list[float]  # by stage


async def find_times(options: ClusterOptions, assumed: Assumed) -> Times:
    """Measured or given ones, else what the nodes measure of themselves.

    A model is looked at only where bandwidth counts, or nodes are asked.
    """
    if assumed.measured:
        return read_times(assumed.measured)
    if not assumed.stage_ms:
        return Times(await ask_pipeline(options))
    row_bytes = 0
    if assumed.gbps is not None:
        _, spec = await read_model(options.model)
        row_bytes = spec.row_bytes
    pipeline = given_pipeline(assumed.stage_ms, assumed.row_ms, assumed.hop_ms, assumed.gbps, row_bytes)
    return Times(pipeline, rows_are="published" if assumed.row_ms is None else "given")


def forecast(times: Times, assumed: Assumed) -> list[Forecast]:
    """One forecast per number of requests, all of which arrive at once.

    Raises:
        InputError: that would take too long, or the times say nothing of so many requests.
    """
    times.check(assumed.concurrency)
    num_prompt, num_tokens = assumed.num_prompt or times.num_prompt, assumed.num_tokens or times.num_tokens
    chunks = {c: assumed.chunk or chunk_size(num_prompt, times.of(c).stages_s) for c in assumed.concurrency}
    num_passages = sum(_num_frames(count, num_prompt // chunk, num_tokens) for count, chunk in chunks.items())
    num_steps, num_fed = num_passages * len(times.usual.stages), max(assumed.concurrency) * num_prompt
    if num_steps > _MOST_STEPS or num_fed > _MOST_TOKENS:
        raise InputError(
            "simulate",
            f"expected at most {_MOST_STEPS} steps on all stages and {_MOST_TOKENS} tokens of "
            f"prompts, found {num_steps} and {num_fed}; use a smaller --concurrency, -p or -g",
        )
    found = []
    for count, chunk in chunks.items():
        run = simulate(times.of(count), Load((0.0,) * count, num_prompt, num_tokens, chunk, goes_on=True))
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


def _num_frames(count: int, num_chunks: int, num_tokens: int) -> int:
    """At most: chunks of prompts, steps of whoever decodes meanwhile, and steps of all."""
    return count * (num_chunks * min(count, _MOST_BETWEEN) + num_tokens)


def given_pipeline(
    stage_ms: Sequence[float],
    row_ms: Sequence[float] | None,
    hop_ms: Sequence[float],
    gbps: float | None,
    row_bytes: int,
) -> Pipeline:
    """From flags: milliseconds of a frame of one row by stage, of each further row, and of each hop.

    The last hop leads back to the coordinator. A single `row_ms` or `hop_ms` stands for all. Without `row_ms` further
    rows cost what they do in PUBLISHED_GBPS.

    Raises:
        InputError: not a number per stage.
    """
    num_stages = len(stage_ms)
    hops = _spread("hop_ms", hop_ms, num_stages)
    if row_ms is None:
        stages = [_as_published(first) for first in stage_ms]
    else:
        further = _spread("row_ms", row_ms, num_stages)
        stages = [
            ((1, first), (_ROWS, first + (_ROWS - 1) * more)) for first, more in zip(stage_ms, further, strict=True)
        ]
    return Pipeline(
        tuple(StageTimes(tuple((rows, ms / 1e3) for rows, ms in by_rows)) for by_rows in stages),
        tuple(Hop(ms / 1e3, gbps * 1e9 / 8 if gbps else float("inf"), row_bytes) for ms in hops),
    )


def _as_published(first_ms: float) -> tuple[tuple[int, float], ...]:
    return tuple((rows, first_ms * PUBLISHED_GBPS[1] / gbps) for rows, gbps in PUBLISHED_GBPS.items())


def read_times(path: Path) -> Times:
    """From what `brigade bench --json` wrote: the cluster's stages and hops, by requests and in the mean.

    Raises:
        InputError: it is no such file, or holds no cluster.
    """
    file = _read(path)
    measured = [row for row in file.rows if row.system == CLUSTER and row.decode == "ar"]
    splits = {row.layers for row in measured}
    if len(splits) != 1:
        advice = "run bench with one --layers" if splits else "run bench with workers and --decode ar"
        raise InputError("measured", f"{path}: expected one split of a cluster, found {len(splits)}; {advice}")
    num_stages = len(splits.pop())
    if any(not 0 < num_stages == len(row.stage_ms) == len(row.hop_ms) for row in measured):
        expected = f"stage_ms and hop_ms of {num_stages} stages in every row"
        raise InputError("measured", f"{path}: expected {expected}, found others")
    by_count = {row.concurrency: measured_pipeline(row.stage_ms, row.hop_ms) for row in measured}
    costs = [costs for costs in file.frame_costs if costs.layers == measured[0].layers]
    if any(not num_stages == len(found.stage_ms) == len(found.hop_ms) for found in costs):
        raise InputError("measured", f"{path}: expected frame_costs of {num_stages} stages, found others")
    return Times(_usual(measured, costs), by_count, file.prompt_tokens, file.generated_tokens)


def _usual(rows: Sequence[_Row], costs: Sequence[_Costs]) -> Pipeline:
    """The mean of all rows, but what frames cost while all stages had some where that is known."""
    by_rows, hops_ms = _mean(rows)
    for found in costs:
        by_rows = [usual | busy for usual, busy in zip(by_rows, found.stage_ms, strict=True)]
        hops_ms = found.hop_ms
    return measured_pipeline(by_rows, hops_ms)


def _mean(rows: Sequence[_Row]) -> tuple[list[dict[int, float]], Sequence[float]]:
    stages: list[dict[int, list[float]]] = [defaultdict(list) for _ in rows[0].stage_ms]
    for row in rows:
        for stage, by_rows in zip(stages, row.stage_ms, strict=True):
            for num_rows, ms in by_rows.items():
                stage[num_rows].append(ms)
    hop_ms = [mean(column) for column in zip(*(row.hop_ms for row in rows), strict=True)]
    return [{num_rows: mean(ms) for num_rows, ms in stage.items()} for stage in stages], hop_ms


def _read(path: Path) -> _File:
    try:
        return _File.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError("measured", f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        fault = f"found in {path}: {_fault(error)}"
        raise InputError("measured", f"expected what `brigade bench --json` prints, {fault}") from error


def _fault(error: ValidationError) -> str:
    """The first thing that is wrong with a file, which pydantic says in words of Python."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"nothing at {where}"
    return f"another value at {where}, got {first['input']!r:.40}" if where else "no such object of JSON"


def listed(counts: Iterable[int]) -> str:
    return ", ".join(map(str, counts))


def _spread(field: str, values: Sequence[float], count: int) -> Sequence[float]:
    if len(values) not in (1, count):
        raise InputError(field, f"expected one number, or one per stage ({count}), found {len(values)}")
    return values if len(values) == count else [values[0]] * count
