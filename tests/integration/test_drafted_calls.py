"""Answers that must call tools, with drafts: a grammar that begins in the middle of an answer masks them as well."""

from pathlib import Path

import pytest

from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine
from coordinator.engine.inputs import InputProcessor
from coordinator.sessions.output import Output
from coordinator.sessions.request import RequestSpec
from tests.cluster.callers import make_caller
from tests.integration.conftest import running
from tests.integration.test_forced_calls import FORCED, ask


@pytest.mark.parametrize(("thinks", "seed"), [(False, 0), (True, 3)])
async def test_drafts_of_a_forced_call_change_no_token_and_hold(thinks: bool, seed: int, tmp_path: Path) -> None:
    """The drafter is the model, so all drafts hold where the grammar masks them as it masks the tokens."""
    folder = make_caller(tmp_path / "caller", thinks=thinks)
    inputs = await InputProcessor.read(cluster_options(None, str(folder), draft_model=str(folder)))
    async with running(folder, (1, 3), drafter=folder) as chain, Engine(chain, inputs=inputs) as engine:

        async def outputs(spec: RequestSpec) -> list[Output]:
            return [output async for output in engine.generate(await inputs.make_request(spec))]

        expected = await outputs(ask(seed, calls=FORCED, decode=Decode("ar")))
        tokens = [token for output in expected for token in output.tokens]
        for count in (3, 15):
            found = await outputs(ask(seed, calls=FORCED, decode=Decode("draft", num_drafts=count)))
            assert [token for output in found for token in output.tokens] == tokens, count
            assert found[-1].finish_reason == expected[-1].finish_reason == "tool_calls"
            assert found[-1].num_steps <= 2 + len(tokens) // (count + 1), count
