"""A benchmark for people: a table of 100 columns, all there is as Markdown, or a picture."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from coordinator.bench.results import CLUSTER, Bench, BenchRow, fastest_splits, system_name
from coordinator.cluster.tables import fitting
from worker.errors import InputError

_IMAGES = (".png", ".svg", ".pdf")
_COLUMNS = 100
_NARROW = (
    "system", "decode", "at once", "prompt tok/s", "tok/s each", "tok/s all", "first token s", "next token ms", "busy",
    "extra ms",
)  # fmt: skip
_WIDE = (
    "system", "decode", "requests", "prompt tok/s", "tok/s each", "tok/s all", "first token p50/p95",
    "next token p50/p95", "busy", "bubble", "overhead", "bytes/token", "predicted", "planned",
)  # fmt: skip
_LEGEND = (
    "tok/s all, busy: while all decode. First and next token: medians. extra: per token, to one process.",
    "Percentiles, busy by stage, bytes and predictions: --wide.",
)
_WIDE_LEGEND = (
    "tok/s each: the median request, from its first token to its last. tok/s all, busy and bubble: while all requests",
    "decode, or from the first token to the last if they hardly do at once; busy is how much of that time each stage",
    "computes, bubble what is left, mean over the stages. overhead: per token of a request, against one process.",
    "bytes/token: what a stage sends on, ? if it did not say. predicted: tok/s all, simulated; planned: by the speeds",
    "that the nodes measured of themselves, which those of one machine do not.",
)


def print_bench(bench: Bench) -> None:
    """Print the rows, ratios and winner, in 100 columns or as many as the terminal has."""
    console = Console(highlight=False, markup=False)
    console.width = min(_COLUMNS, console.width) if console.is_terminal else _COLUMNS
    has_decodes = len({row.decode for row in bench.rows}) > 1
    heads, *rows = (
        cells if has_decodes else [cells[0], *cells[2:]] for cells in (list(_NARROW), *map(_narrow_cells, bench.rows))
    )
    names = 1 + has_decodes
    table = fitting(heads, rows, console.width, num_keys=names + 1, num_left=names)
    legend = _LEGEND if console.width == _COLUMNS else [" ".join(_LEGEND)]
    console.print(_title(bench), "", table, *_below(bench, legend), sep="\n")


def to_markdown(bench: Bench) -> str:
    """Return every figure of every row, however wide, with the ratios and the winner under them."""
    cells = [list(_WIDE), *map(_wide_cells, bench.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in cells]
    table.insert(1, ["-" * width for width in widths])
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([_title(bench), "", *lines, *_below(bench, _WIDE_LEGEND)])


def check_plot(path: Path) -> None:
    """Raise InputError for a picture that could not be drawn after the measurement."""
    if path.suffix not in _IMAGES:
        raise InputError("plot", f"expected a file ending in {', '.join(_IMAGES)}, got {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "plot", "matplotlib, which draws, is not installed: .venv/bin/pip install matplotlib, or make setup"
        )


def write_plot(bench: Bench, path: Path) -> None:
    """Draw throughput and latency against the number of requests, a line per system, to an image file.

    Raises:
        InputError: it cannot be written.
    """
    from matplotlib.figure import Figure

    lines: dict[str, dict[int, BenchRow]] = {}
    for row in bench.rows:
        name = _system(row) if row.decode == "ar" else f"{_system(row)} ({row.decode})"
        lines.setdefault(name, {})[row.concurrency] = row
    figure = Figure(figsize=(9, 4), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    for name, rows in lines.items():
        throughput.plot(list(rows), [row.tokens_per_s for row in rows.values()], marker="o", label=name)
        gaps = [float("nan") if row.gap_p50_ms is None else row.gap_p50_ms for row in rows.values()]
        latency.plot(list(rows), gaps, marker="o", label=name)
    for axes, title in ((throughput, "tokens per second, all requests"), (latency, "ms between tokens, median")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("requests at once")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    throughput.legend(fontsize=8)
    figure.suptitle(f"{bench.model} on {bench.machine}", fontsize=9)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InputError("plot", f"cannot write {path}: {error.strerror}") from error


def _system(row: BenchRow) -> str:
    return system_name(row.system, row.layers)


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _speeds(row: BenchRow) -> list[str]:
    return [
        _system(row),
        row.decode,
        str(row.concurrency),
        f"{row.prompt_tokens_per_s:.0f}",
        _optional(row.tokens_per_s_per_request, "{:.1f}"),
        f"{row.tokens_per_s:.1f}",
    ]


def _narrow_cells(row: BenchRow) -> list[str]:
    return [
        *_speeds(row),
        f"{row.ttft_p50_s:.3f}",
        _optional(row.gap_p50_ms, "{:.1f}"),
        "" if row.bubble is None else f"{1 - row.bubble:.0%}",
        _optional(row.overhead_ms_per_token, "{:+.2f}"),
    ]


def _wide_cells(row: BenchRow) -> list[str]:
    return [
        *_speeds(row),
        f"{row.ttft_p50_s:.3f} / {row.ttft_p95_s:.3f} s",
        "" if row.gap_p50_ms is None else f"{row.gap_p50_ms:.1f} / {row.gap_p95_ms:.1f} ms",
        " · ".join(f"{part:.0%}" for part in row.utilisation or []),
        _optional(row.bubble, "{:.0%}"),
        _optional(row.overhead_ms_per_token, "{:+.2f} ms"),
        " · ".join("?" if count is None else f"{count:.0f}" for count in row.bytes_per_token or []),
        _optional(row.predicted_tokens_per_s, "{:.1f}"),
        _optional(row.planned_tokens_per_s, "{:.1f}"),
    ]


def _title(bench: Bench) -> str:
    return f"{bench.model} on {bench.machine}: {bench.num_prompt} tokens of prompt, {bench.num_tokens} generated"


def _below(bench: Bench, legend: Iterable[str]) -> list[str]:
    planned = [
        f"* {_system(row)}, {row.concurrency} request(s): {row.planned_tokens_per_s:.1f} tok/s planned, "
        f"{row.tokens_per_s:.1f} measured"
        for row in bench.rows
        if row.planned_tokens_per_s is not None
    ]
    lines = [*_ratios(bench), *_winners(bench), *planned]
    return ["", *lines, *([""] if lines else []), *legend]


def _ratios(bench: Bench) -> list[str]:
    found = bench.as_json()
    most = bench.most_requests
    named = (
        ("ratio_vs_one_process", "one request, tokens per second: {:.2f} x one process"),
        ("overhead_ms_per_token", "one request, per token: {:+.2f} ms against one process"),
        ("prefill_ratio_vs_one_process", f"prompts of {most} request(s): {{:.2f}} x one process"),
        ("ratio_vs_mlx_lm_batch", f"{most} request(s), tokens per second of all: {{:.2f}} x mlx_lm in one process"),
    )
    clusters = list(dict.fromkeys(_system(row) for row in bench.rows if row.system == CLUSTER))
    of = f"{clusters[0]}, " if len(clusters) > 1 else ""  # the ratios are the first one's
    return [f"* {of}{text.format(found[key])}" for key, text in named if found[key] is not None]


def _winners(bench: Bench) -> list[str]:
    """The best split, and the best one for a single request if that is another one."""
    best = fastest_splits(bench.rows)
    has_decodes = len({row.decode for row in bench.rows}) > 1
    lines = []
    for number, row in enumerate(best):
        if number and row.layers == best[0].layers:
            continue
        name = f"{_system(row)} by {row.decode}" if has_decodes else _system(row)
        next_best = max(
            other.tokens_per_s
            for other in bench.rows
            if (other.system, other.concurrency) == (CLUSTER, row.concurrency) and other.layers != row.layers
        )
        gain = f", {row.tokens_per_s / next_best - 1:.0%} more than the next" if next_best else ""
        requests = f"{row.concurrency} request" + ("s" if row.concurrency > 1 else "")
        lines.append(f"* fastest with {requests}: {name}, {row.tokens_per_s:.1f} tok/s{gain}")
    return lines
