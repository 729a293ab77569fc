"""`brigade status`: what a running server does now; without one, what the workers of cluster.yaml hold."""

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cli.serve import PORT
from coordinator.cli.server_flags import ApiKeyFile
from worker.errors import BrigadeError, InputError, StageLost

_EVERY_S = 1.0
_WITHIN_S = 5.0
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a node of ours is behind no proxy

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
    if not server.startswith(("http://", "https://")):
        raise InputError("server", f"expected http://HOST:PORT, got {server!r}")
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
            return
        await asyncio.sleep(_EVERY_S)


async def _find(server: str, key: str | None, config: Path | None) -> dict[str, Any]:
    """The server's state, or else that of the workers. Raises StageLost where neither is there."""
    try:
        return await asyncio.to_thread(ask_server, server, key)
    except StageLost:
        if config is None:
            raise
    from coordinator.cli.status_workers import ask_workers

    return await ask_workers(config)


def ask_server(server: str, key: str | None) -> dict[str, Any]:
    """What `GET /cluster` says.

    Raises:
        StageLost: nothing answers there. InputError: it wants another key. BrigadeError: it is no such server.
    """
    request = urllib.request.Request(f"{server}/cluster", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with _DIRECTLY.open(request, timeout=_WITHIN_S) as reply:
            found = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 401:
            raise InputError("api_key_file", f"{server} wants a key: expected one of its own") from error
        raise BrigadeError(f"{server} answers with HTTP status {error.code}: expected `brigade serve` there") from error
    except ValueError as error:
        raise BrigadeError(f"{server} answers, but not as `brigade serve` does") from error
    except OSError as error:
        why = getattr(error, "reason", error)
        raise StageLost(
            f"nothing answers at {server} ({why}): start `brigade serve`, or give --config for its workers"
        ) from error
    if not (isinstance(found, dict) and "nodes" in found):
        raise BrigadeError(f"{server} answers, but not as `brigade serve` does")
    return found
