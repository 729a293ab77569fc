"""`GET /cluster`: the server's state at this moment, as JSON."""

import time
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.json_response import JSONResponse
from coordinator.http.served import Served
from coordinator.resident.tally import Ended, Tally
from coordinator.resident.watch import Now


async def cluster(request: Request) -> Response:
    """Nodes, hops, requests and recoveries at this moment."""
    served: Served = request.app.state.served
    state = cluster_state(served, await served.watch.look(served.model))
    return JSONResponse(state, headers={"Cache-Control": "no-store"})


def cluster_state(served: Served, now: Now) -> dict[str, Any]:
    """What `/cluster` says."""
    standing, tally, spec = served.standing, served.tally, served.frontend.spec
    return {
        "model": {"name": served.names[0], "num_layers": spec.num_layers, "context": spec.context},
        "standing": {"state": standing.state.word, "why": standing.why},
        "uptime_s": tally.uptime_s,
        "epoch": now.epoch,
        "nodes": [asdict(node) for node in now.nodes],
        "hops": [asdict(hop) for hop in now.hops],
        "requests": [asdict(each) for each in now.requests],
        "recent": [_ended(each) for each in tally.recent],
        "recoveries": [{"at": at, "age_s": time.time() - at, **asdict(found)} for at, found in tally.recovered],
        "totals": _totals(tally),
        "rates": _rates(tally),
    }


def _ended(ended: Ended) -> dict[str, Any]:
    """Without the parts that took no time."""
    return asdict(ended) | {"parts_ms": {part: took for part, took in ended.parts_ms.items() if took}}


def _totals(tally: Tally) -> dict[str, Any]:
    return {
        "prompt_tokens": tally.prompt_tokens,
        "generation_tokens": tally.generation_tokens,
        "prefix_tokens_asked": tally.prefix_queries,
        "prefix_tokens_reused": tally.prefix_hits,
        "finished": dict(tally.finished),
        "refused": dict(tally.refused),
        "recoveries": sum(tally.recoveries.values()),
    }


def _rates(tally: Tally) -> dict[str, Any]:
    """Of each of the last 120 whole seconds, the oldest first; no tokens per step where there was no step."""
    counts = tally.rates.until(int(tally.now_s))
    return {
        "tokens_per_s": [tokens for tokens, _ in counts],
        "tokens_per_step": [round(tokens / steps, 2) if steps else None for tokens, steps in counts],
    }
