"""The model on this machine without its cluster: read layer by layer, or whole in memory. Shows how far it is."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from coordinator.cluster.progress import say, show_steps, telling_interrupts
from coordinator.measure.feed import Feed
from coordinator.measure.reference import Reference
from coordinator.measure.replay import CHUNK, Replay
from coordinator.measure.streamed import Digests, read_layers
from coordinator.measure.verdict import Case
from coordinator.planning.costs import StepCosts
from coordinator.sessions.request import Request
from coordinator.sessions.session import Session
from protos.brigade_pb2 import Frame, Result
from protos.brigade_pb2 import Session as Opening
from worker.compute.engine import Engine
from worker.compute.shard import Shard
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec
from worker.process.mlx_thread import MlxThread

_IN_MEMORY = "interrupted while one process was asked: nothing is proved"

Take = Callable[[Case], None]


class Alone:
    """What a cluster is compared with."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, thread: MlxThread) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._thread = thread

    async def read_layers(self, feeds: Sequence[Feed], digests: Digests | None = None) -> None:
        """Lead the feeds through the layers, one of which is in memory at a time; `digests` gets each layer's."""
        num_layers, at = self._spec.num_layers, -1
        pieces = read_layers(self._checkpoint, num_layers, feeds, digests)
        try:
            with show_steps(num_layers) as begin:
                while (layer := await self._thread.run(lambda: next(pieces, None))) is not None:
                    if layer > at:
                        at = layer
                        begin(f"layer {layer + 1} of {num_layers}")
        except asyncio.CancelledError:
            say(f"interrupted at layer {at + 1} of {num_layers}: nothing is proved")
            raise

    async def measure_differences(self, replays: Sequence[Replay], take: Take) -> None:
        """What came of the replays whose feeds have been led through the layers: once more if a token differs."""
        if feeds := [feed for replay in replays for feed in replay.other_feeds()]:
            await self.read_layers(feeds)
        for replay in replays:
            take(replay.case())

    async def replay_in_memory(self, replays: Sequence[Replay], take: Take) -> None:
        """Compare with mlx-lm's model."""
        with show_steps(1 + len(replays)) as begin, telling_interrupts(_IN_MEMORY):
            begin("loading the model in one process")
            reference = await self._thread.run(lambda: Reference(self._checkpoint.folder))
            for replay in replays:
                begin(replay.name)
                await self._thread.run(partial(_read, reference, replay))
                take(replay.case())

    async def decode_again(self, requests: Mapping[str, Request], found: Mapping[str, list[int]], take: Take) -> None:
        """Compare with the same decoder on one shard that is the whole model: for `diffusion-fast`, which mlx-lm does
        not have.
        """
        with show_steps(1 + len(requests)) as begin, telling_interrupts(_IN_MEMORY):
            begin("loading the model in one process")
            engine = await self._thread.run(self._make_engine)
            for name, request in requests.items():
                begin(name)
                expected = await self._thread.run(partial(_decode, engine, request))
                take(Case(name, expected, found[name]))

    def _make_engine(self) -> Engine:
        shard = Shard(self._checkpoint, 0, self._spec.num_layers)
        shard.materialise(lambda nbytes: None)
        return Engine(shard, 0, self._spec.dtype)


def _read(reference: Reference, replay: Replay) -> None:
    reference.read(replay.feed())
    for feed in replay.other_feeds():
        reference.read(feed)


def _decode(engine: Engine, request: Request) -> list[int]:
    """The request on an engine that is the whole model, without chain, scheduler and sockets."""
    decoder = request.decode.make_decoder(request.eos, StepCosts())
    session = Session(request.prompt, request.max_tokens, decoder=decoder, chunk=CHUNK)
    session.slot = 0
    frame = Frame(opened=[Opening(slot=0, sampling=request.sampling)])
    while session.finish_reason is None:
        frame.windows.append(session.next_window())
        result = engine.step(frame, received=0)
        assert isinstance(result, Result)
        session.commit(result.samples, result.guesses)
        frame = Frame()
    return session.generated
