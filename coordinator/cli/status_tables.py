"""A cluster's state as tables that can be read at 60 columns."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from worker.process.sizes import format_bytes

_STYLES = {"ready": "green", "active": "green", "lost": "bold red", "recovering": "bold red", "failed": "bold red"}
_MOST_REQUESTS = 8

Json = Mapping[str, Any]


def tables(found: Json) -> Group:
    """What `/cluster` says, or what the workers said."""
    shown: list[RenderableType] = [_heading(found), Text(), _nodes(found["nodes"])]
    shown += [Text(f"{node['name']}: {node['why']}", "red") for node in found["nodes"] if node.get("why")]
    if found["nodes"]:
        shown += [Text(), _memory(found["nodes"])]
    if hops := found.get("hops"):
        shown += [Text(), _hops(hops)]
    if requests := found.get("requests"):
        shown += [Text(), _requests(requests)]
    for recovery in found.get("recoveries", [])[-3:]:
        shown += [Text(), Text(recovery["story"], "dim")]
    return Group(*shown)


def _heading(found: Json) -> Text:
    standing = found["standing"]
    line = Text(found["model"]["name"] + ": " if "model" in found else "")
    line.append(standing["state"], _STYLES.get(standing["state"], "yellow"))
    if standing["why"]:
        line.append(f" ({standing['why']})")
    if "totals" in found:
        speed = found["rates"]["tokens_per_s"][-1]
        said = f"up {found['uptime_s']:.0f} s, epoch {found['epoch']}, {speed} tok/s, recoveries "
        line.append(f"\n{said}{found['totals']['recoveries']}", "dim")
    return line


def _nodes(nodes: list[Json]) -> Table:
    table = _table("node", "layers", "weights", "cache", "peak", "busy", "")
    for node in nodes:
        layers = f"[{node['start']},{node['end']})" if "start" in node else ""
        busy = f"{node['utilisation']:.0%}" if "utilisation" in node else ""
        state = node["state"]
        table.add_row(
            Text(node["name"]), Text(layers), _size(node.get("weight_bytes")), _size(node.get("cache_held_bytes")),
            _size(node.get("peak_memory_bytes")), busy, Text(state, _STYLES.get(state, "yellow")),
        )  # fmt: skip
    return table


def _memory(nodes: list[Json]) -> Table:
    """What each may use, how much of that is promised to requests, and what MLX holds and keeps."""
    table = _table("memory", "may use", "promised", "active", "cached")
    for node in nodes:
        table.add_row(
            Text(node["name"]), _size(node.get("memory_bytes")), _size(node.get("cache_promised_bytes")),
            _size(node.get("active_memory_bytes")), _size(node.get("cached_memory_bytes")),
        )  # fmt: skip
    return table


def _hops(hops: list[Json]) -> Table:
    table = _table("hop", "latency", "sent")
    for hop in hops:
        latency = "–" if hop["latency_ms"] is None else f"{hop['latency_ms']:.2f} ms"
        table.add_row(Text(f"{hop['source']} → {hop['target']}"), latency, _size(hop["sent_bytes"]))
    return table


def _requests(requests: list[Json]) -> Table:
    table = _table("request", "prompt", "tokens", "decoder", "since", "")
    for each in requests[:_MOST_REQUESTS]:
        table.add_row(
            Text(each["id"][-12:]), str(each["prompt_tokens"]), str(each["generated"]), Text(each["decoder"]),
            f"{each['age_s']:.0f} s", each["state"],
        )  # fmt: skip
    if (more := len(requests) - _MOST_REQUESTS) > 0:
        table.add_row(f"and {more} more")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _size(count: int | None) -> str:
    return "–" if count is None else format_bytes(count).replace("iB", "")
