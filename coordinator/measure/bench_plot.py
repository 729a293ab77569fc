"""A benchmark as a picture."""

import importlib.util
from pathlib import Path

from coordinator.measure.bench_results import Bench, Row, name_of
from worker.errors import InputError

_IMAGES = (".png", ".svg", ".pdf")


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


def _name(row: Row) -> str:
    system = name_of(row.system, row.layers)
    return system if row.decode == "ar" else f"{system} ({row.decode})"
