"""`POST /v1/chat/completions`."""

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.choices import figures, tell
from coordinator.http.json_response import JSONResponse
from coordinator.http.reading import read_body
from coordinator.http.served import Served
from coordinator.http.streams import DONE, data, model_stream, unless_left
from coordinator.resident.channels import Delta
from coordinator.resident.frontend import Task
from coordinator.resident.model import ResidentModel
from coordinator.resident.several import collect, merged
from coordinator.shapes.openai_chat import ChatAnswer, ChatBody
from coordinator.shapes.openai_tasks import prepare_chat


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, at once or as a stream of events."""
    served: Served = request.app.state.served
    body = await read_body(request, ChatBody, served.limits.body_bytes)
    served.require_name(body.model)

    async def begin(model: ResidentModel) -> AsyncGenerator[bytes, None]:
        return _events(model, *await prepare_chat(model, served.names[0], body), body)

    if body.stream:
        return await model_stream(request, begin, tell=tell, end=DONE)
    model = await unless_left(request, served.wake_model())
    tasks, answer = await unless_left(request, prepare_chat(model, served.names[0], body))
    choices = await unless_left(request, collect(model, tasks, traced=body.wants_waterfall))
    return JSONResponse(answer.whole(choices) | {"brigade": figures([deltas[-1] for deltas in choices])})


async def _events(
    model: ResidentModel, tasks: Sequence[Task], answer: ChatAnswer, body: ChatBody
) -> AsyncGenerator[bytes, None]:
    lasts: dict[int, Delta] = {}
    num_calls: Counter[int] = Counter()
    opened: set[int] = set()
    async with aclosing(merged(model, tasks, traced=body.wants_waterfall)) as deltas:
        async for index, delta in deltas:
            if index not in opened:  # not before it is served: it may be refused until then
                opened.add(index)
                yield data(answer.opening(index))
            chunk = answer.chunk(index, delta, num_calls[index])
            if body.wants_fills and delta.piece.fills:
                chunk = answer.filled(index, delta, chunk)
            if chunk:
                yield data(chunk)
            num_calls[index] += len(delta.tool_calls)
            if delta.finish_reason is not None:
                lasts[index] = delta
    if body.stream_options.include_usage:
        in_order = [lasts[index] for index in range(len(tasks))]  # not that of finishing
        yield data(answer.closing(in_order) | {"brigade": figures(in_order)})
