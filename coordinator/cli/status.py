"""`brigade status`: the state of a running server, or else of the workers of cluster.yaml."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.segment import SegmentLines
from rich.text import Text

from coordinator.cli import flags
from coordinator.cli.flags import find_config, given_flags
from coordinator.cli.serve import PORT
from coordinator.cluster.options import cluster_options
from coordinator.cluster.progress import say
from coordinator.cluster.tables import fitting, plain_console
from worker.errors import BrigadeError, InputError, StageLost
from worker.platform.text import Json, ago, format_bytes
from worker.platform.threads import run_in_thread

if TYPE_CHECKING:
    from coordinator.cluster.peer import Peer

EVERY_S = 1.0
_SERVER_WITHIN_S = 5.0
WORKER_WITHIN_S = 1.0
_MOST_REQUESTS = 8  # shown in the table
_NO_SERVER = "no server"  # was asked
_OF_STATUS = ("weight_bytes", "peak_memory_bytes", "active_memory_bytes", "cached_memory_bytes", "slots")
_STYLES = {"ready": "green", "active": "green", "lost": "bold red", "recovering": "bold red"}


async def status(
    ctx: typer.Context,
    server: Annotated[
        str, typer.Option(metavar="URL", help="Where `brigade serve` listens.")
    ] = f"http://127.0.0.1:{PORT}",
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
    api_key_file: flags.ApiKeyFile = None,
    config: flags.Config = None,
    as_json: flags.JsonFlag = False,
) -> None:
    """Show the running cluster: nodes with their layers and memory, hops, requests, recoveries.

    Of a server on this machine: brigade status --watch

    Of workers without a server: brigade status --config cluster.yaml
    """
    from coordinator.api.auth import first_key
    from coordinator.cli.remote import NothingAnswers

    if watch and as_json:
        raise InputError("watch", "not expected with --json, which prints one object")
    key = first_key(api_key_file)
    is_named = "server" in given_flags(ctx)  # such a server does not stand for this folder's workers
    asks_workers = config is not None and not is_named
    console, has_shown = plain_console(), False
    while True:
        try:
            if config is not None and asks_workers:
                found = await ask_workers(config)
            else:
                found = await run_in_thread(partial(ask_server, server.rstrip("/"), key))
        except NothingAnswers as error:
            config = config or (None if is_named else find_config(None))
            if config is not None:
                found = await ask_workers(config)
            elif has_shown:  # it is being started again
                found = {"standing": {"state": "lost", "why": error.message}, "nodes": []}
            else:
                raise
        if as_json:
            flags.print_json(found)
        elif watch and console.is_terminal:
            console.clear()
            lines = console.render_lines(tables(found, console.width), pad=False)
            console.print(SegmentLines(lines[: console.height - 1], new_lines=True))  # the last one is the cursor's
        else:
            console.print(tables(found, console.width))
        if not watch:
            break
        has_shown = True
        await asyncio.sleep(EVERY_S)
    nodes = found.get("nodes")  # a server's include itself, which answers
    if nodes and all(node["state"] == "lost" for node in nodes):
        expected = "the only worker" if len(nodes) == 1 else f"any of the {len(nodes)} workers"
        more = f"the reason stands above, and brigade doctor --config {config} looks closer"
        raise StageLost(f"expected {expected} of {config} to answer: {more}")


def ask_server(server: str, key: str | None) -> Json:
    """Return the answer of `GET /cluster`.

    Raises:
        NothingAnswers: no server answers. InputError: the key is wrong. BrigadeError: it is another program.
    """
    import httpx2

    from coordinator.cli.remote import client_settings, error_in, no_answer, unauthorised

    otherwise = f"{server} answers, but not as `brigade serve` does"
    try:
        with httpx2.Client(**client_settings(server, key), timeout=_SERVER_WITHIN_S) as client:
            reply = client.get("cluster")
        if reply.status_code == 401:
            raise unauthorised(server, key)
        reply.raise_for_status()
    except (httpx2.TransportError, UnicodeError) as error:  # a host name that cannot be encoded
        raise no_answer(server, error, "start `brigade serve`, or give --config for its workers") from error
    except httpx2.HTTPStatusError as error:
        reason, _ = error_in(error.response.content)
        said = f"{server} answers with HTTP status {error.response.status_code}"
        raise BrigadeError(f"{said}: {reason or 'expected `brigade serve` there'}") from error
    except httpx2.HTTPError as error:
        raise BrigadeError(otherwise) from error
    try:
        found: Json = reply.json()
        tables(found, width=80)  # which reads all that is shown
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise BrigadeError(otherwise) from None
    return found


async def ask_workers(config: Path) -> Json:
    """Return the state of each worker with the keys of `/cluster`, or the reason why it does not answer."""
    from coordinator.cluster.peer import peers_of
    from worker.node.network import Network

    cluster = cluster_options(config).cluster
    network = Network.of(cluster, warn=lambda line: say(f"warning: {line}"))
    async with peers_of(cluster, network) as peers:
        nodes = await asyncio.gather(*map(_ask_worker, peers))
    return {
        "standing": {"state": _NO_SERVER, "why": f"those of {config.name}; a server may use them"},
        "nodes": list(nodes),
    }


async def _ask_worker(peer: Peer) -> dict[str, Any]:
    place = {"name": peer.name, "address": peer.address}
    try:
        hello, status = await peer.hello(WORKER_WITHIN_S), await peer.status(WORKER_WITHIN_S)
    except BrigadeError as error:
        return place | {"state": "lost", "why": error.message}
    return place | {
        "state": "active" if status.slots else "idle",
        "memory_bytes": hello.memory_bytes,
        "cache_held_bytes": status.cache_bytes,
        **{name: getattr(status, name) for name in _OF_STATUS},
        "versions": {"mlx": hello.mlx_version, "mlx-lm": hello.mlx_lm_version},
    }


def tables(found: Json, width: int) -> Group:
    """Return the state as tables that are no wider than `width` if possible."""
    shown: list[RenderableType] = [_heading(found), Text(), _nodes(found["nodes"], width)]
    shown += [Text(f"{node['name']}: {node['why']}", "red") for node in found["nodes"] if node.get("why")]
    if found["nodes"]:
        shown += [Text(), _memory(found["nodes"], width)]
    if hops := found.get("hops"):
        rows = []
        for hop in hops:
            latency = "–" if hop["latency_ms"] is None else f"{hop['latency_ms']:.2f} ms"
            rows.append([f"{hop['source']} → {hop['target']}", latency, _size(hop["sent_bytes"])])
        shown += [Text(), fitting(("hop", "latency", "sent"), rows, width)]
    if requests := found.get("requests"):
        shown += [Text(), _requests(requests, width)]
    for recovery in found.get("recoveries", [])[-3:]:
        shown += [Text(), Text(f"{ago(recovery['age_s'])}: {recovery['story']}", "dim")]
    return Group(*shown)


def _heading(found: Json) -> Text:
    standing = found["standing"]
    line = Text(found["model"]["name"] + ": " if "model" in found else "")
    state = "workers, asked directly" if standing["state"] == _NO_SERVER else standing["state"]
    line.append(state, _STYLES.get(state, "yellow"))
    if standing["why"]:
        line.append(f" ({standing['why']})")
    if "totals" in found:
        speed = found["rates"]["tokens_per_s"][-1]
        said = f"up {found['uptime_s']:.0f} s, epoch {found['epoch']}, {speed} tok/s, recoveries "
        line.append(f"\n{said}{found['totals']['recoveries']}", "dim")
    return line


def _nodes(nodes: Sequence[Json], width: int) -> Group:
    rows = []
    for node in nodes:
        layers = f"[{node['start']},{node['end']})" if "start" in node else "–"
        busy = f"{node['utilisation']:.0%}" if "utilisation" in node else "–"
        state = node["state"]
        sizes = (_size(node.get(key)) for key in ("weight_bytes", "cache_held_bytes", "peak_memory_bytes"))
        rows.append([node["name"], layers, *sizes, busy, Text(state, _STYLES.get(state, "yellow"))])
    return fitting(("node", "layers", "weights", "cache", "peak", "busy", ""), rows, width)


def _memory(nodes: Sequence[Json], width: int) -> Group:
    """Return a row per node: its memory budget, the part reserved for requests, and MLX's active and cached memory."""
    keys = ("memory_bytes", "cache_promised_bytes", "active_memory_bytes", "cached_memory_bytes")
    rows = [[node["name"], *(_size(node.get(key)) for key in keys)] for node in nodes]
    return fitting(("memory", "may use", "reserved", "active", "cached"), rows, width)


def _prompt(request: Json) -> str:
    """Return the tokens of a request's prompt, and how many are computed while some are not."""
    num = request["prompt_tokens"]
    computed = request.get("prompt_computed", num)  # older servers do not tell
    return str(num) if computed == num else f"{computed} of {num}"


def _requests(requests: Sequence[Json], width: int) -> Group:
    rows = [
        [each["id"][-12:], _prompt(each), str(each["generated"]), each["decoder"],
         f"{each['age_s']:.0f} s", each["state"]]
        for each in requests[:_MOST_REQUESTS]
    ]  # fmt: skip
    table = fitting(("request", "prompt", "tokens", "decoder", "since", ""), rows, width)
    more = len(requests) - _MOST_REQUESTS
    return Group(table, Text(f"and {more} more")) if more > 0 else table


def _size(count: int | None) -> str:
    return "–" if count is None else format_bytes(count)
