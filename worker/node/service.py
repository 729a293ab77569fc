"""The worker's gRPC servicer: who may load, attach and relay, and in which order. Holds no model code."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import grpc.aio
import mlx.core as mx

from protos.brigade_pb2 import (
    AttachRequest,
    Contents,
    Credit,
    DigestReply,
    DigestRequest,
    HelloReply,
    HelloRequest,
    LoadProgress,
    LoadRequest,
    Result,
    StatusReply,
    StatusRequest,
)
from protos.brigade_pb2_grpc import NodeServicer
from worker.compute.engine import Engine
from worker.compute.header import dtype_name
from worker.compute.shard import Shard
from worker.errors import BrigadeError, FrameError, ModelError, NodeBusy, StageLost
from worker.model.checkpoint import Checkpoint
from worker.model.contents import check_contents, check_files
from worker.model.describe import describe
from worker.model.headers import unpack_headers
from worker.node.link import Link
from worker.node.loading import load_shard, open_checkpoint
from worker.node.network import ACCEPTED, PROTOCOL_VERSION, Network
from worker.node.stage import Stage
from worker.node.status import abort
from worker.process.call_thread import run_aside
from worker.process.machine import memory_budget
from worker.process.mlx_thread import MlxThread

Context = grpc.aio.ServicerContext


@dataclass(frozen=True)
class Loaded:
    """The shard this node holds, and what it answers."""

    request: LoadRequest
    stamp: tuple[tuple[str, int], ...]
    shard: Shard


class NodeService(NodeServicer):
    """One node: at most one shard, at most one chain."""

    def __init__(
        self,
        name: str,
        thread: MlxThread,
        network: Network,
        model: str | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """`model` is this node's own copy, if it is not where the coordinator says."""
        self.name = name
        self._thread = thread
        self._network = network
        self._model = model
        self._memory_bytes = memory_bytes
        self._loading = asyncio.Lock()
        self._loaded: Loaded | None = None
        self._attached: AttachRequest | None = None
        self._stage: Stage | None = None
        self._is_draining = False
        self._detached = asyncio.Event()
        self._detached.set()

    async def drain(self) -> None:
        """Take no new coordinator; return once no session is in progress here."""
        self._is_draining = True
        if self._stage:
            await self._stage.wait_idle()

    async def wait_detached(self) -> None:
        """Return once this node is part of no chain."""
        await self._detached.wait()

    async def Hello(self, request: HelloRequest, context: Context) -> HelloReply:
        async with self._reporting(context):
            if request.protocol_version != PROTOCOL_VERSION:
                raise ModelError(
                    f"speaks protocol {PROTOCOL_VERSION}, the coordinator speaks {request.protocol_version}; "
                    "install the same version of brigade on both"
                )
        return HelloReply(
            protocol_version=PROTOCOL_VERSION,
            node=self.name,
            memory_bytes=self._memory_bytes or memory_budget(),
            mlx_version=version("mlx"),
            mlx_lm_version=version("mlx-lm"),
        )

    async def Load(self, request: LoadRequest, context: Context) -> AsyncIterator[LoadProgress]:
        async with self._reporting(context), self._loading:
            self._refuse_if_busy()
            checkpoint, stamp = await run_aside(partial(self._open, request))
            contents = Contents()
            contents.CopyFrom(request.contents)
            request.ClearField("contents")  # what the coordinator knows may grow: the shard is the same
            if self._loaded and (self._loaded.request, self._loaded.stamp) == (request, stamp):
                nbytes = self._loaded.shard.nbytes
                yield LoadProgress(phase="kept", done=nbytes, total=nbytes)
                return
            self._loaded = None
            progress: asyncio.Queue[LoadProgress | None] = asyncio.Queue()
            load = asyncio.create_task(
                load_shard(
                    checkpoint, request.start, request.end, request.num_layers, self._thread, progress.put_nowait
                )
            )
            load.add_done_callback(lambda _: progress.put_nowait(None))
            try:
                while (report := await progress.get()) is not None:
                    yield report
            finally:
                load.cancel()  # if the coordinator has left; what the MLX thread is at ends by itself
            shard = await load
            await run_aside(partial(check_contents, checkpoint, contents))  # files that have only now arrived
            self._loaded = Loaded(request, checkpoint.stamp(), shard)

    async def Attach(self, request: AttachRequest, context: Context) -> AsyncIterator[Result]:
        async with self._reporting(context), contextlib.AsyncExitStack() as stack:
            self._refuse_if_busy()
            if self._loading.locked():
                raise NodeBusy("is loading for another coordinator; try again once it has")
            loaded = self._loaded_for(request)
            self._attached = request
            self._detached.clear()
            stack.callback(self._detach)
            link = None
            if request.successor:
                link = Link(self._network, request.successor_name, request.successor, request.epoch, request.stage)
                stack.push_async_callback(link.close)
                await link.wait_open()
            engine = Engine(loaded.shard, request.stage, loaded.request.dtype, self.name)
            stage = Stage(engine, self._thread, request.epoch, link.send if link else None)
            stack.push_async_callback(stage.stop)
            stage.start(*([link.wait_lost()] if link else []))
            self._stage = stage
            await context.send_initial_metadata(ACCEPTED)
            while True:
                yield await stage.next_result()

    async def Relay(self, parts: AsyncIterator[bytes], context: Context) -> AsyncIterator[Credit]:
        async with self._reporting(context):
            stage = self._stage_for(dict(context.invocation_metadata() or ()))
            async for credit in stage.take_hop(parts):
                yield credit

    async def Status(self, request: StatusRequest, context: Context) -> StatusReply:
        reply = StatusReply(clock=time.monotonic_ns(), peak_memory_bytes=mx.get_peak_memory())
        if self._stage:
            reply = self._stage.status()
        elif self._loaded:
            reply.weight_bytes = self._loaded.shard.nbytes
        reply.node = self.name
        return reply

    async def Digest(self, request: DigestRequest, context: Context) -> DigestReply:
        reply = DigestReply()
        async with self._reporting(context):
            if (loaded := self._loaded) is None:
                raise ModelError("holds no shard; load first")
            reply.digests.update(await self._thread.run(lambda: dict(loaded.shard.digests())))
        return reply

    @contextlib.asynccontextmanager
    async def _reporting(self, context: Context) -> AsyncIterator[None]:
        """Turn an exception into a status that names this node: one of the two places that may catch anything."""
        try:
            yield
        except BrigadeError as error:
            await abort(context, error.at(self.name))
        except Exception as error:
            await abort(context, StageLost(f"internal error: {error!r}", node=self.name))

    def _open(self, request: LoadRequest) -> tuple[Checkpoint, tuple[tuple[str, int], ...]]:
        """This node's copy of the model, if it is the one that the coordinator means, and its stamp."""
        checkpoint = open_checkpoint(self._model or request.model, unpack_headers(request.contents.headers))
        check_request(request, checkpoint)
        return checkpoint, checkpoint.stamp()

    def _refuse_if_busy(self) -> None:
        if self._is_draining:
            raise NodeBusy("is shutting down")
        if self._attached is not None:
            raise NodeBusy("already serves another coordinator; stop that one, or start a worker on another port")

    def _loaded_for(self, request: AttachRequest) -> Loaded:
        """The loaded shard, if it is the one that the coordinator means. Raises ModelError if it is not."""
        loaded, expected = self._loaded, request.loaded
        if loaded is None or loaded.request != expected:
            held = f"[{loaded.request.start}, {loaded.request.end}) of {loaded.request.model}" if loaded else "none"
            raise ModelError(
                f"expected to hold layers [{expected.start}, {expected.end}) of {expected.model}, holds {held} by now; "
                "start again"
            )
        return loaded

    def _detach(self) -> None:
        self._attached = self._stage = None
        self._detached.set()

    def _stage_for(self, metadata: dict[str, str | bytes]) -> Stage:
        """The stage that a hop with this metadata may feed. Raises FrameError if it is not the one before it."""
        attached, stage = self._attached, self._stage
        if attached is None or stage is None:
            raise FrameError("is not part of a chain; the coordinator attaches it first")
        expected = str(attached.epoch), str(attached.stage - 1)
        found = metadata.get("epoch"), metadata.get("stage")
        if found != expected:
            raise FrameError(f"expected a hop of (epoch, stage) {expected}, got {found}")
        return stage


def check_request(request: LoadRequest, checkpoint: Checkpoint) -> None:
    """Refuse before anything is read: another model, or layers that it does not have.

    Raises:
        ModelError: naming both values.
    """
    ours, theirs = checkpoint.fingerprint, request.fingerprint
    for part, what in (("config", "config.json"), ("tokenizer", "tokenizer files"), ("tensors", "tensor headers")):
        here, there = getattr(ours, part), getattr(theirs, part)
        if here != there:
            raise ModelError(
                f"its {what} of {checkpoint.name} (sha256 {here[:12]}) differ from the coordinator's ({there[:12]}); "
                "copy the same model to both nodes"
            )
    check_contents(checkpoint, request.contents)
    spec = describe(checkpoint)
    layers = f"[{request.start}, {request.end}) of {request.num_layers} layers"
    if request.num_layers != spec.num_layers or not 0 < request.start < request.end <= spec.num_layers:
        raise ModelError(f"cannot hold {layers}: its copy of {checkpoint.name} has {spec.num_layers}")
    if request.dtype != spec.dtype:
        expected, found = dtype_name(request.dtype), dtype_name(spec.dtype)
        raise ModelError(f"expected hidden states of {expected}, its copy of {checkpoint.name} makes {found}")
    check_files(checkpoint, request.start, request.end, request.num_layers)
