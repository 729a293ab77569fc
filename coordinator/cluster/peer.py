"""Peer: the calls to one worker. Every call has a deadline, and every error names the node."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.metadata import version
from typing import NoReturn, TypeVar

import grpc.aio

from coordinator.cluster.addresses import AddressRace
from protos.brigade_pb2 import (
    AttachRequest,
    Coordinator,
    DigestRequest,
    ExamineRequest,
    Facts,
    Grammar,
    Held,
    HelloReply,
    LinkReply,
    LinkRequest,
    Listener,
    ListenRequest,
    LoadProgress,
    LoadRequest,
    MeasureRequest,
    Piece,
    PrefixesReply,
    PrefixesRequest,
    Report,
    Speed,
    StatusReply,
    StatusRequest,
    Transport,
)
from protos.brigade_pb2_grpc import NodeStub
from worker.config import ClusterConfig
from worker.errors import BrigadeError, ModelError, NodeSilent, StageLost
from worker.node.certificates import Role, expiry_warning, reported_expiry
from worker.node.configuration import MOST_DIFFERENCES, configuration_of, differing
from worker.node.framing import Wire, read_report
from worker.node.hop import Deliver, Link, open_push, results
from worker.node.links import measure_link
from worker.node.network import PROTOCOL_VERSION, UPDATE_BOTH, Network
from worker.node.prefix_store import file_parts, join_parts
from worker.node.rpc_errors import error_of
from worker.platform.text import counted, printable

T = TypeVar("T")

COORDINATOR_ID = secrets.token_hex(8)  # of this process, which may attach again the workers that it has attached
_HELLO_S = 5.0
_ATTACH_S = 10.0
STALL_S = 120.0  # without progress of a load
_LONGEST_PHASE = 40
_DIGEST_S = 600.0
_UNLOAD_S = 5.0
_COMPILE_S = 5.0  # of a grammar
_EXAMINE_S = 40.0  # several commands, 15 s each at most
_LINK_S = 40.0  # for its examination: a gRPC call and three listeners
_MEASURE_S = 20.0  # two seconds of measuring, after those for other callers, and the headers of a slow disk


class Peer:
    """A worker's name, addresses and calls."""

    def __init__(
        self,
        name: str,
        addresses: Sequence[str],
        network: Network,
        say: Callable[[str], None] = lambda line: None,
        cluster: ClusterConfig | None = None,
    ) -> None:
        """
        Args:
            addresses: in the order of preference.
            say: takes lines for the user.
            cluster: if given, each process that answers is compared with this node, whose configuration it is.
        """
        self.name = name
        self._network = network
        self._say = say
        self._cluster = cluster
        self._compared = ""  # the incarnation of the process that was
        self._addresses = AddressRace(name, addresses, network, say)
        self._attachment: grpc.aio.UnaryStreamCall[AttachRequest, Report] | None = None
        self.is_draining = False  # it has announced that it shuts down

    @property
    def address(self) -> str:
        """The address in use."""
        return self._addresses.address

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses at which other nodes can reach the process in use."""
        return self._addresses.leading_to_it

    async def hello(self, within_s: float | None = None) -> HelloReply:
        """Return the worker's greeting; while it is part of a chain, ask only at the address that the chain uses.

        Raises:
            StageLost: nothing answers, or no worker. CallerRefused, ConfigError: one side does not trust the other.
            ModelError: it speaks another version of the protocol.
        """
        ask = self._addresses.ask if self._attachment is None else self._addresses.ask_in_use
        reply = await ask(_HELLO_S if within_s is None else within_s)
        if reply.protocol_version != PROTOCOL_VERSION:
            raise ModelError(
                f"speaks protocol {reply.protocol_version}, this coordinator {PROTOCOL_VERSION}; {UPDATE_BOTH}",
                node=self.name,
            )
        reply.mlx_version, reply.mlx_lm_version = printable(reply.mlx_version), printable(reply.mlx_lm_version)
        if self._cluster is not None and reply.incarnation != self._compared:
            self._compared = reply.incarnation
            for difference in differences(self.name, self._cluster, reply):
                self._say(f"warning: {difference}")
        return reply

    async def is_elsewhere(self, within_s: float) -> bool:
        """Whether it has several addresses and answers at one of them now."""
        if len(self._addresses.addresses) == 1:
            return False
        try:
            await self._addresses.ask(within_s, waits=False)
        except BrigadeError:
            return False
        return True

    async def load(self, request: LoadRequest, progress: Callable[[LoadProgress], None]) -> None:
        """Have the worker load a shard. Raises its refusal, or StageLost if it stalls."""
        call = self._stub.Load(request)
        with self.naming():
            try:
                while True:
                    async with asyncio.timeout(STALL_S):
                        report = await call.read()
                    if report is grpc.aio.EOF:  # type: ignore[attr-defined]
                        return
                    report.phase = printable(report.phase, _LONGEST_PHASE)
                    progress(report)
            except TimeoutError:
                raise NodeSilent(f"no progress in loading for {STALL_S:.0f} s", node=self.name) from None
            finally:
                call.cancel()

    @asynccontextmanager
    async def pushing(self) -> AsyncIterator[grpc.aio.StreamStreamCall[bytes, Held]]:
        """Open the call that pushes weights to the worker. Wrap its errors in `naming`."""
        channel = self._network.channel(self.name, self.address, alone=True)
        call = open_push(channel)
        try:
            yield call
        finally:
            call.cancel()
            await channel.close(grace=None)

    @property
    def wire(self) -> Wire:
        """The framing of the bytes on links to it."""
        return self._network.wire

    async def attach(self, request: AttachRequest) -> None:
        """Join the worker to the chain, again if it is part of one. Raises its refusal, or StageLost."""
        self.detach()
        self.is_draining = False
        self._attachment = self._stub.Attach(request)
        with self.naming():
            try:
                async with asyncio.timeout(_ATTACH_S):
                    if not await self._attachment.initial_metadata():
                        await self._attachment.read()  # raises the refusal
            except TimeoutError:
                raise StageLost(f"did not join the chain within {_ATTACH_S:.0f} s", node=self.name) from None

    def link(self, epoch: int, stage: int, sender: str = "") -> Link:
        """Return a hop to the worker from this process, which is the node `sender` and the stage `stage`.

        Call it on the MLX thread's loop.
        """
        return Link(self._network, self.name, self.address, epoch, stage, sender)

    async def results(self, epoch: int, deliver: Deliver, *, of_prompts: bool = False) -> None:
        """Deliver the reports of the attached worker until it is lost. Raises the reason.

        Run it on the MLX thread's loop, or on the main loop for those `of_prompts`.
        """
        where = self._network, self.name, self.address
        await results(*where, epoch, COORDINATOR_ID, deliver, of_prompts=of_prompts)

    async def watch(self, on_draining: Callable[[], None] = lambda: None) -> NoReturn:
        """Wait until the attached worker leaves the chain, and raise the reason.

        `on_draining` is called when it announces that it shuts down.
        """
        assert self._attachment is not None
        with self.naming():
            async for report in self._attachment:
                read_report(report.SerializeToString(deterministic=True), self.name)  # checks the sum
                if report.HasField("draining") and not self.is_draining:
                    self.is_draining = True
                    on_draining()
        raise StageLost("left the chain", node=self.name)

    async def status(self, timeout_s: float) -> StatusReply:
        """Return what the worker is doing. Raises StageLost if it does not answer within `timeout_s`."""
        return await self._named(self._stub.Status(StatusRequest(), timeout=timeout_s))

    async def clock_offset(self) -> int:
        """Return this worker's monotonic clock minus ours, nanoseconds, by the quickest of five exchanges.

        An offset within the error of the measurement counts as 0: nodes of one machine share a clock.
        """
        found = []
        for _ in range(5):
            before = time.monotonic_ns()
            theirs = (await self.status(_HELLO_S)).clock
            after = time.monotonic_ns()
            found.append((after - before, theirs - (before + after) // 2))
        round_trip, offset = min(found)
        return 0 if abs(offset) <= round_trip // 2 else offset

    async def measure(self, request: MeasureRequest) -> Speed:
        """Return its speed at this model; empty if it does not know it and has no time to measure.

        Raises:
            BrigadeError: its refusal, or StageLost.
        """
        return await self._named(self._stub.Measure(request, timeout=_MEASURE_S))

    async def measure_link(
        self, successor: "Peer | None" = None, listeners: Sequence[Listener] = (), *, examined: bool = False
    ) -> LinkReply:
        """Return the speed of the link from this worker to another one, or else from this process to this worker.

        Args:
            listeners: of the far end, for further measurements.
            examined: report the interfaces of the connection, too.
        Raises:
            BrigadeError: its refusal, or StageLost.
        """
        to, addresses = (successor, successor.addresses) if successor else (self, [self.address])
        request = LinkRequest(node=to.name, addresses=addresses, examined=examined, listeners=listeners)
        if successor is None:
            return await measure_link(self._network, request)
        return await self._named(self._stub.MeasureLink(request, timeout=_LINK_S if examined else _MEASURE_S))

    async def examine(self, *, only_time: bool = False) -> Facts:
        """Return the facts that it reports of itself and of its machine.

        Raises:
            ModelError: it is too old to report any. BrigadeError: its refusal, or StageLost.
        """
        request, timeout_s = ExamineRequest(only_time=only_time), _HELLO_S if only_time else _EXAMINE_S
        try:
            return await self._stub.Examine(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ModelError("is an older Brigade, which cannot be examined", node=self.name) from error
            raise error_of(error, self.name) from error

    @asynccontextmanager
    async def listening(self, transport: Transport) -> AsyncIterator[Listener]:
        """Have the worker listen for one conversation, at most until the context ends. Raises as `examine`."""
        call = self._stub.Listen(ListenRequest(transport=transport, address=self.address), timeout=_LINK_S)
        try:
            yield await self._named(call.read())
        finally:
            call.cancel()

    async def digests(self) -> dict[str, str]:
        """Return a digest per tensor of the loaded shard."""
        return dict((await self._named(self._stub.Digest(DigestRequest(), timeout=_DIGEST_S))).digests)

    async def prefixes(self, request: PrefixesRequest) -> PrefixesReply:
        """Return the pieces of prefixes on its disk, which are removed if the request says so."""
        return await self._named(self._stub.Prefixes(request, timeout=_EXAMINE_S))

    async def export_piece(self, piece: Piece) -> bytes:
        """Return the content of the file of a piece of a prefix. Raises PrefixLost if it is not there, or StageLost."""
        async with self._network.channel(self.name, self.address, alone=True) as channel:
            with self.naming():
                _, content = await join_parts(NodeStub(channel).ExportPiece(piece))
        return content

    async def import_piece(self, piece: Piece, content: bytes) -> None:
        """Have the worker keep the file of a piece of a prefix. Raises its refusal, or StageLost."""
        async with self._network.channel(self.name, self.address, alone=True) as channel:
            await self._named(NodeStub(channel).ImportPiece(file_parts(piece, content)))

    async def compile(self, grammar: Grammar) -> None:
        """Have the worker prepare a grammar. Raises its refusal, or StageLost."""
        await self._named(self._stub.Compile(grammar, timeout=_COMPILE_S))

    async def unload(self, coordinator: Coordinator) -> None:
        """Have the worker free its memory. Raises NodeBusy if it serves another coordinator, or StageLost."""
        await self._named(self._stub.Unload(coordinator, timeout=_UNLOAD_S))

    def detach(self) -> None:
        """Make the worker leave the chain: it drops every slot and keeps its shard."""
        if self._attachment is not None:
            self._attachment.cancel()
            self._attachment = None

    @property
    def _stub(self) -> NodeStub:
        return self._addresses.stub

    async def close(self) -> None:
        self.detach()
        await self._addresses.close()

    async def _named(self, call: Awaitable[T]) -> T:
        with self.naming():
            return await call

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Turn the gRPC error of a call to this worker into the error that it stands for."""
        try:
            yield
        except grpc.RpcError as error:
            raise error_of(error, self.name) from error


@asynccontextmanager
async def peers_of(cluster: ClusterConfig, network: Network) -> AsyncIterator[list[Peer]]:
    """Open the workers of a configuration, in its order. Raises ConfigError if this node's certificate is not valid."""
    async with AsyncExitStack() as stack:
        peers = []
        for worker in cluster.workers:
            peers.append(Peer(worker.name, worker.addresses, network))
            stack.push_async_callback(peers[-1].close)
        yield peers


async def greet(peers: Sequence[Peer]) -> list[HelloReply]:
    """Return the greetings of all workers, in their order.

    Raises:
        BrigadeError: the error of the worker that cannot take part, or a line for each; StageLost if any is silent.
    """
    outcomes = await asyncio.gather(*(peer.hello() for peer in peers), return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    raise_worst(failures)
    return [outcome for outcome in outcomes if isinstance(outcome, HelloReply)]


def raise_worst(failures: Sequence[BaseException | None]) -> None:
    """Raise the failures of several workers, if any, as one error with a line for each; a StageLost if one is."""
    found = [failure for failure in failures if failure is not None]
    errors = [failure for failure in found if isinstance(failure, BrigadeError)]
    if len(errors) < len(found):
        raise next(failure for failure in found if not isinstance(failure, BrigadeError))
    if len(errors) > 1:
        worst = next((error for error in errors if isinstance(error, StageLost)), errors[0])
        raise type(worst)("\n".join(map(str, errors)))
    if errors:
        raise errors[0]


def differences(name: str, cluster: ClusterConfig, greeting: HelloReply) -> Iterator[str]:
    """Yield a line for each difference between this node and the worker `name` that the user should know of."""
    # other versions have other kernels, the likeliest reason for tokens that differ from those of one Mac
    for package, theirs in (("mlx", greeting.mlx_version), ("mlx-lm", greeting.mlx_lm_version)):
        if theirs != (ours := version(package)):
            yield f"worker {name} has {package} {theirs}, this node {ours}"
    if until := reported_expiry(greeting.certificate_expires):
        yield from filter(None, [expiry_warning(name, Role.WORKER, until, Network.of(cluster).launch_hint(name))])
    if (called := greeting.configuration.name) not in ("", name):
        yield f"worker {name} calls itself {printable(called)}: one of both has the wrong name or address"
    found = differing(greeting.configuration, configuration_of(cluster))
    for key, there, here in found[:MOST_DIFFERENCES]:
        yield f"worker {name} has another configuration: {key} is {there} there, {here} here"
    if more := found[MOST_DIFFERENCES:]:
        keys = counted(len(more), "more key differs", "more keys differ")
        yield f"worker {name} has another configuration: {keys}"
