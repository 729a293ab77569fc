"""A worker whose machine slept leaves its chain by itself, and joins the next one as if it had just been started."""

import asyncio

import pytest

from tests.integration.conftest import Models, answer, opened, receive, serving
from tests.integration.many import until
from worker.errors import StageLost
from worker.platform import machine

PROMPT = (3, 1, 4, 1, 5, 9)


async def test_a_worker_whose_machine_slept_leaves_the_chain_and_is_free(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept_s = 100.0
    monkeypatch.setattr(machine, "asleep_s", lambda: slept_s)
    monkeypatch.setattr(machine, "_LOOK_EVERY_S", 0.01)
    whole = models("qwen3")
    async with serving(2) as nodes:
        async with opened(whole.folder, (1, 2, 1), nodes) as chain:
            expected = (await answer(chain, PROMPT, 5)).tokens
            slept_s += 30
            with pytest.raises(StageLost, match=r"^worker node-[12]: .*(slept for 30 s|ended the hop)"):
                async with asyncio.timeout(60):
                    await receive(chain)
        for node in nodes:
            await until(lambda node=node: not node.service.num_slots)  # type: ignore[misc]
        async with opened(whole.folder, (1, 2, 1), nodes) as chain:
            assert (await answer(chain, PROMPT, 5)).tokens == expected == whole.tokens(PROMPT, 5)
