"""Several answers to one prompt, merged as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from coordinator.resident.channels import Delta
from coordinator.resident.frontend import Task
from coordinator.resident.model import ResidentModel

Numbered = tuple[int, Delta]


async def merged(
    model: ResidentModel, tasks: Sequence[Task], *, traced: bool = False
) -> AsyncGenerator[Numbered, None]:
    """Every answer's deltas, with the answer's number. The others begin once the first has fed the prompt they share.

    Raises:
        What the first answer that fails raises; the others end with it, as they do when the iterator is closed.
    """
    queue: asyncio.Queue[Numbered | BaseException] = asyncio.Queue(maxsize=len(tasks))
    running = [asyncio.create_task(_run(model, tasks[0], 0, queue, traced))]
    num_left = len(tasks)
    try:
        while num_left:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if len(running) < len(tasks):
                others = enumerate(tasks[1:], 1)
                running += [asyncio.create_task(_run(model, task, number, queue, traced)) for number, task in others]
            num_left -= found[1].finish_reason is not None
            yield found
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def collect(model: ResidentModel, tasks: Sequence[Task], *, traced: bool = False) -> list[list[Delta]]:
    """All deltas of each answer."""
    answers: list[list[Delta]] = [[] for _ in tasks]
    async with aclosing(merged(model, tasks, traced=traced)) as deltas:
        async for number, delta in deltas:
            answers[number].append(delta)
    return answers


async def _run(
    model: ResidentModel, task: Task, number: int, queue: "asyncio.Queue[Numbered | BaseException]", traced: bool
) -> None:
    try:
        async with aclosing(model.stream(task, traced=traced)) as deltas:
            async for delta in deltas:
                await queue.put((number, delta))
    except Exception as error:
        await queue.put(error)
