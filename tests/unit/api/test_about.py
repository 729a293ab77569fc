import asyncio
from types import SimpleNamespace

import pytest

from coordinator.api import server
from coordinator.api.app import make_app
from coordinator.engine.engine import ServerState, ServerStatus
from tests.unit.api import answers
from tests.unit.api.servers import ask, served


class Stuck:
    """No token comes back from the stages; or, where it `is_deaf`, nothing is tokenized."""

    status = ServerStatus(ServerState.READY)

    def __init__(self, *, is_deaf: bool = False) -> None:
        self.is_deaf = is_deaf
        self.num_sent = 0
        self.inputs = SimpleNamespace(token_texts=self.token_texts)

    async def token_texts(self, tokens: list[int]) -> list[str]:
        if self.is_deaf:
            await asyncio.get_running_loop().create_future()
        return [""]

    async def probe(self) -> None:
        self.num_sent += 1
        if not self.is_deaf:
            await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_deep_look_goes_the_way_of_requests_and_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, *, is_deaf: bool
) -> None:
    monkeypatch.setattr(server, "_DEEP_S", 0.02)
    app = make_app(served(model=answers.model(Stuck(is_deaf=is_deaf))))
    found = ask(app, "GET", "/health?deep=1")
    assert (found.status_code, found.headers["retry-after"]) == (503, "5")
    assert found.json()["error"]["code"] == "too_slow"
    assert ask(app, "GET", "/live").status_code == 200


def test_one_deep_look_is_taken_at_a_time() -> None:
    async def looked() -> int:
        stuck = Stuck()
        shared = served(model=answers.model(stuck))
        looks = [asyncio.ensure_future(shared.probe()) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
        return stuck.num_sent

    assert asyncio.run(looked()) == 1
