"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's shape."""

import uuid

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.http.reading import read_body
from coordinator.http.served import Served
from coordinator.http.streams import named
from coordinator.http.telling import naming, streamed_response, whole_response
from coordinator.shapes.anthropic_answer import MessageAnswer, error_object
from coordinator.shapes.anthropic_messages import CountBody, MessagesBody

_NAMES = {"prompt": "messages", "stop": "stop_sequences"}


async def messages(request: Request) -> Response:
    served: Served = request.app.state.served
    body = await read_body(request, MessagesBody, served.limits.body_bytes)
    served.require_name(body.model)
    model = served.require_model()
    ask = body.ask()
    with naming(_NAMES):
        task = await model.prepare(ask)
    answer = MessageAnswer(
        f"msg_{uuid.uuid4().hex}", served.names[0], len(task.request.prompt), is_parallel=body.is_parallel
    )
    if not body.stream:
        return await whole_response(request, model, task, answer)
    request_id = request.state.request_id
    return await streamed_response(
        request, model, task, answer, tell=lambda error: named(error_object(error.status, error.message, request_id))
    )


async def count_tokens(request: Request) -> Response:
    """Told while the model is still being loaded as well, and of prompts that are too long."""
    served: Served = request.app.state.served
    body = await read_body(request, CountBody, served.limits.body_bytes)
    served.require_name(body.model)
    conversation = body.conversation()
    with naming(_NAMES):
        prompt = await served.frontend.prompt_ids(conversation)
    return JSONResponse({"input_tokens": len(prompt)})
