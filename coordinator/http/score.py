"""`POST /v1/score` and `POST /v1/classify`: how likely given texts are after a prompt; nothing is generated."""

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.json_response import JSONResponse
from coordinator.http.reading import read_body
from coordinator.http.served import Served
from coordinator.http.streams import unless_left
from coordinator.resident.scores import score_continuations
from coordinator.shapes.scoring import ClassifyBody, ScoreBody, classify_answer, score_answer


async def score(request: Request) -> Response:
    """The log-probability of each continuation."""
    served: Served = request.app.state.served
    body = await read_body(request, ScoreBody, served.limits.body_bytes)
    served.require_name(body.model)
    model = await unless_left(request, served.wake_model())
    work = score_continuations(model, body.given, body.continuations)
    return JSONResponse(score_answer(served.names[0], await unless_left(request, work)))


async def classify(request: Request) -> Response:
    """The probability of each label."""
    served: Served = request.app.state.served
    body = await read_body(request, ClassifyBody, served.limits.body_bytes)
    served.require_name(body.model)
    model = await unless_left(request, served.wake_model())
    work = score_continuations(model, body.given, body.labels)
    return JSONResponse(classify_answer(served.names[0], body.labels, await unless_left(request, work)))
