"""`brigade status`: what a running server does now; without one, what the workers of cluster.yaml hold."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cli.serve import PORT
from coordinator.cli.server_flags import ApiKeyFile
from worker.errors import BrigadeError, InputError, StageLost
from worker.process.call_thread import run_aside

_EVERY_S = 1.0
_WITHIN_S = 5.0

Server = Annotated[str, typer.Option(metavar="URL", help="Where `brigade serve` listens.")]
Watched = Annotated[bool, typer.Option("--watch", help="Go on showing it, every second, until Ctrl-C.")]


def status(
    server: Server = f"http://127.0.0.1:{PORT}",
    watch: Watched = False,
    api_key_file: ApiKeyFile = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
) -> None:
    """The running cluster: nodes with their layers and memory, hops, requests, recoveries.

    Of a server on this machine: brigade status --watch

    What the workers hold where none runs: brigade status --config cluster.yaml
    """
    from coordinator.cli.run_async import run_async
    from coordinator.http.keys import first_key

    key = first_key(api_key_file) if api_key_file else None
    run_async(_show(server.rstrip("/"), key, config, is_watching=watch, as_json=as_json))


async def _show(server: str, key: str | None, config: Path | None, *, is_watching: bool, as_json: bool) -> None:
    from rich.console import Console

    from coordinator.cli.status_tables import tables

    console = Console(highlight=False)
    while True:
        found = await _find(server, key, config)
        if is_watching and console.is_terminal and not as_json:
            console.clear()
        if as_json:
            print(json.dumps(found), flush=True)
        else:
            console.print(tables(found))
        if not is_watching:
            return _require_some(found, config)
        await asyncio.sleep(_EVERY_S)


def _require_some(found: dict[str, Any], config: Path | None) -> None:
    """Raise StageLost, after what was found is shown, if not one of the workers answers."""
    nodes = found.get("nodes")  # of a server one is that server itself, which answers
    if nodes and all(node["state"] == "lost" for node in nodes):
        whom = "the only worker" if len(nodes) == 1 else f"any of the {len(nodes)} workers"
        more = f"the reason stands above, and brigade doctor --config {config} looks closer"
        raise StageLost(f"expected {whom} of {config} to answer: {more}")


async def _find(server: str, key: str | None, config: Path | None) -> dict[str, Any]:
    """The server's state, or else that of the workers. Raises NothingAnswers where neither is there."""
    from coordinator.doors.client import NothingAnswers

    try:
        return await run_aside(partial(ask_server, server, key))
    except NothingAnswers:
        if config is None:
            raise
    from coordinator.cli.status_workers import ask_workers

    return await ask_workers(config)


def ask_server(server: str, key: str | None) -> dict[str, Any]:
    """What `GET /cluster` says.

    Raises:
        NothingAnswers: as it says. InputError: it wants another key. BrigadeError: it is no such server.
    """
    import httpx2

    from coordinator.doors.client import client_settings, no_answer

    try:
        with httpx2.Client(**client_settings(server, key), timeout=_WITHIN_S) as client:
            reply = client.get("cluster")
        if reply.status_code == 401:
            raise InputError("api_key_file", f"{server} wants a key: expected one of its own")
        reply.raise_for_status()
        found = reply.json()
    except httpx2.TransportError as error:
        raise no_answer(server, error, "start `brigade serve`, or give --config for its workers") from error
    except httpx2.HTTPStatusError as error:
        said = f"{server} answers with HTTP status {error.response.status_code}: expected `brigade serve` there"
        raise BrigadeError(said) from error
    except (httpx2.HTTPError, ValueError) as error:
        raise BrigadeError(f"{server} answers, but not as `brigade serve` does") from error
    if not (isinstance(found, dict) and "nodes" in found):
        raise BrigadeError(f"{server} answers, but not as `brigade serve` does")
    return found
