"""The application without a process, a port or a model."""

import asyncio
from typing import Any, cast

import httpx2
from starlette.types import ASGIApp

from coordinator.api.app import make_app
from coordinator.api.server import RequestLimits, Server
from coordinator.engine.engine import Engine
from coordinator.engine.inputs import InputProcessor


def served(*, model: Engine | None = None, heartbeat_s: float = RequestLimits.heartbeat_s, **more: Any) -> Server:
    """What routes share while this model is loaded, or none."""
    limits = RequestLimits(body_bytes=1000, heartbeat_s=heartbeat_s)
    shared = Server(cast(InputProcessor, None), ("talker",), limits, **more)
    if model is not None:
        shared.open(model)
    return shared


def app(**more: Any) -> ASGIApp:
    return make_app(served(), **more)


def ask(app: ASGIApp, method: str, path: str, **more: Any) -> httpx2.Response:
    """One request."""

    async def sent() -> httpx2.Response:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:9338") as client:
            return await client.request(method, path, **more)

    return asyncio.run(sent())
