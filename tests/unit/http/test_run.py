import asyncio
from typing import Any

import pytest
import uvicorn

from coordinator.http.listen import answering, listening
from coordinator.http.run import Serving, _is_stopped
from tests.unit.http import answers
from tests.unit.http.servers import app


class Busy:
    """Answers for ever, until it is drained."""

    def __init__(self) -> None:
        self.is_drained = False

    async def wait_failed(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def drain(self, within_s: float) -> bool:
        self.is_drained = True
        return True


def test_a_server_that_can_listen_no_more_does_not_wait_for_answers_that_nobody_gets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def failed(self: uvicorn.Server, sockets: Any = None) -> None:
        raise OSError("no more files")

    monkeypatch.setattr(uvicorn.Server, "serve", failed)
    busy = Busy()

    async def served() -> None:
        with listening("127.0.0.1", 0) as listener:
            async with answering(app(), listener, None) as running:
                await _is_stopped(answers.model(busy), Serving("127.0.0.1", 0), running)

    with pytest.raises(OSError, match="no more files"):
        asyncio.run(served())
    assert not busy.is_drained and "stopping" not in capsys.readouterr().err


def test_a_server_that_is_told_to_stop_lets_answers_end() -> None:
    busy = Busy()

    async def served() -> bool:
        answering = asyncio.create_task(asyncio.Event().wait())
        stopped = asyncio.create_task(_is_stopped(answers.model(busy), Serving("127.0.0.1", 0), answering))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        stopped.cancel()
        found = await stopped
        answering.cancel()
        return found

    assert asyncio.run(served()) and busy.is_drained
