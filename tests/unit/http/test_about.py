import asyncio

import pytest

from coordinator.http import about
from coordinator.http.app import make_app
from coordinator.resident.model import Standing, State
from tests.unit.http import answers
from tests.unit.http.servers import ask, served


class Stuck:
    """No token comes back."""

    standing = Standing(State.READY)

    def __init__(self) -> None:
        self.num_sent = 0

    async def look(self) -> None:
        self.num_sent += 1
        await asyncio.get_running_loop().create_future()


def test_a_deep_look_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(about, "_DEEP_S", 0.02)
    app = make_app(served(model=answers.model(Stuck())))
    found = ask(app, "GET", "/health?deep=1")
    assert (found.status_code, found.headers["retry-after"]) == (503, "5")
    assert found.json()["error"]["code"] == "too_slow"


def test_one_deep_look_is_taken_at_a_time() -> None:
    async def looked() -> int:
        stuck = Stuck()
        shared = served(model=answers.model(stuck))
        looks = [asyncio.ensure_future(about._send_token(shared)) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
        return stuck.num_sent

    assert asyncio.run(looked()) == 1
