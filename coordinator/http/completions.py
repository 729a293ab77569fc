"""`POST /v1/completions`: raw prompts, several at once."""

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
from coordinator.shapes.openai_completions import CompletionAnswer, CompletionBody
from coordinator.shapes.openai_tasks import prepare_completions


async def completions(request: Request) -> Response:
    """Go on from texts or token ids as they stand, at once or as a stream of events."""
    served: Served = request.app.state.served
    body = await read_body(request, CompletionBody, served.limits.body_bytes)
    served.require_name(body.model)

    async def begin(model: ResidentModel) -> AsyncGenerator[bytes, None]:
        return _events(model, *await prepare_completions(model, served.names[0], body), body)

    if body.stream:
        return await model_stream(request, begin, tell=tell, end=DONE)
    model = await unless_left(request, served.wake_model())
    tasks, answer = await unless_left(request, prepare_completions(model, served.names[0], body))
    answers = await unless_left(request, collect(model, tasks, traced=body.wants_waterfall))
    return JSONResponse(answer.whole(answers) | {"brigade": figures([deltas[-1] for deltas in answers])})


async def _events(
    model: ResidentModel, tasks: Sequence[Task], answer: CompletionAnswer, body: CompletionBody
) -> AsyncGenerator[bytes, None]:
    lasts: dict[int, Delta] = {}
    opened: set[int] = set()
    async with aclosing(merged(model, tasks, traced=body.wants_waterfall)) as deltas:
        async for index, delta in deltas:
            if index not in opened:
                opened.add(index)
                if opening := answer.opening(index):
                    yield data(opening)
            if chunk := answer.chunk(index, delta):
                yield data(chunk)
            if delta.finish_reason is not None:
                lasts[index] = delta
    if body.stream_options.include_usage:
        yield data(answer.closing(lasts) | {"brigade": figures([lasts[index] for index in range(len(lasts))])})
