"""Nodes that are lost, and streams that go on all the same: with the tokens, and the text, of the unfailed run."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.chain import Chain
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.deployment import Deployment, OwnNode
from coordinator.cluster.nodes import ClusterNode, Nodes
from coordinator.cluster.peer import Peer
from coordinator.cluster.step_timeouts import ArrivedResult
from coordinator.decoding.decode_options import Decode
from coordinator.deploy.authority import Authority
from coordinator.engine.engine import Engine
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import Goal, Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.recovery import Limits
from coordinator.planning.speeds import NO_SPEEDS
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from coordinator.sessions.text import TextParser
from protos.brigade_pb2 import Sampling
from tests.integration.certificates import Certificates
from tests.integration.conftest import ANYWHERE, CHUNK, NETWORK, Models, opened_folder, running
from tests.integration.many import Frames, Live, request, solo, tokens_of, until
from tests.integration.many import frames as frames
from tests.integration.windows import MASKED, Words
from tools.model_types.make import make_type
from worker.config import ClusterConfig, CoordinatorConfig, WorkerConfig, split_address
from worker.errors import ModelError, NodeSilent, StageLost
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.node import lifecycle
from worker.node.certificates import Role
from worker.node.log import worker_log
from worker.node.network import Network
from worker.node.serve import listening
from worker.node.service import NodeService
from worker.node.stage import Stage
from worker.platform.threads import MlxThread

pytestmark = pytest.mark.usefixtures("in_turns")

LAYERS = (1, 2, 1)
ROOMY = 1 << 40


@dataclass
class Place:
    """Where a worker runs, or has run: `stop` and `start` are those of its process, on the same port."""

    name: str
    network: Network = NETWORK
    port: int = 0
    service: NodeService = field(init=False)
    _running: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        thread = MlxThread()
        self._running.callback(thread.close)
        service = NodeService(self.name, thread, self.network, ANYWHERE, log=worker_log(self.name, None))
        found = await self._running.enter_async_context(listening(service, [self.address], self.network, service.log))
        self.service, self.port = service, split_address(found.addresses[0])[1]

    async def stop(self) -> None:
        await self._running.aclose()


@dataclass
class Rig:
    """A supervised cluster of nodes in this process."""

    places: list[Place]
    cluster: Cluster
    said: list[str]

    def engine(self) -> Engine:
        return Engine(self.cluster.chain, when_lost=self.cluster.reopen)


@asynccontextmanager
async def directly(place: Place) -> AsyncIterator[Sequence[str]]:
    yield [place.address]


@asynccontextmanager
async def supervised(
    folder: Path,
    limits: Limits,
    layers: Sequence[int] = LAYERS,
    memory: int = ROOMY,
    context: int = 128,
    *,
    reaching: Callable[[Place], AbstractAsyncContextManager[Sequence[str]]] = directly,
    network_of: Callable[[str], Network] = lambda name: NETWORK,
    goal: Goal = "latency",
    drafter: Path | None = None,
) -> AsyncIterator[Rig]:
    """`reaching` gives the addresses at which a place is reached, for as long as it is used."""
    checkpoint = opened_folder(folder, drafter)
    spec = describe(checkpoint)
    said: list[str] = []
    async with AsyncExitStack() as stack:
        places = [Place(f"node-{i}", network_of(f"node-{i}")) for i in range(1, len(layers))]
        network, peers = network_of("coordinator"), []
        for place in places:
            await place.start()
            stack.push_async_callback(place.stop)
            addresses = await stack.enter_async_context(reaching(place))
            peers.append(Peer(place.name, addresses, network, said.append))
        workers = tuple(WorkerConfig(name=place.name, address=(place.address,), memory=memory) for place in places)
        config = ClusterConfig(coordinator=CoordinatorConfig(memory=memory), workers=workers)
        there = await stack.enter_async_context(Nodes(peers, config))
        own = await stack.enter_async_context(OwnNode())
        nodes = [Node(name, memory) for name in ("coordinator", *(place.name for place in places))]
        objective = Objective(context, layers=layers, goal=goal)
        deployment = Deployment(checkpoint, plan(spec, nodes, NO_SPEEDS, objective), peers)
        cluster = Cluster(own, there, deployment, limits, objective=replace(objective, layers=None), say=said.append)
        await stack.enter_async_context(cluster)
        await cluster.open()
        yield Rig(places, cluster, said)


COMES_BACK = Limits(rejoin_s=20, recovery_s=30)
IS_GONE = Limits(rejoin_s=0, recovery_s=30)

PENALISED = Sampling(seed=5, temperature=0.9, repetition_penalty=1.3)
DECODES = [Decode(), Decode("ngram"), Decode("diffusion", 8), Decode("diffusion-fast", 8)]
SAMPLINGS = [Sampling(), Sampling(seed=7, temperature=0.8), PENALISED]
ASKED = [  # each decoder with two of the samplings
    request(tokens_of(5 + 9 * i, i), 20, decode, sampling=SAMPLINGS[(i + j) % 3])
    for i, decode in enumerate(DECODES)
    for j in range(2)
]
STREAM = request(tokens_of(5), 40)
FORKED = [request((*tokens_of(40, 7), i), 16) for i in range(2)]  # one begins as a copy of the other


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    return models("qwen3", **MASKED).folder


_expected: dict[str, Answer] = {}


async def unfailed(folder: Path, asked: Sequence[Request], layers: Sequence[int] = LAYERS) -> list[Answer]:
    """Each request's answer alone, computed once."""
    keys = {f"{folder} {each}": each for each in asked}
    if missing := [key for key in keys if key not in _expected]:
        async with running(folder, layers) as chain:
            answers = await solo(chain, [keys[key] for key in missing])
        _expected.update(zip(missing, answers, strict=True))
    return [_expected[key] for key in keys]


async def lose(rig: Rig, which: int, *, comes_back: bool) -> None:
    await rig.places[which].stop()
    if comes_back:
        await rig.places[which].start()


def slots_of(rig: Rig) -> int:
    """Slots that the first node holds."""
    status = rig.cluster.chain.own_status
    return status.slots if status else 0


def assert_equal(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)


@pytest.mark.parametrize(
    ("limits", "goal", "after"),
    [
        pytest.param(
            limits, goal, after, marks=() if after in chosen else pytest.mark.matrix, id=f"{after}-{name}-{goal}"
        )
        for limits, name, goal, chosen in (
            (COMES_BACK, "comes back", "latency", (15,)),
            (IS_GONE, "is planned around", "latency", (0,)),
            (COMES_BACK, "comes back", "prompt", (0,)),
            (IS_GONE, "is planned around", "prompt", (10,)),
        )
        for after in (0, 1, 10, 15)
    ],
)
async def test_every_stream_is_that_of_the_unfailed_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limits: Limits, goal: Goal, after: int
) -> None:
    """Every decoder, greedy, sampled and penalised, in lanes and forked: a worker is lost at several moments."""
    monkeypatch.setattr(ChainCosts, "pays_apart", lambda costs, num_alone, *rest: num_alone % 3 > 0)
    asked = [*ASKED, *FORKED]
    expected = await unfailed(folder, asked)
    async with supervised(folder, limits, goal=goal) as rig, rig.engine() as engine:
        live = [Live(engine, each) for each in asked]
        await live[0].wait_pieces(after)
        await lose(rig, after % 2, comes_back=limits is COMES_BACK)
        found = [await each.answer() for each in live]
        assert_equal(found, expected)
        assert rig.cluster.num_recoveries == 1
        assert max(each.usage.num_recoveries for each in found) <= 1
        layers = list(LAYERS) if limits is COMES_BACK else [2, 2]
        if goal == "prompt":  # the answers went on without it
            await until(lambda: rig.cluster.chain.plan.layers == layers)
        assert rig.cluster.chain.plan.layers == layers
        told = [line for line in rig.said if "the stream stood still for" in line and "rejoining the chain" not in line]
        assert len(told) == 1 and told[0].startswith(f"worker node-{after % 2 + 1}: ")


@pytest.mark.parametrize(
    ("family", "decode"),
    [("qwen3", Decode()), ("qwen3", Decode("draft", num_drafts=3)), ("qwen3_5", Decode())],
    ids=["full caches", "a drafter", "recurrent layers"],
)
async def test_answers_that_one_node_makes_go_on_in_their_slots_when_a_prompt_node_is_lost_and_returns(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frames: Frames, family: str, decode: Decode
) -> None:
    """Recurrent states may be a row ahead of what is known: these answers are fed again."""
    monkeypatch.setattr(ChainCosts, "pays_apart", lambda costs, num_alone, *rest: num_alone > 2 * CHUNK)
    monkeypatch.setattr("coordinator.planning.recovery.LOOK_S", 0.05)
    is_full = family == "qwen3"
    folder = models("qwen3", **MASKED).folder if is_full else make_type(tmp_path / family, family)
    layers = LAYERS if is_full else (1, 2, 3)
    ended, asked = request(tokens_of(30, 3), 4), request(tokens_of(40), 48, temperature=0.9, seed=3, logprobs=4)
    follow_up = request((*ended.prompt, 1, 2), 4)
    expected = await unfailed(folder, [ended, asked, follow_up], layers)
    drafter = folder if decode.kind == "draft" else None
    asked = replace(asked, decode=decode)
    async with supervised(folder, COMES_BACK, layers, goal="prompt", drafter=drafter) as rig, rig.engine() as engine:
        found = [await engine.answer(ended, chunk=CHUNK)]
        live = Live(engine, asked)
        await live.wait_pieces(5)
        await lose(rig, 0, comes_back=True)
        found.append(await live.answer())
        await until(lambda: rig.cluster.chain.plan.layers == list(layers))
        await until(lambda: slots_of(rig) == engine.scheduler.slots.num_kept)
        found.append(await engine.answer(follow_up, chunk=CHUNK))
    assert_equal(found, expected)
    assert [answer.usage.num_reused for answer in found[:2]] == [0, 0], "its own rows are no other's"
    windows = [window for frame in frames if frame.epoch > 1 for window in frame.windows if any(window.tokens)]
    fed_again = [window for window in windows if list(window.tokens) == list(asked.prompt[: len(window.tokens)])]
    if is_full:
        assert not fed_again
        if drafter:
            assert set(found[1].usage.drafts_held) == {1.0}, "the drafter, which is the model, read another text"
        else:
            assert found[1].usage.num_rows <= len(asked.prompt) + asked.max_tokens + 2
        assert found[2].usage.num_reused >= len(ended.prompt) - 1
    else:
        assert fed_again


async def test_a_prompt_that_was_partly_computed_goes_on_behind_the_rows_that_are_there_when_a_prompt_node_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, frames: Frames
) -> None:
    """And a second one beside it. The chunks are long enough for their memory to be measured."""
    monkeypatch.setattr(ChainCosts, "pays_apart", lambda costs, *rest: frames[-1].epoch == 1)
    asked = [request(tokens_of(480, seed), 6, temperature=0.9, seed=seed, logprobs=2) for seed in (1, 2)]
    async with running(folder, LAYERS) as chain:
        expected = await solo(chain, asked, chunk=64)
    frames.clear()
    async with supervised(folder, IS_GONE, context=500, goal="prompt") as rig, rig.engine() as engine:
        answers = [asyncio.create_task(engine.answer(each, chunk=64)) for each in asked]
        await frames.wait_window(lambda window: window.base >= 384)
        await rig.places[0].stop()
        assert_equal(await asyncio.gather(*answers), expected)
        assert rig.cluster.num_recoveries == 1
        opened = [frame for frame in frames if frame.epoch > 1 and frame.opened]
        assert max(window.base for frame in opened for window in frame.windows) >= 64
        assert slots_of(rig) <= 2, "unused slots are still allocated"


@pytest.mark.parametrize(
    ("decode", "sampling"),
    [  # text is parsed after decoding, so one decoder of single tokens and one of windows suffice
        pytest.param(decode, SAMPLINGS[i % 3], marks=() if i in (0, 2) else pytest.mark.matrix, id=decode.kind)
        for i, decode in enumerate(DECODES)
    ],
)
async def test_a_stop_string_ends_an_answer_at_its_place(folder: Path, decode: Decode, sampling: Sampling) -> None:
    """The string spans the loss: its first half was known before."""
    asked = request(tokens_of(9, 3), 20, decode, sampling=sampling)
    [whole] = await unfailed(folder, [asked])
    stop = "".join(f" {token}" for token in whole.tokens[9:13])
    async with supervised(folder, IS_GONE) as rig, rig.engine() as engine:
        lost = []

        def lose_within(text: str) -> None:
            if not lost and live.num_pieces >= 3:
                lost.append(asyncio.create_task(rig.places[0].stop()))

        live = Live(engine, asked, parser=TextParser(Words(), [stop]), emit=lose_within)
        found = await live.answer()
        await asyncio.gather(*lost)
    words = "".join(f" {token}" for token in whole.tokens)
    assert (found.text, found.finish_reason) == (words[: words.index(stop)], "stop")


async def test_a_node_that_is_lost_again_while_it_joins_or_replays_costs_time_and_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once before the chain is open, once with the first chunk of the replay."""
    expected = await unfailed(folder, ASKED[::2])
    async with supervised(folder, COMES_BACK) as rig, rig.engine() as engine:
        chains: list[Chain] = []
        lost: list[str] = []
        open_chain, receive, main = Chain.open, Chain.receive, asyncio.get_running_loop()
        warm: list[Chain] = []

        async def fail_to_open(chain: Chain, *arguments: object) -> None:
            chains.append(chain)
            if len(chains) == 1:
                lost.append("joining")
                await lose(rig, 1, comes_back=True)
            await open_chain(chain)
            warm.append(chain)

        async def fail_to_replay(chain: Chain) -> ArrivedResult:
            arrival = await receive(chain)
            if (
                len(chains) == 2
                and len(lost) == 1
                and chain is chains[-1]
                and chain in warm
                and not chain.has_token.is_set()
            ):
                lost.append("replaying")
                main.call_soon_threadsafe(chain.deployment.peers[len(lost) % 2].detach)
            return arrival

        monkeypatch.setattr(Chain, "open", fail_to_open)
        monkeypatch.setattr(Chain, "receive", fail_to_replay)
        live = [Live(engine, each) for each in ASKED[::2]]
        await live[0].wait_pieces(5)
        await lose(rig, 0, comes_back=True)
        found = [await each.answer() for each in live]
    assert lost == ["joining", "replaying"]
    assert_equal(found, expected)
    told = [line for line in rig.said if "the stream stood still for" in line]
    assert len(told) == 1 or chains[1].has_token.is_set(), "before the first token it is one recovery"


async def test_two_nodes_lost_at_once_are_both_planned_around(folder: Path) -> None:
    expected = await unfailed(folder, ASKED[::2])
    async with supervised(folder, Limits(rejoin_s=0.5, recovery_s=20)) as rig, rig.engine() as engine:
        live = [Live(engine, each) for each in ASKED[::2]]
        await live[0].wait_pieces(3)
        await asyncio.gather(*(place.stop() for place in rig.places))
        found = [await each.answer() for each in live]
        assert rig.cluster.chain.plan.layers == [4]
    assert_equal(found, expected)


class Streams:
    """Two clients that ask for one answer after another, without an end."""

    def __init__(self, engine: Engine, asked: Sequence[Request]) -> None:
        self.answers: list[tuple[Request, Answer]] = []
        self._engine = engine
        self._tasks = [asyncio.create_task(self._ask(each)) for each in asked]

    async def _ask(self, asked: Request) -> None:
        while True:
            self.answers.append((asked, await self._engine.answer(asked)))

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for this while they go on, and for two more answers. Raises what a stream failed with."""
        num_answers: int | None = None
        while num_answers is None or len(self.answers) < num_answers + 2:
            done, _ = await asyncio.wait(self._tasks, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if num_answers is None and holds():
                num_answers = len(self.answers)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.mark.parametrize(("which", "meanwhile"), [(0, [1, 2, 1]), (1, [2, 1, 1])], ids=["shrink", "one would grow"])
async def test_a_node_that_is_there_again_is_used_under_endless_streams(
    folder: Path, monkeypatch: pytest.MonkeyPatch, which: int, meanwhile: list[int]
) -> None:
    """It loads while the chain goes on. Where another node would have to read layers, they wait for an idle moment."""
    monkeypatch.setattr("coordinator.planning.recovery.LOOK_S", 0.05)
    monkeypatch.setattr("coordinator.planning.recovery.IDLE_S", 0.3)
    asked = [request(tokens_of(5 + i, i), 20) for i in range(2)]
    expected = await unfailed(folder, asked)
    name = f"node-{which + 1}"
    async with supervised(folder, IS_GONE, memory=ROOMY) as rig, rig.engine() as engine, asyncio.timeout(60):
        streams = Streams(engine, asked)
        await rig.places[which].stop()
        await streams.until(lambda: rig.cluster.chain.plan.layers == [2, 2])
        assert rig.cluster.missing == [name]
        await rig.places[which].start()
        await streams.until(lambda: rig.cluster.chain.plan.layers == meanwhile)
        await streams.end()
        for each, found in streams.answers:
            assert_equal([found], [expected[asked.index(each)]])
        await until(lambda: rig.cluster.chain.plan.layers == list(LAYERS))
        assert rig.cluster.num_recoveries == 1 and not rig.cluster.missing
        assert f"worker {name}: loading layers to rejoin the chain" in rig.said
        assert any(line.startswith(f"worker {name}: rejoining the chain; going on with {name} (") for line in rig.said)
        assert_equal([await engine.answer(each) for each in asked], expected)


async def test_a_node_that_cannot_load_again_costs_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.planning.recovery.LOOK_S", 0.05)
    monkeypatch.setattr("coordinator.planning.recovery.REFUSED_S", 0.2)
    monkeypatch.setattr("coordinator.planning.recovery.LONGEST_REFUSED_S", 0.4)
    asked = [request(tokens_of(5), 20)]
    expected = await unfailed(folder, asked)
    async with supervised(folder, IS_GONE, memory=ROOMY) as rig, rig.engine() as engine, asyncio.timeout(60):
        await rig.places[0].stop()
        await until(lambda: rig.cluster.chain.plan.layers == [2, 2])
        chain, refused = rig.cluster.chain, []

        def refuse(*arguments: object) -> None:
            refused.append(arguments)
            raise ModelError("its config.json differs")

        with monkeypatch.context() as patch:
            patch.setattr(lifecycle, "check_load_request", refuse)
            await rig.places[0].start()
            await until(lambda: len(refused) >= 2)
            assert_equal([await engine.answer(asked[0])], expected)
            assert rig.cluster.chain is chain and rig.cluster.missing == ["node-1"]
        await until(lambda: rig.cluster.chain.plan.layers == list(LAYERS))
        assert_equal([await engine.answer(asked[0])], expected)


def tight(folder: Path) -> int:
    """Memory per node with which the model fits on three nodes and not on two."""
    spec = describe(open_folder(folder))
    needed = [spec.shard_bytes(start, end) + spec.reserved_bytes(start, end, 128) for start, end in ((0, 1), (1, 3))]
    needed.append(spec.shard_bytes(3, 4) + spec.reserved_bytes(3, 4, 128))
    return max(needed)


async def test_where_the_model_does_not_fit_without_it_a_node_is_awaited_until_it_is_back(folder: Path) -> None:
    expected = await unfailed(folder, ASKED[:1])
    async with supervised(folder, IS_GONE, memory=tight(folder)) as rig, rig.engine() as engine:
        live = Live(engine, ASKED[0])
        await live.wait_pieces(3)
        await rig.places[1].stop()
        assert not (await asyncio.wait([live.task], timeout=0.7))[0]
        await rig.places[1].start()
        async with asyncio.timeout(60):  # the promise to a user who starts a worker again
            assert_equal([await live.answer()], expected)


ENDED = r"(closed the connection \(its process has ended\)|left the chain)"  # by its first call to end


@pytest.mark.parametrize(
    ("recovery_s", "why"),
    [
        (
            0.6,
            r".*; node-2 did not come back within 0\.6 s, and the model does not fit without.*",
        ),
        (0, ENDED),
    ],
)
async def test_and_once_the_time_is_over_all_fail_with_the_reason(folder: Path, recovery_s: float, why: str) -> None:
    async with supervised(folder, Limits(0, recovery_s), memory=tight(folder)) as rig, rig.engine() as engine:
        live = [Live(engine, request(tokens_of(5, i), 100)) for i in range(2)]
        await live[0].wait_pieces(2)  # the other one waits for memory
        await rig.places[1].stop()
        for each in live:
            with pytest.raises(StageLost, match=f"^worker node-2: {why}$") as raised:
                await each.answer()
            assert raised.value.exit_code == 3


async def test_a_node_whose_engine_hangs_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of all others say that they began their steps only just now, however slow the machine is."""
    hung, busy_s = list[Stage](), Stage.busy_s
    monkeypatch.setattr(Stage, "busy_s", property(lambda stage: busy_s.__get__(stage) if stage in hung else 0.1))
    for limit in ("SILENCE_S", "FIRST_S"):
        monkeypatch.setattr(f"coordinator.cluster.step_timeouts.{limit}", 0.3)
    monkeypatch.setattr("coordinator.cluster.chain.PROBE_S", 30.0)
    expected = await unfailed(folder, ASKED[:2])
    release = threading.Event()
    async with supervised(folder, COMES_BACK) as rig, rig.engine() as engine:
        live = [Live(engine, each) for each in ASKED[:2]]
        await live[0].wait_pieces(4)
        stage = rig.places[1].service.worker.stage
        assert stage is not None
        hung.append(stage)
        monkeypatch.setattr(hung[0].executor, "begin", lambda *step: release.wait(60))
        try:
            assert_equal([await each.answer() for each in live], expected)
        finally:
            release.set()
        assert rig.cluster.chain.plan.layers == [2, 2]
        assert "worker node-2: its engine has been at one step" in "".join(rig.said)


@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.matrix), 1])
async def test_a_node_that_is_about_to_end_hands_over_where_the_others_suffice(folder: Path, which: int) -> None:
    expected = await unfailed(folder, ASKED[::2])
    async with supervised(folder, COMES_BACK) as rig, rig.engine() as engine:
        live = [Live(engine, each) for each in ASKED[::2]]
        await live[0].wait_pieces(4)
        worker = rig.places[which].service.worker
        async with asyncio.timeout(60):
            await worker.drain()
            await worker.wait_detached()
        assert_equal([await each.answer() for each in live], expected)
        assert rig.cluster.chain.plan.layers == [2, 2]
        assert f"worker node-{which + 1}: is about to end; going on without node-{which + 1}" in "".join(rig.said)


async def test_and_where_they_do_not_suffice_its_sessions_end_on_it(folder: Path) -> None:
    expected = await unfailed(folder, [STREAM])
    async with supervised(folder, COMES_BACK, memory=tight(folder)) as rig, rig.engine() as engine:
        live = Live(engine, STREAM)
        await live.wait_pieces(4)
        drain = asyncio.create_task(rig.places[0].service.worker.drain())
        assert_equal([await live.answer()], expected)
        await drain
        assert rig.cluster.num_recoveries == 0


# --- what is left out while a reader waits --------------------------------------------------------------------------

LONG = request(tokens_of(60), 40)


def warm_up_rows(frames: Frames, epoch: int) -> list[int]:
    """Of the frames before any of a session: theirs begin with step 0 and end with the one that closes the slot."""
    own = [frame for frame in frames if frame.epoch == epoch]
    end = next(number for number, frame in enumerate(own) if frame.closed)
    return [len(window.tokens) for frame in own[:end] for window in frame.windows]


@pytest.mark.parametrize(
    ("is_awaited", "is_silent", "rows"),
    [(True, False, [1]), (False, False, [64, 64, 1, 1]), (True, True, [64, 64, 1, 1])],
)
async def test_while_a_request_waits_the_new_chain_knows_what_the_lost_one_knew_and_else_measures_anew(
    folder: Path, frames: Frames, is_awaited: bool, is_silent: bool, rows: list[int]
) -> None:
    """Where a node fell silent, too: its link may have become so slow that signs of life waited behind a prompt."""
    async with supervised(folder, COMES_BACK) as rig, rig.engine() as engine:
        costs = rig.cluster.chain.costs
        live = [Live(engine, LONG)] if is_awaited else []
        for each in live:
            await each.wait_pieces(3)
        if is_silent:
            rig.cluster.chain.end(NodeSilent("stopped answering", node="node-2"))
        else:
            await lose(rig, 1, comes_back=True)
        for each in live:
            await each.answer()
        await until(lambda: rig.cluster.num_recoveries)
        assert (rig.cluster.chain.costs is costs) == (rows == [1])
    assert warm_up_rows(frames, 1) == [64, 64, 1, 1]
    assert warm_up_rows(frames, 2) == rows


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


async def test_replay_chunks_are_chosen_for_all_that_is_replayed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_our_silent_worker_is_ended_before_any_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    ask = Nodes.ask

    async def note(nodes: Nodes, *arguments: Any) -> None:
        done.append("asked")
        await ask(nodes, *arguments)

    async with supervised(folder, COMES_BACK) as rig:
        monkeypatch.setattr("coordinator.cluster.cluster.is_overloaded", lambda: False)
        monkeypatch.setattr(Nodes, "ask", note)
        monkeypatch.setattr(ClusterNode, "kill", lambda worker: done.append(worker.name))
        await rig.cluster.reopen(NodeSilent("stopped answering", node="node-2"))
    assert done[:2] == ["node-2", "asked"]


# --- certificates ---------------------------------------------------------------------------------------------------


async def test_a_renewed_certificate_opens_the_next_chain(folder: Path, tmp_path: Path) -> None:
    """The authority is another one, since the file was read: to the worker the old certificate is worth nothing."""
    certificates = Certificates(tmp_path)
    [expected] = await unfailed(folder, [STREAM])
    async with supervised(folder, COMES_BACK, network_of=certificates.of) as rig, rig.engine() as engine:
        live = Live(engine, STREAM)
        await live.wait_pieces(5)
        renewed = Authority.make(certificates.authority.folder, replace=True)
        for place in rig.places:
            renewed.issue(place.name, Role.WORKER)
        renewed.issue("coordinator", Role.COORDINATOR)
        for place in rig.places:
            await place.stop()
            await place.start()
        assert_equal([await live.answer()], [expected])
        assert rig.cluster.chain.plan.layers == list(LAYERS), "or this node alone has answered"


async def test_where_it_has_expired_the_reason_is_told_once_the_time_is_over(folder: Path, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with (
        supervised(folder, Limits(0, 0.5), memory=tight(folder), network_of=certificates.of) as rig,
        rig.engine() as engine,
    ):
        live = Live(engine, STREAM)
        await live.wait_pieces(5)
        expired = datetime.now(UTC) - timedelta(seconds=1)
        certificates.authority.issue("coordinator", Role.COORDINATOR, begins=expired - timedelta(days=1), until=expired)
        rig.cluster.chain.peers[0].detach()
        with pytest.raises(
            StageLost, match=r"did not come back within 0.5 s.* \(\S*coordinator\.pem: the certificate expired"
        ):
            await live.answer()
