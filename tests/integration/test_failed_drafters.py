"""A drafter that fails in a step: the tokens stay those of `ar`, and nothing is spent on drafts any more."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment, OwnNode
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import generate_once
from coordinator.planning.plan import Node
from coordinator.planning.planner import Objective, plan
from coordinator.planning.speeds import NO_SPEEDS
from protos.brigade_pb2 import Frame
from tests.integration.conftest import Models, opened, opened_folder, serving
from tests.integration.many import request, tokens_of, until
from worker.drafters.small_model import SmallModel

DRAFT = Decode("draft", num_drafts=3)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The drafts that frames ask for, in turn."""
    found, send = list[int](), Chain.send

    def note(chain: Chain, frame: Frame) -> None:
        found.extend(window.drafts for window in frame.windows)
        send(chain, frame)

    monkeypatch.setattr(Chain, "send", note)
    return found


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def fail(*_: Any) -> None:
        raise ValueError("[broadcast_shapes] Shapes cannot be broadcast")

    monkeypatch.setattr(SmallModel, "draft", fail)
    return monkeypatch


async def tokens_by(chain: Chain, decode: Decode) -> list[int]:
    return (await generate_once(chain, request(tokens_of(9), 20, decode))).tokens


async def test_its_weights_go_and_the_next_chain_drafts(
    models: Models, failing: pytest.MonkeyPatch, asked: list[int]
) -> None:
    folder = models("qwen3", sharpen=4.0).folder
    async with serving(1) as nodes:
        async with opened(folder, (1, 3), nodes, drafter=folder) as chain:
            expected, layers = await tokens_by(chain, Decode("ar")), chain.plan.assignments[1].weight_bytes
            drafter = (await chain.statuses())[1].weight_bytes - nodes[0].service.worker.shard.nbytes  # type: ignore[union-attr]
            assert await tokens_by(chain, DRAFT) == expected
            asked.clear()
            assert await tokens_by(chain, DRAFT) == expected
            assert chain.most_drafts == 0 and not any(asked)
            assert (await chain.statuses())[1].weight_bytes == layers - drafter
        await until(lambda: not nodes[0].service.worker.attachment)
        assert nodes[0].service.worker.status().weight_bytes == layers - drafter
        failing.undo()
        async with opened(folder, (1, 3), nodes, drafter=folder) as chain:
            assert (await generate_once(chain, request(tokens_of(9), 20, DRAFT))).usage.num_steps < 10


async def test_the_coordinator_frees_it_too_and_says_why_it_failed(models: Models, failing: pytest.MonkeyPatch) -> None:
    folder, lines = models("qwen3", sharpen=4.0).folder, list[str]()
    checkpoint, spec = opened_folder(folder, Path(folder))
    whole = plan(spec, [Node("coordinator", 1 << 40)], NO_SPEEDS, Objective(128))
    deployment = Deployment(checkpoint, spec, whole, [])
    async with OwnNode() as own, Chain(own, deployment, say=lines.append) as chain:
        await own.load(deployment)
        await chain.open()
        assert own.part is not None
        for _ in range(2):
            await tokens_by(chain, DRAFT)
        assert own.part is None and own.shard is not None and chain.most_drafts == 0
        assert chain.own_status is not None and chain.own_status.weight_bytes == own.shard.nbytes
    assert lines == [
        "the drafter failed; the chain goes on without drafts: ValueError: "
        "[broadcast_shapes] Shapes cannot be broadcast"
    ]
