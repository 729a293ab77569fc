"""Whoever connects to a worker's port, or answers in a worker's place: streams go on, or end by name; nothing grows."""

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from coordinator.cluster import chain as chain_module
from coordinator.cluster.chain import Chain
from coordinator.cluster.peer import Peer, differences
from coordinator.engine.engine import Engine
from coordinator.planning.plan import Goal
from protos.brigade_pb2 import (
    AttachRequest,
    Credit,
    Draining,
    Frame,
    HelloReply,
    HelloRequest,
    LoadProgress,
    LoadRequest,
    Report,
    Result,
    ResultsRequest,
    Sample,
    Segments,
    StatusReply,
    StatusRequest,
    Timing,
)  # fmt: skip
from protos.brigade_pb2_grpc import HopServicer, NodeServicer
from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK, Models, RunningNode, Whole, opened, serving
from tests.integration.many import Live, request, tokens_of, until
from tools.worker_process import free_port
from worker.config import ClusterConfig, split_address
from worker.errors import BrigadeError, FrameError
from worker.node import network as network_module
from worker.node.framing import FrameAssembler, write_report
from worker.node.hop import add_hops, add_node
from worker.node.network import ACCEPTED, PROTOCOL_VERSION, hop_address

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes(3) + b"\x04" + bytes(5)
CONNECTIONS = 500
GREETINGS = [b"", HTTP2[:7], HTTP2 + SETTINGS, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"]


@contextlib.contextmanager
def intruding(address: str, greetings: list[bytes]) -> Iterator[None]:
    """Connections that say this, and nothing more."""
    with contextlib.ExitStack() as stack:
        for greeting in greetings:
            intruder = stack.enter_context(socket.create_connection(split_address(address), timeout=5))
            intruder.send(greeting)
        yield


@contextlib.asynccontextmanager
async def served(whole: Whole, keys: Path, *, is_encrypted: bool) -> AsyncIterator[tuple[RunningNode, Engine]]:
    """A worker of a chain, and the chain's engine."""
    network_of = Certificates(keys).of if is_encrypted else lambda name: NETWORK
    async with (
        serving(1, network_of=network_of) as [node],
        opened(whole.folder, (2, 2), [node], network_of("coordinator")) as chain,
        Engine(chain) as engine,
    ):
        yield node, engine


@pytest.mark.parametrize(
    ("is_encrypted", "port_of"),
    [  # both ports listen by the same code, so each is tried with one of both kinds of links
        pytest.param(False, str, id="plaintext"),
        pytest.param(True, str, id="tls", marks=pytest.mark.matrix),
        pytest.param(False, hop_address, id="plaintext hops", marks=pytest.mark.matrix),
        pytest.param(True, hop_address, id="tls hops"),
    ],
)
async def test_a_stream_goes_on_while_hundreds_connect_and_say_nothing_or_nonsense(
    models: Models, tmp_path: Path, is_encrypted: bool, port_of: Callable[[str], str]
) -> None:
    whole, numbers, process = models("qwen3"), random.Random(3), psutil.Process()
    async with served(whole, tmp_path, is_encrypted=is_encrypted) as (node, engine):
        live = Live(engine, request(tokens_of(9), 80))
        await live.wait_pieces(1)
        files, memory = process.num_fds(), process.memory_info().rss
        greetings = [numbers.choice([*GREETINGS, numbers.randbytes(200)]) for _ in range(CONNECTIONS)]
        with intruding(port_of(node.address), greetings):
            assert process.num_fds() - files <= 2 * CONNECTIONS + 16  # both ends are here
            assert (await live.answer()).tokens == whole.tokens(tokens_of(9), 80)
        assert process.memory_info().rss - memory < 64 << 20
        await until(lambda: process.num_fds() <= files + 16)
        again = await Live(engine, request(tokens_of(9), 20)).answer()
        assert again.tokens == whole.tokens(tokens_of(9), 20)


TRICKLED = {"plaintext": HTTP2 + SETTINGS, "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(22)}


async def num_trickled(address: str, greeting: bytes) -> int:
    """How many bytes of a greeting get through, one each tenth of a second, before the connection is closed."""
    reader, writer = await asyncio.open_connection(*split_address(address))

    async def wait_closed() -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1024):
                pass

    closed = asyncio.create_task(wait_closed())
    with contextlib.closing(writer):
        for number, byte in enumerate(greeting):
            writer.write(bytes([byte]))
            if (await asyncio.wait([closed], timeout=0.1))[0]:
                return number + 1
    closed.cancel()
    return len(greeting)


async def test_a_health_check_ends_so_that_nobody_takes_the_places_of_other_calls_by_it() -> None:
    async with serving(1) as [node], grpc.aio.insecure_channel(node.address) as channel:
        stub = HealthStub(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            _ = [each async for each in stub.Watch(HealthCheckRequest(), timeout=10)]
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (await stub.Check(HealthCheckRequest())).status == HealthCheckResponse.SERVING


@pytest.mark.parametrize("kind", TRICKLED)
async def test_a_greeting_that_trickles_in_holds_up_no_stream_and_is_not_waited_for(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole, greeting = models("qwen3"), TRICKLED[kind]
    options = dict(network_module.SERVER_OPTIONS) | {"grpc.server_handshake_timeout_ms": 700}
    monkeypatch.setattr(network_module, "SERVER_OPTIONS", list(options.items()))
    async with served(whole, tmp_path, is_encrypted=kind == "tls") as (node, engine):
        ports = node.address, hop_address(node.address)
        trickling = [asyncio.create_task(num_trickled(ports[number % 2], greeting)) for number in range(20)]
        while not all(each.done() for each in trickling):
            answer = await Live(engine, request(tokens_of(9), 20)).answer()
            assert answer.tokens == whole.tokens(tokens_of(9), 20)
        assert max(each.result() for each in trickling) < len(greeting) / 2


# A worker that answers nonsense


@dataclass
class Said:
    """What the last stage says: in the stream of its results, and in that of its attachment."""

    results: list[Report | bytes] = field(default_factory=list)
    attached: list[Report | bytes] = field(default_factory=list)


Wrong = Callable[[Result], Said]


class Liar(NodeServicer, HopServicer):
    """The last stage: each row is answered by token 5, or as `wrong` has it once it is set."""

    def __init__(self) -> None:
        self.wrong: Wrong | None = None
        self.credit = 64
        self.greeting = HelloReply(
            protocol_version=PROTOCOL_VERSION, node="liar", memory_bytes=1 << 40, incarnation="x"
        )
        self.results: asyncio.Queue[Report | bytes] = asyncio.Queue()
        self.attached: asyncio.Queue[Report | bytes] = asyncio.Queue()

    async def Hello(self, request: HelloRequest, context: Any) -> HelloReply:
        return self.greeting

    async def Load(self, request: LoadRequest, context: Any) -> None:
        await context.write(LoadProgress(phase="\x1b[2J" + "x" * 1000))

    async def Status(self, request: StatusRequest, context: Any) -> StatusReply:
        return StatusReply(node="liar")

    async def Attach(self, request: AttachRequest, context: Any) -> None:
        await context.send_initial_metadata(ACCEPTED)
        await self._say(self.attached, context)

    async def Results(self, request: ResultsRequest, context: Any) -> None:
        await self._say(self.results, context)

    Prompts = Results

    async def _say(self, said: "asyncio.Queue[Report | bytes]", context: Any) -> None:
        while True:
            report = await said.get()
            if isinstance(report, Report):
                report = write_report(report)
            await context.write(report)

    async def Relay(self, parts: AsyncIterator[bytes], context: Any) -> AsyncIterator[Credit]:
        yield Credit(frames=self.credit)
        joiner = FrameAssembler(lambda frame: None, NETWORK.wire)
        async for part in parts:
            if arrival := joiner.add(part):
                result = sound_result(arrival.header)
                said = self.wrong(result) if self.wrong else Said([Report(result=result)])
                for reports, queue in ((said.attached, self.attached), (said.results, self.results)):
                    for report in reports:
                        queue.put_nowait(report)
                yield Credit(frames=1)


def sound_result(frame: Frame) -> Result:
    samples = [Sample(slot=window.slot, token=5) for window in frame.windows for _ in range(window.wanted)]
    return Result(epoch=frame.epoch, step=frame.step, samples=samples, timings=[*frame.timings, Timing(stage=1)])


@contextlib.asynccontextmanager
async def lying(models: Models, goal: Goal = "latency") -> AsyncIterator[tuple[Liar, Chain]]:
    liar, servers = Liar(), [NETWORK.server() for _ in range(2)]
    add_node(liar, servers[0])
    add_hops(liar, servers[1])
    for service, method, kind in (
        ("Node", "Attach", AttachRequest), ("Node", "Prompts", ResultsRequest), ("Hop", "Results", ResultsRequest)
    ):  # fmt: skip
        raw = grpc.unary_stream_rpc_method_handler(getattr(liar, method), request_deserializer=kind.FromString)
        servers[service == "Hop"].add_registered_method_handlers(f"brigade.v1.{service}", {method: raw})
    address = f"127.0.0.1:{free_port()}"
    for server, bind in zip(servers, (address, hop_address(address)), strict=True):
        NETWORK.listen(server, bind)
        await server.start()
    none: Any = None
    try:
        nodes = [RunningNode("liar", address, none, none, none)]
        async with opened(models("qwen3").folder, (2, 2), nodes, goal=goal) as chain:
            yield liar, chain
    finally:
        for server in servers:
            await server.stop(None)


def changed(**fields: Any) -> Wrong:
    def wrong(result: Result) -> Said:
        for name, value in fields.items():
            result.ClearField(name)  # type: ignore[arg-type]
            result.MergeFrom(Result(**{name: value}))
        return Said([Report(result=result)])

    return wrong


def saying(*reports: Report | bytes) -> Wrong:
    return lambda result: Said([*reports])


def saying_attached(*reports: Report | bytes) -> Wrong:
    """Where it is attached, and no result."""
    return lambda result: Said([], [*reports])


GOODBYE = Report(draining=Draining())
LONG = b"\x0a" + b"\xff" * (17 << 20)
NONSENSE: dict[str, Wrong] = {
    "another slot": changed(samples=[Sample(slot=7, token=5)]),
    "a step never asked": changed(step=2**63),
    "a flood of samples": changed(samples=[Sample(token=5)] * 100_000),
    "a flood of results": lambda result: Said([Report(result=result)] * 3000),
    "a flood of goodbyes": lambda result: Said([Report(result=Result(step=2**63))], [GOODBYE] * 3000),
    "goodbyes as results": saying(*[GOODBYE] * 3000),
    "nothing at all": saying(Report()),
    "no message": saying(b"\xff" * 99),
    "no message where it is attached": saying_attached(b"\xff" * 99),
    "a message that is too long": saying(LONG),
    "a message that is too long where it is attached": saying_attached(LONG),
}


@pytest.mark.usefixtures("in_turns")
@pytest.mark.parametrize("wrong", NONSENSE.values(), ids=NONSENSE)
async def test_a_worker_that_answers_nonsense_ends_the_request_by_its_name(models: Models, wrong: Wrong) -> None:
    async with lying(models) as (liar, chain), asyncio.timeout(60), Engine(chain) as engine:
        live = Live(engine, request(tokens_of(9), 150))
        await live.wait_pieces(2)
        liar.wrong = wrong
        with pytest.raises(BrigadeError) as failed:
            await live.answer()
    assert failed.value.node in ("liar", "") and len(str(failed.value)) < 1000


async def test_a_worker_that_grants_credit_without_end_is_refused(models: Models) -> None:
    """It would keep the sender counting for minutes."""
    async with lying(models) as (liar, chain), asyncio.timeout(60):
        liar.credit = 2**32 - 1
        link = chain.peers[0].link(1, 0)
        with pytest.raises(FrameError, match=r"^worker liar: expected credit for at most 1024 frames, got 4294967295$"):
            await link.wait_lost()
        await link.close()


@pytest.mark.parametrize("report", [Report(result=Result(step=2**63)), GOODBYE], ids=str)
async def test_unread_results_do_not_pile_up(models: Models, report: Report) -> None:
    """Between two requests, when nothing was asked."""
    async with lying(models) as (liar, chain), asyncio.timeout(60):
        for _ in range(5000):
            liar.results.put_nowait(report)
        stage = chain.stage
        assert stage is not None
        await until(lambda: stage.failure is not None)

        async def count() -> int:
            num_read = 0
            with pytest.raises(FrameError, match="unread results"):
                while True:
                    await stage.next_result()
                    num_read += 1
            return num_read

        assert await chain.thread.call(count()) <= 4096


@pytest.mark.parametrize("what", [{"result": Result(step=9)}, {"segments": Segments(epoch=1, step=9)}], ids=str)
async def test_reports_of_prompts_that_nobody_asked_for_end_the_chain(models: Models, what: dict[str, Any]) -> None:
    async with lying(models, "prompt") as (liar, chain), asyncio.timeout(60):
        liar.results.put_nowait(write_report(Report(**what)))
        stage = chain.stage
        assert stage is not None
        await until(lambda: stage.failure is not None)
        assert str(stage.failure) == "worker liar: expected reports of a prompt in flight, got one of step 9"


async def test_a_node_waits_with_reports_for_a_busy_mlx_thread(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "MOST_WAITING_BYTES", 2**20)
    async with lying(models, "prompt") as (liar, chain), asyncio.timeout(60):
        step_ends = threading.Event()
        chain.thread.post(partial(step_ends.wait, 20.0))
        report, most = write_report(Report(segments=Segments()), [bytes(2**20)]), 64
        for _ in range(most):
            liar.results.put_nowait(report)
        await until(lambda: liar.results.qsize() < most)
        await asyncio.sleep(0.5)
        assert liar.results.qsize() > most // 2
        step_ends.set()


@pytest.mark.parametrize("until_s", [-(2**63), -1, 2**62, 253402300800])
def test_a_date_that_there_is_not_is_no_reason_to_warn_or_to_fail(until_s: int) -> None:
    lines = differences("liar", ClusterConfig(), HelloReply(certificate_expires=until_s))
    assert not any("expires" in line for line in lines)


async def test_the_phase_that_a_worker_names_is_text_for_a_terminal(models: Models) -> None:
    async with lying(models) as (_, chain):
        reports = list[LoadProgress]()
        await chain.peers[0].load(LoadRequest(), reports.append)
    [report] = reports
    assert report.phase.isprintable() and len(report.phase) < 50


async def test_an_empty_greeting_is_no_workers(models: Models) -> None:
    async with lying(models) as (liar, chain):
        liar.greeting = HelloReply()
        peer = Peer("liar", [chain.peers[0].address], NETWORK)
        with pytest.raises(BrigadeError, match="speaks protocol 0"):
            await peer.hello(1)
        await peer.close()
