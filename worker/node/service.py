"""The RPCs of a node: check the caller, call the part that decides, log refusals."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import partial
from importlib.metadata import version
from logging import Logger

from protos.brigade_pb2 import (
    AttachRequest,
    CompileReply,
    Coordinator,
    Credit,
    DigestReply,
    DigestRequest,
    ExamineRequest,
    Facts,
    FilePart,
    Grammar,
    Held,
    HelloReply,
    HelloRequest,
    LinkReply,
    LinkRequest,
    ListenRequest,
    LoadRequest,
    MeasureRequest,
    Piece,
    PrefixesReply,
    PrefixesRequest,
    ProbePart,
    ProbeReply,
    Report,
    ResultsRequest,
    Speed,
    StatusReply,
    StatusRequest,
    UnloadReply,
)
from protos.brigade_pb2_grpc import HopServicer, NodeServicer
from worker.config import ClusterConfig
from worker.errors import BrigadeError, FrameError, ModelError, ModelLacking, StageLost
from worker.node.attachment import Attachment
from worker.node.configuration import configuration_of
from worker.node.facts import read_facts
from worker.node.framing import write_report
from worker.node.lifecycle import Worker
from worker.node.links import answer_probe, measure_link, open_port
from worker.node.log import worker_log
from worker.node.model_sources import ModelSources
from worker.node.network import ACCEPTED, PROTOCOL_VERSION, REQUEST_S, UPDATE_BOTH, Network
from worker.node.prefix_store import file_parts, join_parts, list_prefixes, read_piece
from worker.node.rpc_errors import Context, next_within, reporting
from worker.node.speed_cache import kept_speed, measured_speed
from worker.node.stage import Outcome, Stage
from worker.node.weights_receive import receive_weights
from worker.platform.machine import memory_budget
from worker.platform.threads import MlxThread, run_in_thread


class NodeService(NodeServicer):
    """One node: at most one shard, at most one chain."""

    def __init__(
        self,
        name: str,
        thread: MlxThread,
        network: Network,
        sources: ModelSources | None = None,
        memory_bytes: int | None = None,
        cluster: ClusterConfig | None = None,
        given_name: str = "",
        log: Logger | None = None,
    ) -> None:
        """Make a node with an empty worker.

        Args:
            sources: the models that coordinators may load; by default the bundled one and those of the hub's cache.
            memory_bytes: the memory that the node was told to offer; by default its memory budget.
            cluster: its own configuration: coordinators see it, and its `cache_disk` limits prefixes on disk.
            given_name: its name, if that is no default.
        """
        self.name = name
        self.log = log or worker_log(name, None)
        self.worker = Worker(name, thread, sources or ModelSources(), self.log)
        self.network = network
        self.thread = thread
        self._cache = sources.cache if sources else None
        self._memory_bytes = memory_bytes
        cluster = cluster or ClusterConfig()
        self._prefix_limit = cluster.cache_disk
        self._configuration = configuration_of(cluster, given_name)
        self._incarnation = secrets.token_hex(8)
        self._started = time.time_ns()

    @property
    def num_slots(self) -> int:
        """The number of sessions in progress and of kept prefixes."""
        return self.worker.stage.executor.num_slots if self.worker.stage else 0

    # Models and chains

    async def Hello(self, request: HelloRequest, context: Context) -> HelloReply:
        async with self._serving(context, "a coordinator"):
            if (theirs := request.protocol_version) != PROTOCOL_VERSION:
                said = f"speaks protocol {PROTOCOL_VERSION}, the coordinator speaks {theirs}"
                raise ModelError(f"{said}; {UPDATE_BOTH}")
        return HelloReply(
            protocol_version=PROTOCOL_VERSION,
            node=self.name,
            memory_bytes=self._memory_bytes or memory_budget(),
            mlx_version=version("mlx"),
            mlx_lm_version=version("mlx-lm"),
            incarnation=self._incarnation,
            configuration=self._configuration,
            certificate_expires=self.network.expires,
            started=self._started,
        )

    async def Load(self, request: LoadRequest, context: Context) -> None:
        async with self._serving(context, f"to load for coordinator {request.coordinator.name}"):
            await self.worker.load(request, context.write)

    async def Attach(self, request: AttachRequest, context: Context) -> None:
        async with reporting(context, self.name, self.log), contextlib.AsyncExitStack() as stack:
            with refusals_logged(self.log, f"to join the chain of coordinator {request.coordinator.name}"):
                self.network.require_coordinator(context)
                if self._prefix_limit is not None:
                    request.prefix_bytes = min(request.prefix_bytes, self._prefix_limit)
                attaching = self.worker.attached(request, context.write, self.network)
                attachment = await stack.enter_async_context(attaching)
            with self._chain_logged(request, attachment):
                await context.send_initial_metadata(ACCEPTED)
                await attachment.serve()

    async def Status(self, request: StatusRequest, context: Context) -> StatusReply:
        async with self._serving(context):
            reply = self.worker.status()
            reply.node = self.name
            return reply

    async def Digest(self, request: DigestRequest, context: Context) -> DigestReply:
        async with self._serving(context):
            return DigestReply(digests=await self.worker.digests())

    async def Compile(self, request: Grammar, context: Context) -> CompileReply:
        async with self._serving(context):
            await self.worker.compile(request)
            return CompileReply()

    async def Unload(self, request: Coordinator, context: Context) -> UnloadReply:
        async with self._serving(context, f"to release its layers for coordinator {request.name}"):
            await self.worker.unload(request)
            return UnloadReply()

    async def Feed(self, messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[Held]:
        async with self._serving(context, "to receive weights"):
            # read before the other refusals: a sender whose write fails gets no status
            first = await next_within(REQUEST_S, messages, "weights") or b""
            self.worker.refuse_if_draining()
            if self._cache is None:
                raise ModelError("takes no model from a coordinator: `pull` in its own cluster.yaml says so")
            self.worker.free_files()
            has_checksums = self.network.wire.has_checksums
            receiving = receive_weights(self._cache, first, messages, self.log, has_checksums=has_checksums)
            async with contextlib.aclosing(receiving):
                async for held in receiving:
                    yield held

    async def Prefixes(self, request: PrefixesRequest, context: Context) -> PrefixesReply:
        async with self._serving(context, "to list prefixes"):
            return await run_in_thread(partial(list_prefixes, request))

    async def ExportPiece(self, request: Piece, context: Context) -> None:
        async with self._serving(context, "to export a piece of a prefix"):
            for part in file_parts(request, await run_in_thread(partial(read_piece, request))):
                await context.write(part)

    async def ImportPiece(self, parts: AsyncIterator[FilePart], context: Context) -> Piece:
        async with self._serving(context, "to import a piece of a prefix"):
            store = self.worker.require_prefixes()
            piece, content = await join_parts(parts)
            await run_in_thread(partial(store.add, piece, content))
            return piece

    async def Prompts(self, request: ResultsRequest, context: Context) -> None:
        async with reporting(context, self.name, self.log):
            await _report(self.stage_of(request, context).forwarded(), context)

    # The machine and its links

    async def Measure(self, request: MeasureRequest, context: Context) -> Speed:
        async with self._serving(context, "to measure its speed"):
            checkpoint = await self.worker.find(request.model)
            if self.worker.is_free:  # else a measurement would delay what is under way
                async with self.worker.turn():
                    if self.worker.is_free:  # still: others may have had their turn
                        return await measured_speed(checkpoint, self.thread, anew=request.anew)
            return await kept_speed(checkpoint) or Speed()

    async def MeasureLink(self, request: LinkRequest, context: Context) -> LinkReply:
        async with self._serving(context):
            return await measure_link(self.network, request)

    async def Probe(self, parts: AsyncIterator[ProbePart], context: Context) -> AsyncIterator[ProbeReply]:
        async with reporting(context, self.name, self.log):
            self.network.require_tls13(context)
            async for reply in answer_probe(parts, has_checksums=self.network.wire.has_checksums):
                yield reply

    async def Examine(self, request: ExamineRequest, context: Context) -> Facts:
        async with self._serving(context):
            if request.only_time:
                return Facts(node=self.name, time=time.time_ns())
            return await read_facts(self.name, self.network, self._memory_bytes)

    async def Listen(self, request: ListenRequest, context: Context) -> None:
        async with self._serving(context), open_port(self.network, request) as port:
            await context.write(port.listener)
            await port.answer()

    # Callers

    def stage_of(self, asked: ResultsRequest, context: Context) -> Stage:
        """Return the stage whose results are asked for. Raises FrameError unless its coordinator asks, in its epoch."""
        with refusals_logged(self.log, "to report results"):
            self.network.require_coordinator(context)
            stage, request = self.worker.place()
            if (asked.epoch, asked.coordinator_id) != (request.epoch, request.coordinator.id):
                raise FrameError(f"expected its coordinator to ask for the results of epoch {request.epoch}")
            return stage

    @contextlib.asynccontextmanager
    async def _serving(self, context: Context, logged: str = "") -> AsyncIterator[None]:
        """Serve a call of a coordinator; log why it is refused if `logged` says what it asks for."""
        async with reporting(context, self.name, self.log):
            with refusals_logged(self.log, logged) if logged else contextlib.nullcontext():
                self.network.require_coordinator(context)
                yield

    @contextlib.contextmanager
    def _chain_logged(self, request: AttachRequest, attachment: Attachment) -> Iterator[None]:
        """Log that the node joined a chain, and at the end that it left, with the reason of a failure."""
        chain = f"the chain of coordinator {request.coordinator.name}"
        place = f"stage {request.stage} of {request.num_stages}, epoch {request.epoch}"
        self.log.info("joined %s as %s", chain, place)
        why = ""
        try:
            yield
        except BrigadeError as error:
            why = f": {error}"
            raise
        except asyncio.CancelledError:  # perhaps because of the failure that the stage is about to report
            failure = attachment.stage.failure if attachment.stage else None
            if failure and not isinstance(failure, StageLost):  # that it was stopped, or another node was lost
                why = f": {failure}"
            raise
        finally:
            self.log.info("left %s%s", chain, why)


class HopService(HopServicer):
    """The streams of a node's hops. It lives on the MLX thread's loop, where it finds the stage that they lead to."""

    def __init__(self, node: NodeService) -> None:
        self._node = node

    async def Relay(self, parts: AsyncIterator[bytes], context: Context) -> AsyncIterator[Credit]:
        async with reporting(context, self._node.name, self._node.log):
            with refusals_logged(self._node.log, "a hop"):
                hop = self._stage_after(context).receive(parts)
            async with contextlib.aclosing(hop):
                async for credit in hop:
                    yield credit

    async def Results(self, request: ResultsRequest, context: Context) -> None:
        async with reporting(context, self._node.name, self._node.log):
            await _report(self._node.stage_of(request, context).outcomes(), context)

    def _stage_after(self, context: Context) -> Stage:
        """Return the stage that this hop leads to. Raises FrameError unless it comes from the stage before."""
        stage, request = self._node.worker.place()
        self._node.network.require_name(context, request.predecessor_name)
        metadata = dict(context.invocation_metadata() or ())
        expected = str(request.epoch), str(request.stage - 1)
        found = metadata.get("epoch"), metadata.get("stage")
        if found != expected:
            sender = metadata.get("node") or "a node without a name"
            raise FrameError(
                f"expected a hop of (epoch, stage) {expected} from {request.predecessor_name}, "
                f"got {found} from {sender!s}"
            )
        return stage


async def _report(outcomes: AsyncGenerator[Outcome, None], context: Context) -> None:
    """Write what a stage makes until it ends. Raises the reason."""
    async with contextlib.aclosing(outcomes):
        async for each in outcomes:
            await context.write(each if isinstance(each, bytes) else write_report(Report(result=each)))


@contextlib.contextmanager
def refusals_logged(log: Logger, what: str) -> Iterator[None]:
    """Log why `what` is refused if the body raises."""
    try:
        yield
    except ModelLacking as error:
        log.info("lacks weights and waits for them: %s", error.message.partition(";")[0])
        raise
    except BrigadeError as error:
        log.warning("refused %s: %s", what, error)
        raise
