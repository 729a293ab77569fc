"""What a session chooses windows by, once its chain was replaced by one with other costs."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import tests.unit.cluster.fake_network as network
from coordinator.decoding.decode_options import Decode
from coordinator.decoding.decoders import Proposal, Verified
from coordinator.engine.engine import Engine
from coordinator.planning.costs import ChainCosts
from coordinator.sessions.request import Request
from tests.unit.engine.test_engine import STEP_S, WIDE, Chains, asked, expected, lose, run
from tests.unit.virtual_time import VirtualTime
from worker.errors import StageLost


def test_a_session_chooses_by_the_costs_of_the_chain_on_which_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[ChainCosts] = []

    class Noting(Verified):
        def __init__(self, costs: ChainCosts) -> None:
            super().__init__()
            self._costs = costs

        def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int = 1) -> Proposal:
            used.append(self._costs)
            return super().propose(tokens, num_unfed, room, num_together)

    monkeypatch.setattr(network, "STEP_S", STEP_S)
    monkeypatch.setattr(Decode, "make_decoder", lambda decode, eos, costs, *_, **__: Noting(costs))
    request = Request((4, 5), 30)

    async def work(engine: Engine) -> None:
        [task], chains = asked(engine, request), [engine.chain]
        while len(used) < 5:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(STEP_S)
        await lose(engine, StageLost("closed", node="a"))
        chains.append(engine.chain)
        assert await task == expected(request)
        assert list(dict.fromkeys(map(id, used))) == [id(chain.costs) for chain in chains]

    clock: Any = VirtualTime()
    run(clock, Chains(WIDE), work)
    assert not clock.close()
