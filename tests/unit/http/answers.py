"""A model whose answers are written down beforehand."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

from coordinator.resident.channels import Delta
from coordinator.resident.frontend import Task
from coordinator.resident.model import ResidentModel
from coordinator.sessions.answer import Piece, Usage


def task(number: int) -> Task:
    """Told apart from the others by its prompt."""
    return cast(Task, SimpleNamespace(request=SimpleNamespace(prompt=(number,))))


def last(num_reused: int, num_prompt: int = 9) -> Delta:
    """The only delta of an answer."""
    usage = Usage(num_prompt, 0, num_reused, 1, 1, num_generated=1)
    return Delta(Piece("a", (), 0, "stop", usage), "a", finish_reason="stop")


class Finishing:
    """Ends its answers in this order of tasks."""

    def __init__(self, order: Sequence[int]) -> None:
        self._turns = {number: asyncio.Event() for number in order}
        self._order = list(order)
        self._turns[order[0]].set()

    async def stream(self, task: Task, *, traced: bool = False) -> AsyncGenerator[Delta, None]:
        number = task.request.prompt[0]
        await self._turns[number].wait()
        yield last(num_reused=number)
        after = self._order.index(number) + 1
        if after < len(self._order):
            self._turns[self._order[after]].set()


class Scripted:
    """Answers with these deltas."""

    def __init__(self, script: Sequence[Delta]) -> None:
        self._script = script

    async def stream(self, task: Task, *, traced: bool = False) -> AsyncGenerator[Delta, None]:
        for delta in self._script:
            yield delta


def model(fake: Any) -> ResidentModel:
    return cast(ResidentModel, fake)
