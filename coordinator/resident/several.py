"""Several answers to one prompt, merged as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from coordinator.resident.ask import Ask
from coordinator.resident.channels import Delta
from coordinator.resident.frontend import Task
from coordinator.resident.model import ResidentModel
from protos.brigade_pb2 import Sampling

Numbered = tuple[int, Delta]


async def prepare_choices(model: ResidentModel, ask: Ask, n: int) -> list[Task]:
    """`n` tasks of one ask. The seed counts up: answers differ, and can be had again where it was given."""
    first = await model.prepare(ask)
    return [first, *(_with_other_seed(first, k) for k in range(1, n))]


def _with_other_seed(task: Task, k: int) -> Task:
    sampling = Sampling()
    sampling.CopyFrom(task.request.sampling)
    sampling.seed = (sampling.seed + k) % 2**64
    return replace(task, request=replace(task.request, sampling=sampling))


async def merged(
    model: ResidentModel, tasks: Sequence[Task], *, traced: bool = False
) -> AsyncGenerator[Numbered, None]:
    """Every answer's deltas, with the answer's number.

    Of those that share a prompt the first one feeds it; the others begin once it has.

    Raises:
        What the first answer that fails raises; the others end with it, as they do when the iterator is closed.
    """
    queue: asyncio.Queue[Numbered | BaseException] = asyncio.Queue(maxsize=len(tasks))
    together = _by_prompt(tasks)
    running = [asyncio.create_task(_run(model, tasks[first], first, queue, traced)) for first in together]
    num_left = len(tasks)
    try:
        while num_left:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            others = together.pop(found[0], ())
            running += [asyncio.create_task(_run(model, tasks[number], number, queue, traced)) for number in others]
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


def _by_prompt(tasks: Sequence[Task]) -> dict[int, list[int]]:
    """The first task of each prompt, and the others that have the same one; by their numbers."""
    firsts: dict[tuple[int, ...], int] = {}
    found: dict[int, list[int]] = {}
    for number, task in enumerate(tasks):
        first = firsts.setdefault(task.request.prompt, number)
        if first == number:
            found[number] = []
        else:
            found[first].append(number)
    return found


async def _run(
    model: ResidentModel, task: Task, number: int, queue: "asyncio.Queue[Numbered | BaseException]", traced: bool
) -> None:
    try:
        async with aclosing(model.stream(task, traced=traced)) as deltas:
            async for delta in deltas:
                await queue.put((number, delta))
    except Exception as error:
        await queue.put(error)
