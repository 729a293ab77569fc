"""What the server says of itself: models, health, version."""

import asyncio
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.errors import unavailable
from coordinator.http.json_response import JSONResponse
from coordinator.http.served import Served
from coordinator.http.streams import unless_left
from coordinator.resident.model import State
from worker.process.own_code import version_of

_DEEP_S = 5.0


async def models(request: Request) -> Response:
    """The model, under each of its names: OpenAI's list and Anthropic's at once."""
    served: Served = request.app.state.served
    cards = [_card(served, name) for name in served.names]
    ends = {"has_more": False, "first_id": served.names[0], "last_id": served.names[-1]}
    return JSONResponse({"object": "list", "data": cards} | ends)


async def one_model(request: Request) -> Response:
    """The model, under this name."""
    served: Served = request.app.state.served
    name = request.path_params["name"]
    served.require_name(name)
    return JSONResponse(_card(served, name))


async def live(request: Request) -> Response:
    """The process and its event loop are there."""
    return JSONResponse({"status": "live"})


async def health(request: Request) -> Response:
    """Whether requests are answered now; with `?deep=1` one token goes through all stages first, if it is awake."""
    served: Served = request.app.state.served
    if served.standing.takes_requests and request.query_params.get("deep") == "1":
        await unless_left(request, _send_token(served))
    standing = served.standing
    body = {"status": standing.state.word, "why": standing.why}
    if standing.takes_requests:
        return JSONResponse(body)
    return JSONResponse(body, 503, {"Retry-After": "5"})


async def _send_token(served: Served) -> None:
    """Not where the model is asleep. Raises Refusal (503) if it is not back in time, or those of others take it all."""
    try:
        async with asyncio.timeout(_DEEP_S), served.looking:
            if served.standing.state is not State.ASLEEP:
                await served.require_model().look()
    except TimeoutError:
        raise unavailable(f"no token went through all stages within {_DEEP_S:g} s", "too_slow") from None


async def versions(request: Request) -> Response:
    """Of the server and of what it computes with."""
    return JSONResponse({name.replace("-", "_"): version_of(name) for name in ("brigade", "mlx", "mlx-lm")})


def _card(served: Served, name: str) -> dict[str, object]:
    """By the words of OpenAI's clients, of vLLM's, and of Anthropic's, which list models under the same path."""
    created_at = datetime.fromtimestamp(served.started, UTC).isoformat().replace("+00:00", "Z")
    of_openai = {"id": name, "object": "model", "created": served.started, "owned_by": "brigade"}
    return of_openai | {
        "max_model_len": served.context, "type": "model", "display_name": name, "created_at": created_at,
    }  # fmt: skip
