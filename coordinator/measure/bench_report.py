"""A benchmark for people: a Markdown table, and a picture."""

import importlib.util
from pathlib import Path

from coordinator.measure.bench_results import CLUSTER, Bench, Row
from worker.errors import InputError

_IMAGES = (".png", ".svg", ".pdf")
_HEAD = (
    "system", "decode", "requests", "prompt tok/s", "tok/s each", "tok/s all", "first token p50/p95",
    "next token p50/p95", "busy", "bubble", "overhead", "bytes/token", "predicted",
)  # fmt: skip
_LEGEND = (
    "tok/s each: the median request, from its first token to its last. tok/s all, busy and bubble: while all requests",
    "decode, or from the first token to the last if they hardly do at once; busy is how much of that time each stage",
    "computes, bubble what is left, mean over the stages. overhead: per token of a request, against one process.",
    "bytes/token: what a stage sends on, ? if it did not say. predicted: tok/s all, simulated.",
)


def to_markdown(bench: Bench) -> str:
    """All rows, and the ratios under them."""
    cells = [list(_HEAD), *map(_cells, bench.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in cells]
    table.insert(1, ["-" * width for width in widths])
    return "\n".join([
        f"{bench.model} on {bench.machine}: {bench.num_prompt} tokens of prompt, {bench.num_tokens} generated",
        "",
        *("| " + " | ".join(row) + " |" for row in table),
        "",
        *(lines := _ratios(bench)),
        *([""] if lines else []),
        *_LEGEND,
    ])  # fmt: skip


def check_plot(path: Path) -> None:
    """Raise InputError for what could only be found out after the measurement."""
    if path.suffix not in _IMAGES:
        raise InputError("plot", f"expected a file ending in {', '.join(_IMAGES)}, got {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "plot", "matplotlib, which draws, is not installed: .venv/bin/pip install matplotlib, or make setup"
        )


def write_plot(bench: Bench, path: Path) -> None:
    """Throughput and latency against the number of requests, a line per system, to an image file.

    Raises:
        InputError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    for name in dict.fromkeys(map(_name, bench.rows)):
        rows = list({row.concurrency: row for row in bench.rows if _name(row) == name}.values())
        counts = [row.concurrency for row in rows]
        throughput.plot(counts, [row.tokens_per_s for row in rows], marker="o", label=name)
        gaps = [float("nan") if row.gap_p50_ms is None else row.gap_p50_ms for row in rows]
        latency.plot(counts, gaps, marker="o", label=name)
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


def _system(row: Row) -> str:
    return f"{row.system} {','.join(map(str, row.layers))}" if row.system == CLUSTER and row.layers else row.system


def _name(row: Row) -> str:
    return _system(row) if row.decode == "ar" else f"{_system(row)} ({row.decode})"


def _cells(row: Row) -> list[str]:
    return [
        _system(row),
        row.decode,
        str(row.concurrency),
        f"{row.prompt_tokens_per_s:.0f}",
        "" if row.tokens_per_s_per_request is None else f"{row.tokens_per_s_per_request:.1f}",
        f"{row.tokens_per_s:.1f}",
        f"{row.ttft_p50_s:.3f} / {row.ttft_p95_s:.3f} s",
        "" if row.gap_p50_ms is None else f"{row.gap_p50_ms:.1f} / {row.gap_p95_ms:.1f} ms",
        " · ".join(f"{part:.0%}" for part in row.utilisation or []),
        "" if row.bubble is None else f"{row.bubble:.0%}",
        "" if row.overhead_ms_per_token is None else f"{row.overhead_ms_per_token:+.2f} ms",
        " · ".join("?" if count is None else f"{count:.0f}" for count in row.bytes_per_token or []),
        "" if row.predicted_tokens_per_s is None else f"{row.predicted_tokens_per_s:.1f}",
    ]


def _ratios(bench: Bench) -> list[str]:
    found = bench.as_json()
    most = max(row.concurrency for row in bench.rows)
    named = (
        ("ratio_vs_one_process", "one request, tokens per second: {:.2f} x one process"),
        ("overhead_ms_per_token", "one request, per token: {:+.2f} ms against one process"),
        ("prefill_ratio_vs_one_process", f"prompts of {most} request(s): {{:.2f}} x one process"),
        ("ratio_vs_mlx_lm_batch", f"{most} request(s), tokens per second of all: {{:.2f}} x mlx_lm in one process"),
    )
    clusters = list(dict.fromkeys(_system(row) for row in bench.rows if row.system == CLUSTER))
    of = f"{clusters[0]}, " if len(clusters) > 1 else ""  # the ratios are the first one's
    return [f"* {of}{text.format(found[key])}" for key, text in named if found[key] is not None]
