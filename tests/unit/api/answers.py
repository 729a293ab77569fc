"""An engine whose answers are written down beforehand."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

from coordinator.engine.engine import Engine
from coordinator.sessions.output import Output, Usage
from coordinator.sessions.request import Request


def task(number: int) -> Request:
    """Told apart from the others by its prompt."""
    return Request((number,), 1)


def last(num_reused: int, num_prompt: int = 9) -> Output:
    """The only output of an answer."""
    usage = Usage(num_prompt, 0, num_reused, 1, 1, num_generated=1)
    return Output("a", (), 0, "stop", usage, content="a")


class FakeEngine:
    """Runs its own `generate` for every request at once; the first failure ends all."""

    def generate(self, request: Any, *, traced: bool = False) -> AsyncGenerator[Output, None]:
        raise NotImplementedError

    async def generate_all(
        self, requests: Sequence[Any], *, traced: bool = False
    ) -> AsyncGenerator[tuple[int, Output], None]:
        queue: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue(maxsize=1)

        async def run(number: int, request: Any) -> None:
            try:
                async with aclosing(self.generate(request, traced=traced)) as outputs:
                    async for output in outputs:
                        await queue.put((number, output))
            except Exception as error:
                await queue.put((number, error))

        running = [asyncio.create_task(run(number, request)) for number, request in enumerate(requests)]
        num_left = len(requests)
        try:
            while num_left:
                number, found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                num_left -= found.finish_reason is not None
                yield number, found
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)


class Finishing(FakeEngine):
    """Ends its answers in this order of requests."""

    def __init__(self, order: Sequence[int]) -> None:
        self._turns = {number: asyncio.Event() for number in order}
        self._order = list(order)
        self._turns[order[0]].set()

    async def generate(self, request: Any, *, traced: bool = False) -> AsyncGenerator[Output, None]:
        number = request.prompt[0]
        await self._turns[number].wait()
        yield last(num_reused=number)
        after = self._order.index(number) + 1
        if after < len(self._order):
            self._turns[self._order[after]].set()


class Scripted(FakeEngine):
    """Answers with these outputs."""

    def __init__(self, script: Sequence[Output]) -> None:
        self._script = script

    async def generate(self, request: Any, *, traced: bool = False) -> AsyncGenerator[Output, None]:
        for output in self._script:
            yield output


def model(fake: Any) -> Engine:
    return cast(Engine, fake)
