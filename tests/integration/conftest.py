"""Real nodes inside this process: gRPC servers on port 0, each with its own MLX thread. Async tests share one loop."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from coordinator.cluster import cluster as cluster_module
from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment
from coordinator.cluster.open import with_drafter
from coordinator.cluster.peer import Peer
from coordinator.cluster.step_timeouts import ArrivedResult
from coordinator.engine.engine import generate_once
from coordinator.planning.plan import Goal, Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS
from coordinator.quality.reference import Reference
from coordinator.quality.replay import prompt_chunks
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import AttachRequest, Frame, LoadProgress, LoadRequest, Sampling
from tests.tiny import make_model
from tools.joined import joined
from worker.compute.ahead import StepsAhead
from worker.compute.batching import LaneWindow
from worker.compute.sampling import Sampler
from worker.compute.shard import Shard
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.describe import describe, layout_of
from worker.model.draft_heads import own_head
from worker.node.loading import open_checkpoint
from worker.node.log import worker_log
from worker.node.model_sources import Headers, ModelSources, Opening
from worker.node.network import Network
from worker.node.serve import Listening, listening
from worker.node.service import NodeService
from worker.node.weights_cache import WeightsCache
from worker.platform.threads import MlxThread

Layers = tuple[int, ...]  # of each stage
CHUNK = 8
_TURNS = 16  # of a loop, within which a test hears of a token and acts
NETWORK = Network()


class Anywhere(ModelSources):
    """Opens whatever folder a coordinator names, as no worker does: for nodes of tests that are of something else."""

    def candidates(self, wanted: str, known: Headers) -> list[Opening]:
        return [lambda: open_checkpoint(wanted, known)]


ANYWHERE = Anywhere()

_runner = pytest.StashKey[asyncio.Runner]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_runner] = asyncio.Runner()


def pytest_unconfigure(config: pytest.Config) -> None:
    runner = config.stash[_runner]
    runner.run(_wait_ended())
    runner.close()


async def _wait_ended() -> None:
    """The last server's calls end a moment after it has stopped."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=2)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def` tests, all on one event loop: gRPC's asyncio side is bound to the first one it sees."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    pyfuncitem.config.stash[_runner].run(pyfuncitem.obj(**arguments))
    return True


@dataclass(frozen=True)
class RunningNode:
    """A worker that serves in this process."""

    name: str
    address: str
    service: NodeService
    thread: MlxThread
    listening: Listening

    def peer(self, network: Network = NETWORK) -> Peer:
        return Peer(self.name, [self.address], network)

    @asynccontextmanager
    async def reached(self, network: Network = NETWORK, *, name: str = "", address: str = "") -> AsyncIterator[Peer]:
        """The node as a coordinator reaches it, by its own name and address or by others."""
        peer = Peer(name or self.name, [address or self.address], network)
        try:
            yield peer
        finally:
            await peer.close()

    async def load(self, request: LoadRequest) -> list[LoadProgress]:
        """Have it load a shard, as a coordinator would; its reports."""
        reports: list[LoadProgress] = []
        async with self.reached() as peer:
            await peer.load(request, reports.append)
        return reports

    async def attach(self, request: AttachRequest) -> None:
        async with self.reached() as peer:
            await peer.attach(request)


@asynccontextmanager
async def serving(
    count: int,
    model: Path | ModelSources = ANYWHERE,
    out: TextIO | None = None,
    network_of: Callable[[str], Network] = lambda name: NETWORK,
    store_of: Callable[[str], WeightsCache | None] = lambda name: None,
) -> AsyncIterator[list[RunningNode]]:
    """`count` workers called node-1, node-2, ...; `model` is their own one or all they have, `out` hears them."""
    models = model if isinstance(model, ModelSources) else ModelSources(str(model))
    async with AsyncExitStack() as stack:
        nodes = []
        for number in range(1, count + 1):
            thread = MlxThread()
            stack.callback(thread.close)
            name = f"node-{number}"
            network = network_of(name)
            sources = replace(models, cache=store_of(name))
            service = NodeService(name, thread, network, sources, log=worker_log(name, out))
            found = await stack.enter_async_context(listening(service, ["127.0.0.1:0"], network, service.log))
            nodes.append(RunningNode(service.name, found.addresses[0], service, thread, found))
        yield nodes


def opened_folder(folder: Path, drafter: Path | None = None) -> Checkpoint:
    """A model with what is to draft for it, its own head if it has one."""
    checkpoint = open_folder(folder)
    own = open_folder(drafter) if drafter else own_head(checkpoint)
    return with_drafter(checkpoint, own) if own else checkpoint


@asynccontextmanager
async def deployed(
    folder: Path,
    layers: Sequence[int],
    nodes: Sequence[RunningNode],
    network: Network = NETWORK,
    drafter: Path | None = None,
    goal: Goal = "latency",
) -> AsyncIterator[Deployment]:
    """The plan of the model's layers over a coordinator and these nodes, perhaps with a drafter."""
    checkpoint = opened_folder(folder, drafter)
    spec = describe(checkpoint)
    async with AsyncExitStack() as stack:
        peers = [node.peer(network) for node in nodes]
        for peer in peers:
            stack.push_async_callback(peer.close)
        memory = [Node(name, 1 << 40) for name in ("coordinator", *(peer.name for peer in peers))]
        yield Deployment(checkpoint, plan(spec, memory, NO_SPEEDS, Objective(128, layers=layers, goal=goal)), peers)


@contextmanager
def warmed_by_a_row() -> Iterator[None]:
    """Have chains opened as after a loss, while requests wait: one row warms them up, a third of an opening's time."""

    def unmeasured(*arguments: Any, **more: Any) -> Chain:
        return Chain(*arguments, **more | {"is_awaited": True})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_module, "Chain", unmeasured)
        yield


@asynccontextmanager
async def opened(
    folder: Path,
    layers: Sequence[int],
    nodes: Sequence[RunningNode],
    *where: Network,
    is_measured: bool = False,
    **more: Any,
) -> AsyncIterator[Chain]:
    """The same joined and warm, by frames that measure costs if `is_measured`."""
    async with deployed(folder, layers, nodes, *where, **more) as deployment, AsyncExitStack() as stack:
        with nullcontext() if is_measured else warmed_by_a_row():
            chain = await stack.enter_async_context(joined(deployment))
        yield chain


@asynccontextmanager
async def running(folder: Path, layers: Sequence[int], **more: Any) -> AsyncIterator[Chain]:
    """The model's layers over a coordinator and fresh nodes."""
    async with serving(len(layers) - 1) as nodes, opened(folder, layers, nodes, **more) as chain:
        yield chain


async def send(chain: Chain, frame: Frame) -> None:
    """Hand the chain a frame, on the thread of its results."""
    await chain.thread.run(partial(chain.send, frame))


async def receive(chain: Chain) -> ArrivedResult:
    async def receive_one() -> ArrivedResult:
        arrival = await chain.receive()
        chain.learn(arrival)
        return arrival

    return await chain.thread.call(receive_one())


async def answer(chain: Chain, prompt: Sequence[int], num_tokens: int, sampling: Sampling | None = None) -> Answer:
    """What the chain makes of a prompt, fed in chunks of `CHUNK`."""
    asked = Request(tuple(prompt), num_tokens, sampling or Sampling())
    return await generate_once(chain, asked, chunk=CHUNK, traced=True)


def load_request(folder: Path, start: int, end: int) -> LoadRequest:
    """What a coordinator that has this folder asks of a worker."""
    checkpoint = open_folder(folder)
    spec = describe(checkpoint)
    return LoadRequest(
        model=str(folder),
        fingerprint=checkpoint.fingerprint,
        start=start,
        end=end,
        num_layers=spec.num_layers,
        dtype=spec.dtype,
    )


class Whole:
    """The unsharded model of a folder; equal questions are computed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = Reference(folder)
        self.layout = layout_of(open_folder(folder))  # is found once while it is held: see `layout_of`
        self._tokens: dict[Any, list[int]] = {}

    def tokens(self, prompt: Sequence[int], num_tokens: int, sampling: Sampling | None = None) -> list[int]:
        sampling = sampling or Sampling()
        key = tuple(prompt), num_tokens, sampling.SerializeToString(deterministic=True)
        if key not in self._tokens:
            self._tokens[key] = self._generate(prompt, num_tokens, sampling)
        return self._tokens[key]

    def _generate(self, prompt: Sequence[int], num_tokens: int, sampling: Sampling) -> list[int]:
        """The tokens after the prompt, which is fed in chunks as a session does."""
        cache, sampler, tokens = make_prompt_cache(self.reference.model), Sampler(sampling), list(prompt)
        windows = prompt_chunks(prompt, CHUNK)
        while len(tokens) < len(prompt) + num_tokens:
            for window in windows:
                mx.eval(rows := self.reference.rows(window, cache))
            tokens.append(sampler(rows[-1:], [len(tokens)], tokens, [len(tokens)]).to_samples(slot=0)[0].token)
            windows = [tokens[-1:]]
        return tokens[len(prompt) :]

    def tokens_of(self, requests: Sequence[Request]) -> list[list[int]]:
        """Each request's tokens alone: for full caches and lossless decoders."""
        return [self.tokens(each.prompt, each.max_tokens, each.sampling) for each in requests]

    def logits(self, prompt: Sequence[int], generated: Sequence[int]) -> mx.array:
        """The logits [N, V] float32 from which each of `generated` was chosen, fed as the chain is fed."""
        cache = make_prompt_cache(self.reference.model)
        windows = [list(prompt[i : i + CHUNK]) for i in range(0, len(prompt), CHUNK)]
        rows = [self.reference.rows(window, cache)[-1:] for window in [*windows, *([t] for t in generated[:-1])]]
        return mx.concatenate(rows[len(windows) - 1 :])


Models = Callable[..., Whole]


@dataclass(frozen=True)
class Pass:
    """One forward pass of a shard: its first layer, and the rows of every window in it."""

    start: int
    rows: tuple[int, ...]


def build_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no step built before its frame comes."""
    monkeypatch.setattr(StepsAhead, "build", lambda ahead, slots: None)
    monkeypatch.setattr(StepsAhead, "launch", lambda ahead, slots, tokens, most: None)


@pytest.fixture
def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    build_nothing_ahead(monkeypatch)


@pytest.fixture
def in_turns(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the loop of the tests take turns with each frame: a stream is not over before a test that watches it acts.

    A loop that waits for the MLX thread instead, as at the end of a chain, takes none.
    """
    loop, send = pytestconfig.stash[_runner].get_loop(), Chain.send

    def turn(left: int, is_done: threading.Event) -> None:
        if left:
            loop.call_soon(turn, left - 1, is_done)
        else:
            is_done.set()

    def send_later(chain: Chain, frame: Frame) -> None:
        is_done = threading.Event()
        loop.call_soon_threadsafe(turn, _TURNS, is_done)
        is_done.wait(1.5)
        send(chain, frame)

    monkeypatch.setattr(Chain, "send", send_later)


@pytest.fixture
def uncleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep MLX's unused buffers: beside the streams of hundreds of other tests it takes 20 ms to free them."""
    monkeypatch.setattr(mx, "clear_cache", lambda: None)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """Every forward pass of any shard that is built."""
    found: list[Pass] = []
    run = Shard.__call__

    def note(shard: Shard, x: mx.array, places: Sequence[LaneWindow], *more: mx.array | None) -> mx.array:
        found.append(Pass(shard.start, tuple(place.num_rows for place in places)))
        assert sum(found[-1].rows) == x.shape[1]
        return run(shard, x, places, *more)

    monkeypatch.setattr(Shard, "__call__", note)
    return found


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """`models("qwen3", tied=True)`: a tiny random model by the arguments of `make_model`, made and loaded once."""
    made: dict[str, Whole] = {}

    def whole(family: str = "qwen3", **arguments: Any) -> Whole:
        key = repr((family, arguments))
        if key not in made:
            made[key] = Whole(make_model(tmp_path_factory.mktemp("models") / family, family, **arguments))
        return made[key]

    yield whole
    made.clear()


@pytest.fixture(scope="session")
def whole(models: Models) -> Whole:
    """The model that most tests are about."""
    return models("qwen3")


@pytest.fixture(scope="session")
def folder(whole: Whole) -> Path:
    return whole.folder
