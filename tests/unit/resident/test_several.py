"""Several answers at once: what becomes of the others where one fails."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from coordinator.resident.channels import Delta
from coordinator.resident.frontend import Task
from coordinator.resident.several import merged
from tests.unit.http import answers
from worker.errors import StageLost


class Failing:
    """Fails in the last of its answers, while all others go on."""

    def __init__(self, error: Exception, last: int) -> None:
        self._error = error
        self._last = last
        self.num_open = 0

    async def stream(self, task: Task, *, traced: bool = False) -> AsyncGenerator[Delta, None]:
        self.num_open += 1
        try:
            if task.request.prompt[0] == self._last:
                raise self._error
            await asyncio.Event().wait()
            yield answers.last(num_reused=0)
        finally:
            self.num_open -= 1


@pytest.mark.parametrize("error", [StageLost("gone"), ZeroDivisionError("a bug")], ids=["a failure", "a bug"])
def test_whatever_ends_one_answer_is_raised_and_ends_the_others(error: Exception) -> None:
    fake = Failing(error, last=2)

    async def told() -> None:
        with pytest.raises(type(error)) as raised:
            async for _ in merged(answers.model(fake), [answers.task(number) for number in range(3)]):
                pass
        assert raised.value is error and not fake.num_open

    asyncio.run(asyncio.wait_for(told(), 10))
