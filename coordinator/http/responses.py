"""`POST /v1/responses`: the Open Responses shape. Nothing is stored."""

import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.errors import HttpError
from coordinator.http.reading import read_body
from coordinator.http.served import Served
from coordinator.http.streams import DONE, named, unless_left
from coordinator.http.telling import naming, streamed_response, whole_response
from coordinator.shapes.open_responses import ResponsesBody
from coordinator.shapes.response_answer import ResponseAnswer

_FORMAT = {"response_format": "text.format"}
_NAMES = _FORMAT | {"prompt": "input", "max_tokens": "max_output_tokens"}


async def responses(request: Request) -> Response:
    """Answer items of input as Open Responses says."""
    served: Served = request.app.state.served
    body = await read_body(request, ResponsesBody, served.limits.body_bytes)
    served.require_name(body.model)
    model = await unless_left(request, served.wake_model())
    with naming(_FORMAT):  # a `prompt` that is refused here is the body's own
        ask = body.ask()
    with naming(_NAMES):
        task = await unless_left(request, model.prepare(ask))
    echoed = body.echoed(task.request.sampling)
    answer = ResponseAnswer(f"resp_{uuid.uuid4().hex}", served.names[0], int(time.time()), echoed)
    if not body.stream:
        return await whole_response(request, model, task, answer)

    def tell(error: HttpError) -> bytes:
        return b"".join(map(named, answer.failed(error.to_openai()["error"]))) + DONE

    return await streamed_response(request, model, task, answer, tell=tell, end=DONE)
