"""A benchmark for people: a table of 100 columns, or all there is as Markdown."""

from collections.abc import Iterable

from rich.console import Console

from coordinator.cluster.tables import fitting
from coordinator.measure.bench_results import CLUSTER, Bench, Row, fastest, name_of

_COLUMNS = 100
_WIDE = (
    "system", "decode", "requests", "prompt tok/s", "tok/s each", "tok/s all", "first token p50/p95",
    "next token p50/p95", "busy", "bubble", "overhead", "bytes/token", "predicted", "planned",
)  # fmt: skip
_NARROW = (
    "system", "decode", "at once", "prompt tok/s", "tok/s each", "tok/s all", "first token s", "next token ms", "busy",
    "extra ms",
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
    """What most look for, on standard output, in 100 columns or what the terminal has: the rows, ratios and winner."""
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
    """All there is to a row, however wide; and the ratios and the winner under them."""
    cells = [list(_WIDE), *map(_wide_cells, bench.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in cells]
    table.insert(1, ["-" * width for width in widths])
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([_title(bench), "", *lines, *_below(bench, _WIDE_LEGEND)])


def _system(row: Row) -> str:
    return name_of(row.system, row.layers)


def _speeds(row: Row) -> list[str]:
    return [
        _system(row),
        row.decode,
        str(row.concurrency),
        f"{row.prompt_tokens_per_s:.0f}",
        "" if row.tokens_per_s_per_request is None else f"{row.tokens_per_s_per_request:.1f}",
        f"{row.tokens_per_s:.1f}",
    ]


def _narrow_cells(row: Row) -> list[str]:
    return [
        *_speeds(row),
        f"{row.ttft_p50_s:.3f}",
        "" if row.gap_p50_ms is None else f"{row.gap_p50_ms:.1f}",
        "" if row.bubble is None else f"{1 - row.bubble:.0%}",
        "" if row.overhead_ms_per_token is None else f"{row.overhead_ms_per_token:+.2f}",
    ]


def _wide_cells(row: Row) -> list[str]:
    return [
        *_speeds(row),
        f"{row.ttft_p50_s:.3f} / {row.ttft_p95_s:.3f} s",
        "" if row.gap_p50_ms is None else f"{row.gap_p50_ms:.1f} / {row.gap_p95_ms:.1f} ms",
        " · ".join(f"{part:.0%}" for part in row.utilisation or []),
        "" if row.bubble is None else f"{row.bubble:.0%}",
        "" if row.overhead_ms_per_token is None else f"{row.overhead_ms_per_token:+.2f} ms",
        " · ".join("?" if count is None else f"{count:.0f}" for count in row.bytes_per_token or []),
        "" if row.predicted_tokens_per_s is None else f"{row.predicted_tokens_per_s:.1f}",
        "" if row.planned_tokens_per_s is None else f"{row.planned_tokens_per_s:.1f}",
    ]


def _title(bench: Bench) -> str:
    return f"{bench.model} on {bench.machine}: {bench.num_prompt} tokens of prompt, {bench.num_tokens} generated"


def _below(bench: Bench, legend: Iterable[str]) -> list[str]:
    lines = [*_ratios(bench), *_winners(bench), *_plans(bench)]
    return ["", *lines, *([""] if lines else []), *legend]


def _winners(bench: Bench) -> list[str]:
    """Which split is best, and which for a single request if that is another one."""
    best = fastest(bench.rows)
    has_decodes = len({row.decode for row in bench.rows}) > 1
    lines = []
    for number, row in enumerate(best):
        name = f"{_system(row)} by {row.decode}" if has_decodes else _system(row)
        others = [
            other.tokens_per_s
            for other in bench.rows
            if (other.system, other.concurrency) == (CLUSTER, row.concurrency) and other.layers != row.layers
        ]
        if number == 0 or row.layers != best[0].layers:
            gain = f", {row.tokens_per_s / max(others) - 1:.0%} more than the next" if max(others) else ""
            requests = f"{row.concurrency} request" + ("s" if row.concurrency > 1 else "")
            lines.append(f"* fastest with {requests}: {name}, {row.tokens_per_s:.1f} tok/s{gain}")
    return lines


def _plans(bench: Bench) -> list[str]:
    """What the plan promised of each split, beside what became of it."""
    return [
        f"* {_system(row)}, {row.concurrency} request(s): {row.planned_tokens_per_s:.1f} tok/s planned, "
        f"{row.tokens_per_s:.1f} measured"
        for row in bench.rows
        if row.planned_tokens_per_s is not None
    ]


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
