"""`POST /v1/responses`: the Open Responses shape. Nothing is stored."""

import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.errors import HttpError
from coordinator.http.reading import read_body
from coordinator.http.served import Served
from coordinator.http.streams import DONE, named
from coordinator.http.telling import naming, streamed_response, whole_response
from coordinator.resident.frontend import Task
from coordinator.resident.model import ResidentModel
from coordinator.shapes.open_responses import ResponsesBody
from coordinator.shapes.response_answer import ResponseAnswer
from protos.brigade_pb2 import Sampling

_FORMAT = {"response_format": "text.format"}
_NAMES = _FORMAT | {"prompt": "input", "max_tokens": "max_output_tokens"}


async def responses(request: Request) -> Response:
    """Answer items of input as Open Responses says."""
    served: Served = request.app.state.served
    body = await read_body(request, ResponsesBody, served.limits.body_bytes)
    served.require_name(body.model)
    answer = _answer(served, body, Sampling())  # of a failure before more of it is known

    async def prepare(model: ResidentModel) -> tuple[Task, ResponseAnswer]:
        nonlocal answer
        with naming(_FORMAT):  # a `prompt` that is refused here is the body's own
            ask = body.ask()
        with naming(_NAMES):
            task = await model.prepare(ask)
        answer = _answer(served, body, task.request.sampling)
        return task, answer

    if not body.stream:
        return await whole_response(request, prepare)

    def tell(error: HttpError) -> bytes:
        return b"".join(map(named, answer.failed(error.to_openai()["error"]))) + DONE

    return await streamed_response(request, prepare, tell=tell, end=DONE)


def _answer(served: Served, body: ResponsesBody, sampling: Sampling) -> ResponseAnswer:
    return ResponseAnswer(f"resp_{uuid.uuid4().hex}", served.names[0], int(time.time()), body.echoed(sampling))
