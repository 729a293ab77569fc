"""Answers that outgrow the memory of real stages: the newest give way and go on with the tokens that they had alone."""

import asyncio
from dataclasses import replace

import pytest

from coordinator.engine import core
from coordinator.engine.engine import Engine
from coordinator.planning.plan import Plan
from coordinator.sessions import admission
from coordinator.sessions.session import Session
from protos.brigade_pb2 import Cache
from tests.integration.conftest import Models, running
from tests.integration.many import request, tokens_of
from worker.model.model_spec import ModelSpec

ROWS = 256  # by which caches grow
ANSWERS = [request(tokens_of(200 + 9 * i, i), 90, seed=i, temperature=i % 2) for i in range(3)]


def with_room_for_three(plan: Plan, spec: ModelSpec) -> admission.CacheCosts:
    """The costs on stages that have memory for so many small caches."""
    found = admission.cache_costs(plan, spec)
    return replace(found, budgets=tuple(3 * nbytes for nbytes in found.bytes_of(Cache(), ROWS)))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
async def test_streams_that_gave_way_are_as_alone(models: Models, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Qwen3.5 has recurrent states, which cannot be cut."""
    preempted: list[Session] = []
    begun: list[bool] = []
    preempt = Session.preempt

    def noted(session: Session) -> None:
        preempted.append(session)
        preempt(session)
        begun.append(engine.has_begun([session.request]))

    async with running(models(family).folder, (1, 3)) as chain:
        monkeypatch.setattr(core, "cache_costs", with_room_for_three)
        monkeypatch.setattr(Session, "preempt", noted)
        for name, tokens in (("_GROWTH", 48), ("_LOW", 32), ("LARGEST_WINDOW", 16)):
            monkeypatch.setattr(admission, name, tokens)
        async with Engine(chain) as engine:
            found = await asyncio.gather(*(engine.answer(each, chunk=64) for each in ANSWERS))
    alone = [models(family).tokens(each.prompt, each.max_tokens, each.sampling) for each in ANSWERS]
    assert [each.tokens for each in found] == alone
    assert preempted and preempted[0].num_prompt > len(ANSWERS[0].prompt), "the oldest goes on"
    assert all(begun), "one that waits for memory again is not refused any more"
