"""Losses of a worker, for people: what was wanted beside what was measured."""

from rich.console import Console

from coordinator.cluster.tables import fitting
from coordinator.measure.failover_results import Failover, Row

_COLUMNS = 110
_HEADS = (
    "tokens", "worker", "detect ms", "wanted", "start s", "load s", "reopen s", "replay s", "prompt s", "gap s",
    "wanted",
)  # fmt: skip
_LEGEND = (
    "tokens: known when the worker is lost; it is started again, or a spare one takes its place. detect: until the",
    "loss is noticed. reopen: from there to an open chain, process start and load included. replay: from there to",
    "the next token. prompt: as many tokens as a prompt, right before. gap: between two tokens, as the reader sees",
    "it; wanted: detect + start + load + 1.2 x prompt at most. ! is more than wanted. Medians over the trials.",
)


def print_failover(failover: Failover) -> None:
    """On standard output, in 110 columns or what the terminal has."""
    console = Console(highlight=False, markup=False)
    console.width = min(_COLUMNS, console.width) if console.is_terminal else _COLUMNS
    table = fitting(_HEADS, list(map(_cells, failover.rows)), console.width, num_keys=2)
    legend = _LEGEND if console.width == _COLUMNS else [" ".join(_LEGEND)]
    console.print(f"{failover.model}, layers {failover.layers}, on {failover.machine}", "", table, "", sep="\n")
    console.print(*_equality(failover), *legend, sep="\n")


def _cells(row: Row) -> list[str]:
    times = row.times
    return [
        str(row.context),
        f"{row.loss}, {row.place}",
        _text(times.detect_s, row.wanted_detect_s, unit=1e-3),
        f"{row.wanted_detect_s * 1e3:.0f}",
        *(_text(seconds) for seconds in (times.start_s, times.load_s, times.reopen_s, times.replay_s, times.prefill_s)),
        _text(times.gap_s, row.wanted_gap_s),
        _text(row.wanted_gap_s),
    ]


def _text(seconds: float | None, wanted_s: float | None = None, unit: float = 1.0) -> str:
    """The figure, marked where it is more than was wanted; nothing where there is none."""
    if seconds is None:
        return ""
    is_more = wanted_s is not None and seconds > wanted_s
    return f"{'!' if is_more else ''}{seconds / unit:.{0 if unit < 1 else 2}f}"


def _equality(failover: Failover) -> list[str]:
    wrong = [row for row in failover.rows if not row.is_equal]
    if not wrong:
        return ["Every answer had the tokens of the unfailed run.", ""]
    cases = ", ".join(f"{row.context} tokens, {row.loss}, {row.place}" for row in wrong)
    return [f"OTHER TOKENS than in the unfailed run: {cases}", ""]
