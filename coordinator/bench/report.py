"""Benchmarks and forecasts for people: tables that fit a terminal, Markdown with all columns, and a picture."""

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.bench.failover import FailoverReport, FailoverRow
from coordinator.bench.forecast import Forecast, ForecastTimes
from coordinator.bench.results import CLUSTER, Bench, BenchRow, fastest_splits, system_name
from coordinator.cluster.tables import fitting, plain_console
from worker.errors import InputError
from worker.platform.files import require_writable, writing

_IMAGES = (".png", ".svg", ".pdf")
_COLUMNS = 100
_FAILOVER_COLUMNS = 110
_FAILOVER = (
    "tokens", "worker", "detect ms", "wanted", "start s", "load s", "reopen s", "replay s", "prompt s", "gap s",
    "wanted",
)  # fmt: skip
_FORECAST = ("requests", "tok/s each", "tok/s all", "first token", "next token", "longest wait", "stages busy")
_LEGEND = (
    "tok/s all, busy: while all decode. First and next token: medians. extra: per token, to one process. "
    "Percentiles, busy by stage, bytes and predictions: --wide."
)
_WIDE_LEGEND = (
    "tok/s each: the median request, from its first token to its last. tok/s all, busy and bubble: while all requests",
    "decode, or from the first token to the last if less than half of their tokens come then; busy is the share of",
    "that time in which a stage computes, bubble the rest, mean over the stages. overhead: per token of a request,",
    "against one process. bytes/token: sent on by a stage, ? if unknown. predicted: tok/s all, simulated; planned:",
    "from the speeds that the nodes measured of themselves, if they are on several machines.",
)

_FAILOVER_LEGEND = (
    "tokens: known when the worker is lost; it is restarted, or a spare one takes its place. detect: until the loss is "
    "noticed. reopen: from then to an open chain, process start and load included. replay: from then to the next "
    "token. prompt: as many tokens as a prompt, before the loss. gap: between two tokens, as the reader sees it; "
    "wanted: at most detect + start + load + 1.2 x prompt. ! is more than wanted. Medians over the trials."
)
_FORECAST_LEGEND = (
    "tok/s, next token and busy: while all decode, so that requests x tok/s each = tok/s all, and a next token takes "
    "1 s / tok/s each. First token: the median of requests that come at once. Longest wait: while prompts are fed, or "
    "a canvas is decided."
)
_ROWS_ARE = {
    "measured": "The cost of further rows of a frame: as measured.",
    "given": "The cost of further rows of a frame: as --row-ms says.",
    "published": (
        "The cost of further rows of a frame is not known here: as published of an M5 Pro with 4-bit weights, where 8 "
        "rows take 3.9 times as long as one, 16 to 64 about 2.7 times. Give --row-ms, --measured or --config."
    ),
}


def _system(row: BenchRow) -> str:
    return system_name(row.system, row.layers)


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count > 1)}"


def _optional(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


_Column = tuple[str, Callable[[BenchRow], str]]  # its head, and its cell of a row
_NAMES: tuple[_Column, ...] = (("system", _system), ("decode", lambda row: row.decode))
_SPEEDS: tuple[_Column, ...] = (
    ("prompt tok/s", lambda row: _optional(row.prompt_tokens_per_s, ".0f")),
    ("tok/s each", lambda row: _optional(row.tokens_per_s_per_request, ".1f")),
    ("tok/s all", lambda row: _optional(row.tokens_per_s, ".1f")),
)
_NARROW: tuple[_Column, ...] = (
    *_NAMES,
    ("at once", lambda row: str(row.concurrency)),
    *_SPEEDS,
    ("first token s", lambda row: f"{row.ttft_p50_s:.3f}"),
    ("next token ms", lambda row: _optional(row.gap_p50_ms, ".1f")),
    ("busy", lambda row: "" if row.bubble is None else f"{1 - row.bubble:.0%}"),
    ("extra ms", lambda row: _optional(row.overhead_ms_per_token, "+.2f")),
)
_WIDE: tuple[_Column, ...] = (
    *_NAMES,
    ("requests", lambda row: str(row.concurrency)),
    *_SPEEDS,
    ("first token p50/p95", lambda row: f"{row.ttft_p50_s:.3f} / {row.ttft_p95_s:.3f} s"),
    ("next token p50/p95", lambda row: _optional(row.gap_p50_ms, ".1f", f" / {row.gap_p95_ms or 0.0:.1f} ms")),
    ("busy", lambda row: " · ".join(f"{part:.0%}" for part in row.utilisation or [])),
    ("bubble", lambda row: _optional(row.bubble, ".0%")),
    ("overhead", lambda row: _optional(row.overhead_ms_per_token, "+.2f", " ms")),
    ("bytes/token", lambda row: " · ".join(_optional(count, ".0f") or "?" for count in row.bytes_per_token or [])),
    ("predicted", lambda row: _optional(row.predicted_tokens_per_s, ".1f")),
    ("planned", lambda row: _optional(row.planned_tokens_per_s, ".1f")),
)


def print_bench(bench: Bench) -> None:
    """Print the rows, ratios and winner, in 100 columns or as many as the terminal has."""
    has_decodes = len({row.decode for row in bench.rows}) > 1
    columns = [column for column in _NARROW if has_decodes or column[0] != "decode"]
    heads, rows = [head for head, _ in columns], [[cell(row) for _, cell in columns] for row in bench.rows]
    _print_table(_title(bench), heads, rows, _remarks(bench), _LEGEND, _COLUMNS, 2 + has_decodes, 1 + has_decodes)


def print_failover(failover: FailoverReport) -> None:
    """Print a row per case, in 110 columns or as many as the terminal has."""
    title = f"{failover.model}, layers {failover.layers}, on {failover.machine}"
    wrong = [f"{row.context} tokens, {row.loss}, {row.place}" for row in failover.rows if not row.is_equal]
    remark = "Every answer had the tokens of the unfailed run."
    if wrong:
        remark = f"OTHER TOKENS than in the unfailed run: {', '.join(wrong)}"
    rows = list(map(_failover_cells, failover.rows))
    _print_table(title, _FAILOVER, rows, [remark], _FAILOVER_LEGEND, _FAILOVER_COLUMNS, num_keys=2)


def _print_table(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    remarks: Sequence[str],
    legend: str,
    columns: int,
    num_keys: int,
    num_left: int | None = None,
) -> None:
    """Print a table in `columns` columns or as many as the terminal has; see `fitting` for the last two arguments."""
    console = plain_console()
    console.width = min(columns, console.width) if console.is_terminal else columns
    table = fitting(heads, rows, console.width, num_keys=num_keys, num_left=num_left)
    console.print(title, "", table, "", *remarks, *([""] if remarks else []), legend, sep="\n")


def print_forecasts(forecasts: Sequence[Forecast], times: ForecastTimes) -> None:
    """Print a row per number of requests; below it, which of them were not measured."""
    console = plain_console()
    rows = [
        (
            str(found.concurrency), f"{found.tokens_per_s_per_request:.1f}", f"{found.tokens_per_s:.1f}",
            f"{found.ttft_p50_s:.2f} s", f"{found.gap_mean_ms:.1f} ms", f"{found.gap_max_ms:.1f} ms",
            " · ".join(f"{part:.0%}" for part in found.utilisation),
        )
        for found in forecasts
    ]  # fmt: skip
    table = fitting(_FORECAST, rows, console.width, num_left=0)
    console.print(table, "", _FORECAST_LEGEND, _ROWS_ARE[times.rows_are], sep="\n")
    if times.by_count and not times.by_count.keys() >= {found.concurrency for found in forecasts}:
        least, most = times.sizes
        console.print(
            f"{', '.join(map(str, times.by_count))} at once: by the times of those requests. All others: by the times "
            f"of frames of {least} to {most} rows, interpolated and extrapolated linearly."
        )


def to_markdown(bench: Bench) -> str:
    """Return every figure of every row as Markdown, with the ratios and the winner under them."""
    cells = [[head for head, _ in _WIDE], *([cell(row) for _, cell in _WIDE] for row in bench.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in cells]
    table.insert(1, ["-" * width for width in widths])
    lines = ["| " + " | ".join(row) + " |" for row in table]
    remarks = _remarks(bench)
    return "\n".join([_title(bench), "", *lines, "", *remarks, *([""] if remarks else []), *_WIDE_LEGEND])


def check_plot(path: Path) -> None:
    """Raise InputError if a picture could not be drawn to this file after the measurement."""
    if path.suffix not in _IMAGES:
        raise InputError("plot", f"expected a file ending in {', '.join(_IMAGES)}, got {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "plot",
            f"drawing needs matplotlib, which is not installed: uv pip install --python {sys.executable} matplotlib",
        )
    require_writable("plot", path)


def write_plot(bench: Bench, path: Path) -> None:
    """Draw throughput and latency over the number of requests, a line per system, to an image file.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    lines: dict[str, dict[int, BenchRow]] = {}
    for row in bench.rows:
        name = _system(row) if row.decode == "ar" else f"{_system(row)} ({row.decode})"
        lines.setdefault(name, {})[row.concurrency] = row
    figure = Figure(figsize=(9, 4), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    for name, rows in lines.items():
        for axes, values in (
            (throughput, [row.tokens_per_s for row in rows.values()]),
            (latency, [row.gap_p50_ms for row in rows.values()]),
        ):
            axes.plot(list(rows), [math.nan if value is None else value for value in values], marker="o", label=name)
    for axes, title in ((throughput, "tokens per second, all requests"), (latency, "ms between tokens, median")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("requests at once")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    throughput.legend(fontsize=8)
    figure.suptitle(f"{bench.model} on {bench.machine}", fontsize=9)
    with writing("plot", path):
        figure.savefig(path, dpi=120)


def _failover_cells(row: FailoverRow) -> list[str]:
    def text(seconds: float | None, wanted_s: float = math.inf, form: str = ".2f") -> str:
        """Mark a time that is longer than wanted."""
        return "" if seconds is None else f"{'!' if seconds > wanted_s else ''}{seconds:{form}}"

    times, detect_s = row.times, row.wanted_detect_s
    return [
        str(row.context),
        f"{row.loss}, {row.place}",
        text(1e3 * times.detect_s, 1e3 * detect_s, ".0f"),
        f"{1e3 * detect_s:.0f}",
        *map(text, (times.start_s, times.load_s, times.reopen_s, times.replay_s, times.prefill_s)),
        text(times.gap_s, row.wanted_gap_s),
        text(row.wanted_gap_s),
    ]


def _title(bench: Bench) -> str:
    return f"{bench.model} on {bench.machine}: {bench.num_prompt} tokens of prompt, {bench.num_tokens} generated"


def _remarks(bench: Bench) -> list[str]:
    """Return the lines below the table: ratios, winners, and planned against measured speeds."""
    planned = [
        f"* {_system(row)}, {_requests(row.concurrency)}: {row.planned_tokens_per_s:.1f} tok/s planned, "
        f"{row.tokens_per_s or 0:.1f} measured"
        for row in bench.rows
        if row.planned_tokens_per_s is not None
    ]
    prompts = [
        f"* {system_name(row.system, row.layers)}, prompt of {row.prompt_tokens} tokens: {row.prompt_s:.2f} s "
        f"({row.prompt_tokens_per_s:.0f} tok/s)" + ("" if row.planned_s is None else f", {row.planned_s:.2f} s planned")
        for row in bench.prompts
    ]
    return [*_ratios(bench), *_winners(bench), *planned, *prompts]


def _ratios(bench: Bench) -> list[str]:
    found = bench.as_json()
    most = bench.most_requests
    named = (
        ("ratio_vs_one_process", "one request, tokens per second: {:.2f} x one process"),
        ("overhead_ms_per_token", "one request, per token: {:+.2f} ms against one process"),
        ("prefill_ratio_vs_one_process", f"prompts of {_requests(most)}: {{:.2f}} x one process"),
        ("ratio_vs_mlx_lm_batch", f"{_requests(most)}, tokens per second of all: {{:.2f}} x mlx_lm in one process"),
    )
    clusters = list(dict.fromkeys(_system(row) for row in bench.rows if row.system == CLUSTER))
    of = f"{clusters[0]}, " if len(clusters) > 1 else ""  # the ratios are the first one's
    return [f"* {of}{text.format(found[key])}" for key, text in named if found[key] is not None]


def _winners(bench: Bench) -> list[str]:
    """Return a line for the fastest split, and one for a single request if another split is faster there."""
    best = fastest_splits(bench.rows)
    has_decodes = len({row.decode for row in bench.rows}) > 1
    lines = []
    for number, row in enumerate(best):
        if number and row.layers == best[0].layers:
            continue
        name = f"{_system(row)} by {row.decode}" if has_decodes else _system(row)
        next_best = max(
            other.tokens_per_s or 0.0
            for other in bench.rows
            if (other.system, other.concurrency) == (CLUSTER, row.concurrency) and other.layers != row.layers
        )
        speed = row.tokens_per_s or 0.0
        gain = f", {speed / next_best - 1:.0%} more than the next" if next_best else ""
        lines.append(f"* fastest with {_requests(row.concurrency)}: {name}, {speed:.1f} tok/s{gain}")
    return lines
