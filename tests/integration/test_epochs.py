"""Chains of one epoch after another: which results they take, and how long they wait for a step.

A node that is merely slow stays in the chain: tests/unit/cluster/test_flight.py.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment, OwnCopy, OwnNode, load_worker
from coordinator.engine.engine import Engine
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Frame, Opening, Result, StatusReply
from tests.integration.conftest import (
    Models,
    RunningNode,
    Whole,
    answer,
    deployed,
    opened,
    receive,
    running,
    send,
    serving,
)
from tests.integration.many import Live, request, tokens_of, until
from tests.integration.upstream import window_of
from worker.errors import BrigadeError, EngineHung, FrameError, StageLost
from worker.platform import machine

Held = Callable[[], None]
ROW = Frame(epoch=1, step=51, windows=[window_of(tokens_of(1), 0)])  # as the warm-up had some


@dataclass
class Cluster:
    """Loaded nodes, and the chains that were opened over them."""

    own: OwnNode
    deployment: Deployment
    stack: AsyncExitStack
    nodes: list[RunningNode]
    epoch: int = 0

    async def open(self, error: BrigadeError | None = None) -> Chain:
        """The next epoch's chain, once the last one is closed."""
        await self.stack.aclose()
        self.epoch += 1
        chain = Chain(self.own, self.deployment, self.epoch)
        await self.stack.enter_async_context(chain)
        await chain.open()
        return chain


@asynccontextmanager
async def loaded(folder: Path, layers: Sequence[int], drafter: Path | None = None) -> AsyncIterator[Cluster]:
    async with (
        serving(len(layers) - 1) as nodes,
        deployed(folder, layers, nodes, drafter=drafter) as deployment,
        OwnNode() as own,
        AsyncExitStack() as chains,
    ):
        known = await OwnCopy.of(deployment.checkpoint)
        workers = (load_worker(deployment, at, known, lambda node, report: None) for at in range(1, len(layers)))
        await asyncio.gather(own.load(deployment), *workers)
        yield Cluster(own, deployment, chains, nodes)


async def answer_over_a_loss(
    folder: Path, layers: Sequence[int], asked: Request, lost_at: int, drafter: Path | None = None
) -> Answer:
    """The answer to a request whose chain is lost once it has so many tokens."""
    async with (
        loaded(folder, layers, drafter) as cluster,
        Engine(await cluster.open(), when_lost=cluster.open) as engine,
    ):
        found, first = Answer(), engine.chain
        async for output in engine.generate(asked):
            found.add(output)
            if engine.chain is first and len(found.tokens) >= lost_at:
                first.end(StageLost("is gone"))
    assert found.usage.num_recoveries == 1
    return found


async def test_requests_fail_if_no_chain_can_be_opened_again(folder: Path) -> None:
    async def give_up(error: BrigadeError) -> Chain:
        raise StageLost("nobody is left") from error

    async with loaded(folder, (2, 2)) as cluster, Engine(await cluster.open(), when_lost=give_up) as engine:
        live = [Live(engine, request(tokens_of(5, i), 300)) for i in range(3)]
        await live[-1].wait_pieces(2)
        cluster.deployment.peers[0].detach()
        outcomes = await asyncio.gather(*(each.task for each in live), return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["nobody is left"] * 3
        assert len({id(outcome) for outcome in outcomes}) == 3, "each has its own, with its own traceback"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda result: setattr(result, "epoch", 7),
        lambda result: setattr(result, "step", 999),
        lambda result: result.timings.pop(),
        lambda result: result.timings.add(stage=2),
    ],
    ids=["epoch", "step", "a timing less", "a timing more"],
)
async def test_a_result_that_answers_nothing_that_was_asked_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Result], object]
) -> None:
    async with running(folder, (2, 2)) as chain:
        stage = chain.stage
        assert stage is not None
        next_result = stage.next_result

        async def spoiled() -> Result:
            result = await next_result()
            spoil(result)
            return result

        monkeypatch.setattr(stage, "next_result", spoiled)
        await send(chain, Frame(epoch=chain.epoch, step=50, closed=[3]))
        with pytest.raises(FrameError, match=r"^worker node-1: expected a result of a step in flight"):
            await receive(chain)


@asynccontextmanager
async def hasty(models: Models, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> AsyncIterator[tuple[Chain, Held]]:
    """A chain of two nodes that waits for tenths of seconds, with a slot open; its worker computes once let go.

    It waits so briefly only once it is open, and for answers to questions as long as it takes.
    """
    monkeypatch.setattr("coordinator.cluster.step_timeouts.ASK_AGAIN_S", 0.05)
    monkeypatch.setattr("coordinator.cluster.chain.PROBE_S", 30.0)
    release = threading.Event()
    async with loaded(models("qwen3").folder, (2, 2)) as cluster:
        chain = Chain(cluster.own, cluster.deployment, say=said.append)
        await cluster.stack.enter_async_context(chain)
        await chain.open()
        await send(chain, Frame(epoch=1, step=50, opened=[Opening(slot=0)]))
        await receive(chain)
        monkeypatch.setattr("coordinator.cluster.step_timeouts.SILENCE_S", 0.3)
        monkeypatch.setattr("coordinator.cluster.step_timeouts.COMPILES_S", 0.1)
        held = cluster.nodes[0].thread.submit(lambda: release.wait(60))
        try:
            yield chain, release.set
        finally:
            release.set()
            await held


async def test_a_long_step_is_lost_if_no_engine_is_at_it(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    async with hasty(models, monkeypatch, said) as (chain, _):
        await send(chain, ROW)
        with pytest.raises(StageLost, match=r"no result for \d+\.\d s though every worker answers \(last step 51\)"):
            await receive(chain)
    assert not said


@asynccontextmanager
async def busy_itself(models: Models, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Chain, threading.Event]]:
    """Such a chain, whose own engine is at step 51 until the event is set; its worker has always just begun a step."""
    release = threading.Event()
    async with hasty(models, monkeypatch, []) as (chain, let_go):
        let_go()
        stage = chain.stage
        assert stage is not None
        begin = stage.executor.begin

        def held(*arguments: Any) -> Any:
            assert release.wait(60)
            return begin(*arguments)

        async def status(within_s: float) -> StatusReply:
            return StatusReply(busy_s=0.1)

        monkeypatch.setattr(chain.peers[0], "status", status)
        monkeypatch.setattr(stage.executor, "begin", held)
        await send(chain, ROW)
        try:
            yield chain, release
        finally:
            release.set()


async def test_a_long_step_of_this_process_is_waited_for(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else can go on before it ends."""
    async with busy_itself(models, monkeypatch) as (chain, release):
        waiting = asyncio.create_task(receive(chain))
        assert not (await asyncio.wait([waiting], timeout=0.8))[0], "more than twice what a known step may take"
        release.set()
        assert (await waiting).result.step == 51


async def test_our_engine_is_given_up_if_its_step_never_ends(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that waits for its thread ends with the reason; so does what is asked of it later."""
    monkeypatch.setattr("coordinator.cluster.chain.OWN_STEP_S", 0.1)
    async with busy_itself(models, monkeypatch) as (chain, release):
        for _ in range(2):
            with pytest.raises(EngineHung, match=r"^this process's engine has been at one step for \d+ s$"):
                await receive(chain)
        release.set()
        chain.thread.loop.call_soon_threadsafe(chain.thread.loop.stop)


async def test_the_first_step_of_a_kind_is_said_to_compile(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a number that the warm-up had not."""
    said: list[str] = []
    async with hasty(models, monkeypatch, said) as (chain, release):
        await send(chain, Frame(epoch=1, step=51, windows=[window_of(tokens_of(9), 0)]))
        waiting = asyncio.create_task(receive(chain))
        assert not (await asyncio.wait([waiting], timeout=0.6))[0], "twice what a known step may take"
        await until(lambda: said)
        release()
        assert (await waiting).result.step == 51
    assert len(said) == 1 and said[0].startswith("compiling")


async def test_an_engine_too_long_at_its_step_is_named(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[float]()

    async def status(within_s: float) -> StatusReply:
        said.append((0.2, 9.0)[len(said)])
        return StatusReply(busy_s=said[-1])

    async with hasty(models, monkeypatch, []) as (chain, _):
        monkeypatch.setattr(chain.peers[0], "status", status)
        await send(chain, ROW)
        with pytest.raises(EngineHung, match=r"^worker node-1: its engine has been at one step for 9\.0 s$"):
            await receive(chain)
        assert said == [0.2, 9.0]


async def test_a_result_that_comes_while_nodes_are_asked_is_taken(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hasty(models, monkeypatch, []) as (chain, release):

        async def status(within_s: float) -> StatusReply:
            release()
            await until(lambda: chain.still_since is None)
            return StatusReply()

        monkeypatch.setattr(chain.peers[0], "status", status)
        await send(chain, ROW)
        assert (await receive(chain)).result.step == 51


async def test_a_worker_whose_machine_slept_leaves_its_chain(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s = 100.0
    monkeypatch.setattr(machine, "asleep_s", lambda: slept_s)
    monkeypatch.setattr(machine, "LOOK_EVERY_S", 0.01)
    async with serving(2) as nodes:
        async with opened(whole.folder, (1, 2, 1), nodes) as chain:
            expected = (await answer(chain, tokens_of(6), 5)).tokens
            slept_s += 30
            with pytest.raises(StageLost, match=r"^worker node-[12]: .*(slept for 30 s|ended the hop)"):
                async with asyncio.timeout(60):
                    await receive(chain)
        for node in nodes:
            await until(lambda node=node: not node.service.num_slots)  # type: ignore[misc]
        async with opened(whole.folder, (1, 2, 1), nodes) as chain:
            assert (await answer(chain, tokens_of(6), 5)).tokens == expected == whole.tokens(tokens_of(6), 5)
