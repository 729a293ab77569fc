"""A server's health, models and versions, the cluster's state, and the page that shows it."""

import base64
import hashlib
import re
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Literal, NotRequired

from starlette.responses import HTMLResponse, Response
from typing_extensions import TypedDict

from coordinator.api.body import shown
from coordinator.api.errors import JSONResponse
from coordinator.api.server import Server
from coordinator.engine.status import StatusSnapshot
from worker.errors import InputError
from worker.platform.installation import version_of

_PAGE = (files("coordinator.api") / "page.html").read_text(encoding="utf-8")


class Health(TypedDict):
    status: str
    why: NotRequired[str]


class Versions(TypedDict):
    brigade: str
    mlx: str
    mlx_lm: str


class ModelCard(TypedDict):
    """A model, with the fields of OpenAI's clients, vLLM's (`max_model_len`), and Anthropic's (the last three)."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(TypedDict):
    """The list of OpenAI's API and of Anthropic's, which has the last three fields."""

    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str
    last_id: str


async def live(server: Server) -> Health:
    """The process and its event loop are alive."""
    return {"status": "live"}


async def health(server: Server, deep: str = "0") -> Response:
    """Whether requests are answered now; with `?deep=1` one token goes through all stages first, if it is awake."""
    if deep not in ("0", "1"):
        raise InputError("deep", f"expected 1 or 0, found {shown(deep)}")
    if server.answers_now and deep == "1":
        await server.probe()
    body: Health = {"status": server.state.word, "why": server.why}
    return JSONResponse(body) if server.answers_now else JSONResponse(body, 503, {"Retry-After": "5"})


async def versions(server: Server) -> Versions:
    """The versions of the server and of the libraries that it computes with."""
    return {"brigade": version_of("brigade"), "mlx": version_of("mlx"), "mlx_lm": version_of("mlx-lm")}


async def models(server: Server) -> ModelList:
    """The model, under each of its names: OpenAI's list and Anthropic's at once."""
    cards = [_card(server, name) for name in server.names]
    first, last = cards[0]["id"], cards[-1]["id"]
    return {"object": "list", "data": cards, "has_more": False, "first_id": first, "last_id": last}


async def one_model(server: Server, name: str) -> ModelCard:
    """The model, under this name."""
    server.require_name(name)
    return _card(server, name)


def _card(server: Server, name: str) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": server.started,
        "owned_by": "brigade",
        "max_model_len": server.context,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(server.started, UTC).isoformat().replace("+00:00", "Z"),
    }


async def cluster(server: Server) -> Response:
    """Nodes, hops, requests and recoveries at this moment."""
    state = cluster_state(server, await server.status.look(server.engine))
    return JSONResponse(state, headers={"Cache-Control": "no-store"})


def cluster_state(server: Server, now: StatusSnapshot) -> dict[str, Any]:
    """Return the answer of `/cluster`."""
    stats, spec = server.stats, server.inputs.spec
    rates = stats.rates.until(int(time.monotonic()))  # of the last 120 whole seconds, the oldest first
    return {
        "model": {"name": server.names[0], "num_layers": spec.num_layers, "context": spec.context},
        "standing": {"state": server.state.word, "why": server.why_in_full},
        "uptime_s": stats.uptime_s,
        "epoch": now.epoch,
        "nodes": [asdict(node) for node in now.nodes],
        "hops": [asdict(hop) for hop in now.hops],
        "requests": [asdict(each) for each in now.requests],
        "recent": [
            asdict(ended) | {"parts_ms": {part: took for part, took in ended.parts_ms.items() if took}}
            for ended in stats.recent
        ],
        "recoveries": [
            {"at": at, "age_s": time.monotonic() - since, **asdict(each)} for at, since, each in stats.recovered
        ],
        "totals": {
            "prompt_tokens": stats.total("prompt_tokens"),
            "generation_tokens": stats.total("generation_tokens"),
            "prefix_tokens_asked": stats.total("prefix_cache_queries"),
            "prefix_tokens_reused": stats.total("prefix_cache_hits"),
            "finished": stats.counts("request_success"),
            "refused": stats.counts("requests_rejected"),
            "recoveries": stats.total("recoveries"),
        },
        "rates": {
            "tokens_per_s": [tokens for tokens, _ in rates],
            "tokens_per_step": [round(tokens / steps, 2) if steps else None for tokens, steps in rates],
        },
    }


async def page(server: Server) -> Response:
    """The page of the cluster. It needs no key: it fetches what it shows with the reader's own."""
    return HTMLResponse(_PAGE, headers=_HEADERS)


def content_policy(html: str) -> str:
    """Return the Content-Security-Policy that allows a page's own script and style, by their digests."""

    def digests(tag: str) -> str:
        bodies = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        found = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies)
        return " ".join(f"'sha256-{digest}'" for digest in found)

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_HEADERS = {
    "Content-Security-Policy": content_policy(_PAGE),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
