"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's shape."""

import uuid

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.json_response import JSONResponse
from coordinator.http.reading import read_body
from coordinator.http.refusals import error_object
from coordinator.http.served import Served
from coordinator.http.streams import named, unless_left
from coordinator.http.telling import naming, streamed_response, whole_response
from coordinator.resident.frontend import Task
from coordinator.resident.model import ResidentModel
from coordinator.shapes.anthropic_answer import MessageAnswer
from coordinator.shapes.anthropic_messages import CountBody, MessagesBody

_NAMES = {"prompt": "messages", "response_format": "output_config.format", "stop": "stop_sequences"}


async def messages(request: Request) -> Response:
    """Answer a conversation as Anthropic's API does."""
    served: Served = request.app.state.served
    body = await read_body(request, MessagesBody, served.limits.body_bytes)
    served.require_name(body.model)

    async def prepare(model: ResidentModel) -> tuple[Task, MessageAnswer]:
        with naming(_NAMES):
            task = await model.prepare(body.ask())
        return task, MessageAnswer(f"msg_{uuid.uuid4().hex}", served.names[0], len(task.request.prompt))

    if not body.stream:
        return await whole_response(request, prepare)
    request_id = request.state.request_id
    return await streamed_response(
        request, prepare, tell=lambda error: named(error_object(error.status, error.message, request_id))
    )


async def count_tokens(request: Request) -> Response:
    """Told while the model is still being loaded as well, and of prompts that are too long."""
    served: Served = request.app.state.served
    body = await read_body(request, CountBody, served.limits.body_bytes)
    served.require_name(body.model)
    with naming(_NAMES):
        prompt = await unless_left(request, served.frontend.prompt_ids(body.conversation()))
    return JSONResponse({"input_tokens": len(prompt)})
