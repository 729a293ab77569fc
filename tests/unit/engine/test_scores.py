"""Scores: the windows of a long text, and an engine that stays loaded while texts are tokenized."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.engine.scores import TextWindow, score_continuations, windows_of
from coordinator.sessions.request import RequestSpec
from tests.unit.virtual_time import VirtualTime
from worker.errors import InputError
from worker.platform.tasks import Use


def test_each_token_but_the_first_is_scored_once_by_half_a_window_at_least() -> None:
    for size in (2, 3, 8, 9):
        for num_tokens in (2, 7, 8, 9, 50):
            windows = windows_of(num_tokens, size)
            assert [at for window in windows for at in range(window.scored, window.end)] == list(range(1, num_tokens))
            assert all(window.end - window.begin <= size for window in windows)
            assert all(window.scored - window.begin >= size / 2 for window in windows[1:])
    assert windows_of(8, 8) == [TextWindow(0, 1, 8)]


def test_an_engine_is_in_use_while_continuations_are_tokenized(virtual: VirtualTime) -> None:
    async def prompt_ids(text: str, **more: int) -> tuple[int, ...]:
        await asyncio.sleep(20)
        return tuple(map(ord, text))

    async def refuse(spec: RequestSpec) -> None:
        raise InputError("prompt", "refused")

    async def score() -> None:
        inputs = SimpleNamespace(prompt_ids=prompt_ids, spec=SimpleNamespace(context=9))
        engine: Any = SimpleNamespace(inputs=inputs, use=Use(), prepare=refuse)
        unused = asyncio.create_task(engine.use.wait_unused(30))
        with pytest.raises(InputError):
            await score_continuations(engine, "a", ["b", "c", "d"])
        assert not unused.done()
        await unused

    virtual.run(score())
