"""What the user hears of nodes that the chain is without."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.lookout import Lookout
from protos.brigade_pb2 import HelloReply
from tests.unit.virtual_time import VirtualTime


class FakeRoster(SimpleNamespace):
    async def ask(self, within_s: float, names: set[str]) -> dict[str, HelloReply]:
        self.asked.append(names)
        if self.error:
            raise self.error
        return {name: HelloReply(incarnation=f"{name}1") for name in names}


@pytest.mark.parametrize(
    ("error", "useless", "said"),
    [
        (None, set(), ["worker b is there again; it joins once nothing is under way"]),
        (None, {"b1"}, []),
        (KeyError("b"), set(), ["internal error: KeyError('b')"]),
    ],
    ids=["there again", "useless", "a bug"],
)
def test_what_is_said_of_an_absent_node(error: Exception | None, useless: set[str], said: list[str]) -> None:
    lines: list[str] = []
    roster: Any = FakeRoster(error=error, asked=[], members={"a": None, "b": None})

    async def look() -> None:
        lookout = Lookout(roster, useless, lines.append, lambda name: False)
        lookout.start({"a"}, lambda: True)
        await asyncio.sleep(5)
        await lookout.stop()

    time = VirtualTime()
    time.run(look())
    assert not time.close()
    assert [line.partition(" at ")[0] for line in lines] == said and roster.asked[0] == {"b"}


def test_a_node_that_is_there_again_joins_as_soon_as_it_may_and_once() -> None:
    roster: Any = FakeRoster(error=None, asked=[], members={"a": None, "b": None})
    answers = iter([False, False, True])
    joined: list[tuple[str, float]] = []

    async def look() -> None:
        def join(name: str) -> bool:
            joined.append((name, asyncio.get_running_loop().time() - began))
            return next(answers)

        began = asyncio.get_running_loop().time()
        lookout = Lookout(roster, set(), lambda line: None, join)
        lookout.start({"a"}, lambda: True)
        await asyncio.sleep(20)
        await lookout.stop()

    time = VirtualTime()
    time.run(look())
    assert not time.close()
    assert [(name, round(at)) for name, at in joined] == [("b", 4), ("b", 6), ("b", 8)]
