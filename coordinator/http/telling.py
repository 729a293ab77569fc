"""Telling: one answer in whatever shape its door has, as a stream of named events or as one object."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.errors import HttpError
from coordinator.http.json_response import JSONResponse
from coordinator.http.served import Served
from coordinator.http.streams import model_stream, named, unless_left
from coordinator.resident.channels import Delta
from coordinator.resident.frontend import Task
from coordinator.resident.model import ResidentModel
from coordinator.resident.several import collect
from worker.errors import InputError

Json = dict[str, Any]


class Shape(Protocol):
    """How one answer is told."""

    def events(self, delta: Delta) -> Iterable[Json]: ...

    def whole(self, deltas: Sequence[Delta]) -> Json: ...


Prepare = Callable[[ResidentModel], Coroutine[Any, Any, tuple[Task, Shape]]]  # raises what is wrong with a request


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Whatever is refused in this block goes by the `names` that a shape has for our own ones."""
    try:
        yield
    except InputError as error:
        raise type(error)(names.get(error.field, error.field), error.message) from error


async def whole_response(request: Request, prepare: Prepare) -> Response:
    """Raises ClientLeft, and what `wake_model`, `prepare` and `ResidentModel.stream` raise."""
    served: Served = request.app.state.served
    model = await unless_left(request, served.wake_model())
    task, shape = await unless_left(request, prepare(model))
    (deltas,) = await unless_left(request, collect(model, [task]))
    return JSONResponse(shape.whole(deltas))


async def streamed_response(
    request: Request, prepare: Prepare, *, tell: Callable[[HttpError], bytes], end: bytes = b""
) -> Response:
    """Raises as `model_stream` does."""

    async def begin(model: ResidentModel) -> AsyncGenerator[bytes, None]:
        return _events(model, *await prepare(model))

    return await model_stream(request, begin, tell=tell, end=end)


async def _events(model: ResidentModel, task: Task, shape: Shape) -> AsyncGenerator[bytes, None]:
    """Nothing before the first step: until then the request may be refused with a status."""
    async with aclosing(model.stream(task)) as deltas:
        async for delta in deltas:
            for event in shape.events(delta):
                yield named(event)
