"""The RPCs about models and chains: who may load, attach and relay, and in which order. Holds no model code."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from importlib.metadata import version

from protos.brigade_pb2 import (
    AttachRequest,
    CompileReply,
    Configuration,
    Coordinator,
    Credit,
    DigestReply,
    DigestRequest,
    Grammar,
    Held,
    HelloReply,
    HelloRequest,
    LoadProgress,
    LoadRequest,
    MeasureRequest,
    Speed,
    StatusReply,
    StatusRequest,
    UnloadReply,
)
from worker.errors import FrameError, ModelError, NodeBusy, StageLost
from worker.node.attachment import Attachment, check_place
from worker.node.copies import Copies
from worker.node.due import Due
from worker.node.examinee import Examinee
from worker.node.feeding import be_fed, next_message
from worker.node.keep_alive import letting_go
from worker.node.loader import Loader
from worker.node.log import Log
from worker.node.measured import kept_speed, measured_speed
from worker.node.network import ACCEPTED, PROTOCOL_VERSION, Network
from worker.node.own_models import OwnModels
from worker.node.servicer import Context
from worker.node.stage import Stage
from worker.process.machine import memory_budget
from worker.process.mlx_thread import MlxThread
from worker.process.to_the_end import to_the_end
from worker.process.use import Use
from worker.store.store import Store


class NodeService(Examinee):
    """One node: at most one shard, at most one chain."""

    def __init__(
        self,
        name: str,
        thread: MlxThread,
        network: Network,
        models: OwnModels | None = None,
        memory_bytes: int | None = None,
        configuration: Configuration | None = None,
        log: Log | None = None,
        store: Store | None = None,
    ) -> None:
        """`models` are those that coordinators may have it load; by default the bundled and the hub cache's.

        `store` takes what they send of others.
        """
        super().__init__(name, network, log or Log(name, None), memory_bytes)
        self._thread = thread
        self._configuration = configuration
        self._incarnation = secrets.token_hex(8)
        self._started = time.time_ns()
        self._use = Use()
        self._due = Due(self._use)
        self._store = store
        self._loader = Loader(thread, Copies(models or OwnModels(), store), self.log)
        self._attachment: Attachment | None = None
        self._is_draining = False
        self._detached = asyncio.Event()
        self._detached.set()

    @property
    def num_slots(self) -> int:
        """Sessions in progress here, and prefixes that are kept of others."""
        return self._stage.engine.num_slots if self._stage else 0

    async def drain(self) -> None:
        """Take no new coordinator, have this one send no new session; return once no slot is open."""
        self._is_draining = True
        if self._attachment:
            self._attachment.say_draining()
        await self.wait_idle()

    async def wait_idle(self) -> None:
        """Return once no slot is open."""
        if self._stage:
            await self._stage.wait_idle()

    def letting_go(self, keep_alive_s: float | None) -> contextlib.AbstractAsyncContextManager[None]:
        """Have it hold nothing that has not been used for so long, until the end of the context; None keeps it."""
        return letting_go(self._use, self._loader, keep_alive_s, self.log)

    async def wait_detached(self) -> None:
        """Return once this node is part of no chain."""
        await self._detached.wait()

    async def Hello(self, request: HelloRequest, context: Context) -> HelloReply:
        async with self._reporting(context):
            with self.log.refusing("a coordinator"):
                self._network.require_coordinator(context)
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
            incarnation=self._incarnation,
            configuration=self._configuration,
            certificate_expires=self._network.expires,
            started=self._started,
        )

    async def Load(self, request: LoadRequest, context: Context) -> None:
        async with self._reporting(context):
            with self.log.refusing(f"to load for coordinator {request.coordinator.name}"):
                self._network.require_coordinator(context)
                async with self._loader.turn(context.write):
                    await self._make_way_for(request.coordinator)
                    with self._due.loading_for(request.coordinator):
                        await self._loader.load(request, context.write)

    async def Attach(self, request: AttachRequest, context: Context) -> None:
        async with self._reporting(context), contextlib.AsyncExitStack() as stack:
            with self.log.refusing(f"to join the chain of coordinator {request.coordinator.name}"):
                self._network.require_coordinator(context)
                await self._make_way_for(request.coordinator, request.epoch)
                if self._loader.is_busy:
                    raise NodeBusy("is loading a shard; try again once it has")
                self._loader.loaded_as(request.loaded)
                check_place(request)
                stack.enter_context(self._use.using())
                attachment = Attachment(request, context.write)
                await stack.enter_async_context(self._holding(attachment))
                await attachment.open(
                    self._loader.loaded_as(request.loaded).shard, self._thread, self._network, self.name
                )
                self._refuse_if_draining()
                self._due.end()
            with self.log.in_chain(request):
                await context.send_initial_metadata(ACCEPTED)
                await attachment.report_results()

    async def Relay(self, parts: AsyncIterator[bytes], context: Context) -> AsyncIterator[Credit]:
        async with self._reporting(context):
            with self.log.refusing("a hop"):
                hop = self._stage_for(context).take_hop(parts)
            async for credit in hop:
                yield credit

    async def Status(self, request: StatusRequest, context: Context) -> StatusReply:
        async with self._reporting(context):
            self._network.require_coordinator(context)
        reply = self._stage.status() if self._stage else self._loader.status()
        reply.node = self.name
        return reply

    async def Digest(self, request: DigestRequest, context: Context) -> DigestReply:
        async with self._reporting(context):
            self._network.require_coordinator(context)
            with self._use.using():
                return DigestReply(digests=await self._loader.digests())

    async def Compile(self, request: Grammar, context: Context) -> CompileReply:
        async with self._reporting(context):
            self._network.require_coordinator(context)
            await self._loader.compile(request)
            return CompileReply()

    async def Unload(self, request: Coordinator, context: Context) -> UnloadReply:
        async with self._reporting(context):
            with self.log.refusing(f"to let its layers go for coordinator {request.name}"):
                self._network.require_coordinator(context)
                async with self._loader.turn(_say_nothing):
                    await self._make_way_for(request)
                    self._due.refuse_others(request)
                    await self._loader.let_go(f"coordinator {request.name} is idle")
                return UnloadReply()

    async def Measure(self, request: MeasureRequest, context: Context) -> Speed:
        async with self._reporting(context):
            with self.log.refusing("to measure its speed"):
                self._network.require_coordinator(context)
                checkpoint = await self._loader.find(request.model)
                if self._attachment or self._loader.is_busy:  # who serves is not to be held up
                    return await kept_speed(checkpoint) or Speed()
                async with self._loader.turn(_say_nothing):
                    return await measured_speed(checkpoint, self._thread, anew=request.anew)

    async def Feed(self, messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[Held]:
        async with self._reporting(context):
            # before anything is refused: a sender whose write fails hears of no status
            first = await next_message(messages) or b""
            with self.log.refusing("to be fed"):
                self._network.require_coordinator(context)
                self._refuse_if_draining()
                if self._store is None:
                    raise ModelError("takes no model from a coordinator: `pull` in its own cluster.yaml says so")
                if not (self._attachment or self._loader.is_busy or self._due.is_to_come):
                    self._loader.free_files()
                has_checksums, received = self._network.wire.has_checksums, self.log.received
                feeding = be_fed(self._store, first, messages, has_checksums=has_checksums, received=received)
                async with contextlib.aclosing(feeding):
                    async for held in feeding:
                        yield held

    @property
    def _stage(self) -> Stage | None:
        return self._attachment.stage if self._attachment else None

    @contextlib.asynccontextmanager
    async def _holding(self, attachment: Attachment) -> AsyncIterator[None]:
        """This node belongs to the attachment's chain, until whoever serves it is done or replaced."""
        self._attachment = attachment
        self._detached.clear()
        try:
            yield
        except asyncio.CancelledError:
            if not attachment.is_replaced:
                raise
            raise StageLost("was attached anew by the same coordinator") from None
        finally:
            await to_the_end(self._let_go(attachment))  # grpc cancels this task whenever the coordinator goes

    async def _let_go(self, attachment: Attachment) -> None:
        """Nothing runs between its end and this node's being free: who waits for it would find it here for ever."""
        try:
            await attachment.close()
        finally:
            self._attachment = None
            self._detached.set()

    async def _make_way_for(self, coordinator: Coordinator, epoch: int | None = None) -> None:
        """End the attachment that this coordinator may still have here.

        Raises:
            NodeBusy: the node serves another coordinator, or is about to end.
            FrameError: the epoch lies before that of the attachment.
        """
        self._refuse_if_draining()
        while attachment := self._attachment:
            holder = attachment.request
            if not coordinator.id or coordinator.id != holder.coordinator.id:
                raise NodeBusy("already serves another coordinator; stop that one, or start a worker on another port")
            if epoch is not None and epoch < holder.epoch:
                raise FrameError(f"expected epoch {holder.epoch} or a later one, got {epoch}")
            await attachment.replace()

    def _refuse_if_draining(self) -> None:
        if self._is_draining:
            raise NodeBusy("is shutting down")

    def _stage_for(self, context: Context) -> Stage:
        """The stage that this hop may feed. Raises FrameError if it is not the hop of the stage before it."""
        if self._attachment is None or self._stage is None:
            raise FrameError("is not part of a chain; the coordinator attaches it first")
        request = self._attachment.request
        self._network.require_name(context, request.predecessor_name)
        metadata = dict(context.invocation_metadata() or ())
        expected = str(request.epoch), str(request.stage - 1)
        found = metadata.get("epoch"), metadata.get("stage")
        if found != expected:
            sender = metadata.get("node") or "nobody by name"
            raise FrameError(
                f"expected a hop of (epoch, stage) {expected} from {request.predecessor_name}, "
                f"got {found} from {sender!s}"
            )
        return self._stage


async def _say_nothing(progress: LoadProgress) -> None:
    """For a turn that is free."""
