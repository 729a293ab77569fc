"""Statistics of a request: two lines or tables (--stats) on standard error, and JSON."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from coordinator.cluster.progress import say
from coordinator.cluster.tables import fitting, plain_console
from coordinator.planning.plan import Plan
from coordinator.sessions.output import Answer
from coordinator.sessions.waterfall import StageTime, Waterfall
from protos.brigade_pb2 import StatusReply
from worker.platform.text import counted, format_bytes

_WATERFALL_COLUMNS = 40  # the most columns of the bars
_OTHER_COLUMNS = 40  # columns for names and figures
_STAGES_LEGEND = """\
compute: time in the node's layers; busy: compute's share of the wall time
wire in: waiting for the hop into this node (into the first: for results);
queue: waiting for the node's turn; both only while no node computed
"""
_WATERFALL_LEGEND = """\
each moment of the request is in one row: the part that its next result waited for
decode, encode: conversion of bytes to arrays, and of arrays or results to bytes"""


def stats_of(answer: Answer) -> dict[str, Any]:
    """Return the `stats` of an answer; speeds are null if they are not defined."""
    num_tokens = len(answer.tokens)
    has_prompt_time = answer.first_steps < 2  # or else the time of the first canvas is in it
    return {
        "ttft_s": answer.ttft_s,
        "decode_s": answer.decode_s,
        "tokens_per_s": answer.tokens_per_s,
        "prompt_tokens_per_s": answer.usage.prompt_tokens_per_s(answer.ttft_s) if has_prompt_time else None,
        "steps": answer.usage.num_steps,
        "tokens_per_step": num_tokens / answer.usage.num_steps if answer.usage.num_steps else None,
        "drafts_held": answer.usage.drafts_held,
        "recoveries": answer.usage.num_recoveries,
        "recovery_s": answer.usage.still_s,
        "peak_memory_bytes": sum(status.peak_memory_bytes for status in answer.statuses),
        "cache_bytes": sum(status.cache_bytes for status in answer.statuses),
    }


def stages_of(answer: Answer, plan: Plan, waterfall: Waterfall) -> list[dict[str, Any]]:
    """Return an entry per node, lost ones last: milliseconds are sums over the request, unknown memory is null."""
    held = ("peak_memory_bytes", "cache_bytes")
    return [
        {**time.as_json(), "utilisation": time.utilisation}
        | {name: status and getattr(status, name) for name in held}
        | ({"lost": True} if time.is_lost else {})
        for time, status in _with_statuses(answer, plan, waterfall)
    ]


def _with_statuses(answer: Answer, plan: Plan, waterfall: Waterfall) -> Iterator[tuple[StageTime, StatusReply | None]]:
    """Yield each node's times and its status at the end; None for a lost node, and for one that did not answer."""
    held = {node.name: status for node, status in zip(plan.assignments, answer.statuses, strict=True) if status.clock}
    for time in waterfall.stages:
        yield time, None if time.is_lost else held.get(time.node.name)


def print_summary(answer: Answer, ended: str, drawn: str = "") -> None:
    """Print two lines: the speed; why the answer ended, and how its tokens were drawn."""
    stats = stats_of(answer)
    speed = f", {stats['tokens_per_s']:.1f} tok/s" if stats["tokens_per_s"] else ""
    prompt = f"prompt: {counted(answer.usage.num_prompt, 'token')}"
    if stats["prompt_tokens_per_s"] is not None:
        prompt += f", {stats['prompt_tokens_per_s']:.1f} tok/s"
    say(
        f"\n{counted(len(answer.tokens), 'token')}{speed}, {stats['tokens_per_step']:.2f} per step; "
        f"first after {stats['ttft_s']:.3f} s ({prompt})\n{ended}{drawn and f'; {drawn}'}"
    )


def print_stats(answer: Answer, plan: Plan, waterfall: Waterfall, *, with_legend: bool = False) -> None:
    """Print a table of the stages and the waterfall."""
    console = plain_console(stderr=True)
    heads = ("node", "layers", "compute", "wire in", "queue", "busy", "cache", "peak memory")
    rows = [
        [
            time.node.name, "lost" if time.is_lost else f"[{time.node.start}, {time.node.end})",
            f"{time.compute_ms:.1f} ms", f"{time.wire_ms:.1f} ms", f"{time.queue_ms:.1f} ms", f"{time.utilisation:.0%}",
            format_bytes(status.cache_bytes) if status else "-",
            format_bytes(status.peak_memory_bytes) if status else "-",
        ]
        for time, status in _with_statuses(answer, plan, waterfall)
    ]  # fmt: skip
    console.print("", fitting(heads, rows, console.width), sep="\n")
    if with_legend:
        console.print(_STAGES_LEGEND, style="dim")
    console.print(_waterfall_table(waterfall, console.width))
    if with_legend:
        console.print(_WATERFALL_LEGEND, style="dim")


def _waterfall_table(waterfall: Waterfall, width: int) -> Table:
    """Return a row per part, as a bar that begins where the part before it ended."""
    table = Table(box=None, pad_edge=False, show_header=False)
    columns = max(0, min(_WATERFALL_COLUMNS, width - _OTHER_COLUMNS))
    before = 0.0
    for part, took in waterfall.parts.items():
        if part == "recovery" and not took:
            continue
        begin, end = (round(columns * moment / waterfall.wall_ms) for moment in (before, before + took))
        bar = Text(" " * begin + "━" * (end - begin))
        table.add_row(part, f"{took:.1f} ms", f"{took / waterfall.wall_ms:.0%}", bar)
        before += took
    table.add_row("wall time", f"{waterfall.wall_ms:.1f} ms", "", "")
    return table
