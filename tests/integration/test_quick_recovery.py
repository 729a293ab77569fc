"""What a recovery leaves out while a reader waits: measuring anew what is known, waiting for who is not awaited."""

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.nodes import ClusterNode, Nodes
from coordinator.planning.costs import ChainCosts
from tests.integration.conftest import Models
from tests.integration.many import Frames, Live, frames, request, tokens_of, until
from tests.integration.test_recovery import COMES_BACK, IS_GONE, lose, supervised
from tests.integration.windows import MASKED
from worker.errors import NodeSilent

__all__ = ["frames"]
LONG = request(tokens_of(60), 40)


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    return models("qwen3", **MASKED).folder


def warm_up_rows(frames: Frames, epoch: int) -> list[int]:
    """Of the frames before any of a session: theirs begin with step 0 and end with the one that closes the slot."""
    own = [frame for frame in frames if frame.epoch == epoch]
    end = next(number for number, frame in enumerate(own) if frame.closed)
    return [len(window.tokens) for frame in own[:end] for window in frame.windows]


async def test_while_a_request_waits_the_new_chain_knows_what_the_lost_one_knew(folder: Path, frames: Frames) -> None:
    async with supervised(folder, COMES_BACK) as rig, rig.engine() as engine:
        costs = rig.cluster.chain.costs
        live = Live(engine, LONG)
        await live.wait_pieces(3)
        await lose(rig, 1, comes_back=True)
        await live.answer()
        assert rig.cluster.chain.costs is costs
    assert warm_up_rows(frames, 1) == [64, 64, 1, 1]
    assert warm_up_rows(frames, 2) == [1]


async def test_a_chain_without_the_lost_node_waits_for_no_rejoin_and_measures_anew(
    folder: Path, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Collection[str]] = []
    ask = Nodes.ask

    async def note(nodes: Nodes, names: Collection[str], within_s: float) -> None:
        if rig.cluster.trouble:  # there is no chain
            asked.append(set(names))
        await ask(nodes, names, within_s)

    async with supervised(folder, IS_GONE) as rig, rig.engine() as engine:
        monkeypatch.setattr(Nodes, "ask", note)
        costs = rig.cluster.chain.costs
        live = Live(engine, LONG)
        await live.wait_pieces(3)
        await lose(rig, 1, comes_back=False)
        await live.answer()
        assert rig.cluster.chain.costs is not costs
    assert {*map(frozenset, asked)} == {frozenset({"node-1"})}  # again if loading takes long
    assert warm_up_rows(frames, 2) == [64, 64, 1, 1]


async def test_a_chain_that_no_request_waits_for_measures_anew(folder: Path, frames: Frames) -> None:
    async with supervised(folder, COMES_BACK) as rig, rig.engine():
        await lose(rig, 1, comes_back=True)
        await until(lambda: rig.cluster.num_recoveries)
    assert warm_up_rows(frames, 2) == [64, 64, 1, 1]


async def test_chunks_of_the_replay_are_chosen_for_all_that_is_replayed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the prompt alone: an answer may be much longer."""
    asked: list[int] = []

    def choose(costs: ChainCosts, num_unfed: int, *, beside_streams: bool) -> int:
        asked.append(num_unfed)
        return 32

    monkeypatch.setattr(ChainCosts, "chunk_size", choose)
    async with supervised(folder, COMES_BACK) as rig, rig.engine() as engine:
        num_known = 0
        async with contextlib.aclosing(engine.generate(request(tokens_of(5), 60))) as pieces:
            async for piece in pieces:
                num_known += len(piece.tokens)
                if num_known == 40:
                    await lose(rig, 1, comes_back=True)
    assert asked[0] == 5 and asked[1] >= 45


async def test_a_worker_of_our_own_that_is_silent_is_ended_before_anybody_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    ask = Nodes.ask

    async def note(nodes: Nodes, *arguments: Any) -> None:
        done.append("asked")
        await ask(nodes, *arguments)

    async with supervised(folder, COMES_BACK) as rig:
        monkeypatch.setattr(Nodes, "ask", note)
        monkeypatch.setattr(ClusterNode, "kill", lambda worker: done.append(worker.name))
        await rig.cluster.reopen(NodeSilent("stopped answering", node="node-2"))
    assert done[:2] == ["node-2", "asked"]
