"""Forecasts for people: a table on standard output, and where its numbers come from."""

from collections.abc import Sequence

from rich.console import Console

from coordinator.cluster.tables import fitting
from coordinator.measure.forecast import Forecast, Times, listed

_HEADS = ("requests", "tok/s each", "tok/s all", "first token", "next token", "longest wait", "stages busy")
_LEGEND = (
    "tok/s, next token and busy: while all decode, so that requests x tok/s each = tok/s all, and a next token takes "
    "1 s / tok/s each. First token: the median of requests that come at once. Longest wait: while prompts are fed."
)
_ROWS = {
    "measured": "What further rows of a frame cost: as measured.",
    "given": "What further rows of a frame cost: as --row-ms says.",
    "published": (
        "What further rows of a frame cost is not known here: as published of an M5 Pro with 4-bit weights, where 8 "
        "rows take 3.9 times as long as one, 16 to 64 about 2.7 times. --row-ms, --measured or --config know better."
    ),
}


def print_forecasts(forecasts: Sequence[Forecast], times: Times) -> None:
    """A row per number of requests; below it, which of them were not measured."""
    console = Console(highlight=False, markup=False)
    rows = [
        (
            str(found.concurrency), f"{found.tokens_per_s_per_request:.1f}", f"{found.tokens_per_s:.1f}",
            f"{found.ttft_p50_s:.2f} s", f"{found.gap_mean_ms:.1f} ms", f"{found.gap_max_ms:.1f} ms",
            " · ".join(f"{part:.0%}" for part in found.utilisation),
        )
        for found in forecasts
    ]  # fmt: skip
    console.print(fitting(_HEADS, rows, console.width, num_left=0), "", _LEGEND, _ROWS[times.rows_are], sep="\n")
    if times.by_count and not times.by_count.keys() >= {found.concurrency for found in forecasts}:
        least, most = times.sizes
        console.print(
            f"{listed(times.by_count)} at once: by the times of those requests. All others: by what frames of "
            f"{least} to {most} rows took, on straight lines between and beyond."
        )
