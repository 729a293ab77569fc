"""`brigade bridge` over an engine that never ends an answer, or refuses its prompt."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.cli.bridge import Bridge
from coordinator.engine.engine import Engine
from coordinator.sessions.output import Output, Token
from coordinator.sessions.request import RequestSpec
from tests.unit.virtual_time import VirtualTime
from worker.errors import InputError

ASKED: dict[str, Any] = {"id": "a", "op": "generate", "prompt": "Hi"}
QUIT = {"id": "q", "op": "quit"}


class Endless:
    """Stands for an engine whose answers go on."""

    inputs = SimpleNamespace(has_chat_template=True)

    async def prepare(self, spec: RequestSpec) -> None:
        pass

    async def generate(self, request: None) -> AsyncGenerator[Output, None]:
        while True:
            yield Output("a", [Token(1)], 0)

    async def wait_failed(self) -> None:
        await asyncio.Event().wait()


class Refusing(Endless):
    async def prepare(self, spec: RequestSpec) -> None:
        raise InputError("prompt.1", "no")


async def open_input(*lines: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    for line in lines:
        yield json.dumps(line).encode()
    await asyncio.Event().wait()


@pytest.mark.parametrize(("lines", "seconds"), [((ASKED,), 2), ((ASKED, QUIT), 0)])
def test_a_signal_ends_it_while_its_output_is_not_read_and_quit_waits(lines: Any, seconds: float) -> None:
    clock = VirtualTime()

    async def never(line: Any) -> None:
        await asyncio.Event().wait()

    async def run() -> float:
        async with aclosing(open_input(*lines)) as given:
            bridge = asyncio.create_task(Bridge(cast(Engine, Endless()), never).run(given))
            await asyncio.sleep(60)
            assert not bridge.done()
            began = clock.now
            bridge.cancel()
            await asyncio.wait([bridge], timeout=60)
            return clock.now - began

    assert clock.run(run()) == pytest.approx(seconds)
    assert not clock.close()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (ASKED, "prompt.1"),
        (ASKED | {"prompt": None, "prompt_tokens": [1]}, "prompt_tokens.1"),
        ({"id": "a", "op": "chat", "messages": [{"role": "user", "content": "Hi"}]}, "messages.1"),
    ],
)
async def test_a_prompt_that_is_refused_has_the_name_of_its_field(asked: Any, field: str) -> None:
    written: list[Any] = []

    async def write(line: Any) -> None:
        written.append(line)

    await Bridge(cast(Engine, Refusing()), write).run(open_input(asked, QUIT))
    assert [line["error"]["field"] for line in written] == [field]
