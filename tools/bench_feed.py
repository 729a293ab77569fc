"""What feeding costs: a worker's layers over loopback or a shaped link, beside bare TCP and bare gRPC, in one run.

python -m tools.bench_feed [--layers 4] [--rounds 3] [--mbit 1000] [--folder FOLDER]

The worker is a process of its own. All ways take turns, so that other work on the machine burdens them alike. Bare TCP
sends blocks of the size of feeding's messages to a thread that drops them; bare gRPC sends such messages to a loop
that drops them; feeding goes the whole way, from files to files, its digests made meanwhile or known from before. The
tensors are holes in files: nothing is read from a disk, but all is written to one (--folder says to which).

The second table has four sessions on a chain with that worker, while another model's layers come. With --mbit another
table has the first one's figures over loopback in a network namespace of its own, which `tc tbf` shapes: that needs
Linux, and root or user namespaces.
"""

import asyncio
import json
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from coordinator.cluster.deployment import Deployment
from coordinator.cluster.peer import Peer
from coordinator.cluster.weights import push_weights
from coordinator.deploy.authority import Authority
from coordinator.engine.engine import Engine
from coordinator.planning.plan import Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Contents, LoadRequest, Sampling
from tools.child import child
from tools.feed_receiver import NAME, networks, serve
from tools.figures import table
from tools.joined import joined
from tools.sparse_model import write_sparse
from worker.model.checkpoint import DEMO, Checkpoint, open_folder
from worker.model.describe import describe
from worker.model.headers import pack_headers
from worker.node.certificates import Role
from worker.node.framing import CHUNK_BYTES
from worker.node.hop import open_relay
from worker.node.network import Network
from worker.node.weights_cache import pieces_of
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_BLOCKS_BYTES = 1 << 28  # that bare ways send again and again: more than a processor's caches hold, as files are
_CONFIG = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": 32000, "rope_theta": 1e6,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
_SESSIONS, _TOKENS = 4, 200
_PAUSE_S = 0.02


@dataclass
class Way:
    """How bytes travel, and what was found of it."""

    name: str
    send: Callable[[], Awaitable[int]]  # returns how many bytes
    link: str = ""
    found: list[list[float]] = field(default_factory=list)  # as `Receiver.measured`

    def median(self, column: int) -> float:
        return statistics.median(row[column] for row in self.found)


def main(
    layers: Annotated[int, typer.Option(min=1, help="That are sent, of 202 MB each.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Of all ways; medians count.")] = 3,
    mbit: Annotated[int, typer.Option(min=0, help="Shape a link to so many megabits; 0 for none.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="Where files come and go; a temporary one if none.")] = None,
    shaped: Annotated[int, typer.Option(hidden=True)] = 0,
    receive: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Throughput and processor time of feeding, with TLS and without."""
    if receive is not None:
        uvloop.run(serve(receive / "keys", receive / "cache" / "brigade" / "shards"))
        return
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        os.environ["XDG_CACHE_HOME"] = f"{temporary}/cache"
        uvloop.run(_measure(Path(temporary), layers, rounds, shaped))
    if mbit:
        _shape(mbit, rounds, folder)


def _shape(mbit: int, rounds: int, folder: Path | None) -> None:
    """This again, in a network namespace whose loopback is shaped."""
    tbf = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst 256kb latency 50ms"
    flags = ["--layers", "1", "--rounds", str(rounds), "--shaped", str(mbit)]
    folder_flags = ["--folder", str(folder)] if folder is not None else []
    again = shlex.join([sys.executable, "-m", "tools.bench_feed", *flags, *folder_flags])
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", f"ip link set lo up && {tbf} && {again}"]
    if subprocess.run(command).returncode:
        raise SystemExit("no shaped link: that needs Linux, with `tc` and user namespaces")


async def _measure(folder: Path, layers: int, rounds: int, shaped: int) -> None:
    authority = Authority.make(folder / "keys")
    for name, role in (("studio", Role.COORDINATOR), (NAME, Role.WORKER)):
        authority.issue(name, role)
    write_sparse(folder / "model", _CONFIG | {"num_hidden_layers": layers + 1}, None)
    checkpoint = open_folder(folder / "model")
    async with child("tools.bench_feed", "--receive", folder) as (ports, _, process):
        receiver = Receiver(process, json.loads(ports), folder)
        ways = await receiver.ways(checkpoint, layers)
        for turn in range(1 + rounds):
            for way in ways:
                row = await receiver.measured(way)
                way.found += [row] if turn else []
        where = f"a link of {shaped} Mbit/s" if shaped else "loopback"
        nbytes = sum(piece.nbytes for piece in pieces_of(checkpoint, 1, layers + 1))
        print(f"{nbytes / 1e6:.0f} MB over {where}, medians of {rounds}; {machine_name()}\n\n{_throughput(ways)}")
        if not shaped:
            print(f"{_SESSIONS} sessions of the bundled model on two nodes, by TLS\n")
            print(await _sessions(receiver, checkpoint, layers))


class Receiver:
    """The other process, and all ways to it."""

    def __init__(self, process: asyncio.subprocess.Process, ports: dict[str, int], folder: Path) -> None:
        self.networks = networks(folder / "keys", "studio", Role.COORDINATOR)
        self._process = process
        self._ports = ports
        self._folder = folder
        self._blocks = [os.urandom(CHUNK_BYTES) for _ in range(_BLOCKS_BYTES // CHUNK_BYTES)]

    async def ways(self, checkpoint: Checkpoint, layers: int) -> list[Way]:
        wanted = request_of(checkpoint, layers)
        nbytes = sum(piece.nbytes for piece in pieces_of(checkpoint, 1, layers + 1))
        found = [Way("bare TCP", lambda: asyncio.to_thread(self._send_tcp, nbytes))]
        for link, network in self.networks.items():

            async def bare(link: str = link, network: Network = network) -> int:
                return await self._send_grpc(link, network, nbytes)

            async def known(link: str = link) -> int:
                return await self._feed(link, checkpoint, wanted)

            async def anew(known: Callable[[], Awaitable[int]] = known) -> int:
                shutil.rmtree(self._folder / "cache/brigade/digests", ignore_errors=True)
                return await known()

            found += [Way("bare gRPC", bare, link), Way("feeding", anew, link), Way("..., digests known", known, link)]
        return found

    def peer(self, link: str) -> Peer:
        return Peer(NAME, [f"127.0.0.1:{self._ports[f'{link} feed']}"], self.networks[link])

    async def measured(self, way: Way) -> list[float]:
        """Return MB/s, and the processor time of both processes, s per GB."""
        self.forget()
        before, began = await self._cpu_s(), time.perf_counter()
        nbytes = await way.send()
        rate, after = nbytes / (time.perf_counter() - began) / 1e6, await self._cpu_s()
        return [rate, *(1e9 * (now_s - then_s) / nbytes for now_s, then_s in zip(after, before, strict=True))]

    def forget(self) -> None:
        """Have it lack everything."""
        shutil.rmtree(self._folder / "cache/brigade/shards", ignore_errors=True)

    async def _cpu_s(self) -> tuple[float, float]:
        """Return the processor time that both processes have taken."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(b"\n")
        return time.process_time(), float(await self._process.stdout.readline())

    async def _feed(self, link: str, checkpoint: Checkpoint, wanted: LoadRequest) -> int:
        peer = self.peer(link)
        try:
            return await push_weights(peer, wanted, checkpoint, lambda report: None)
        finally:
            await peer.close()

    async def _send_grpc(self, link: str, network: Network, nbytes: int) -> int:
        async with network.channel(NAME, f"127.0.0.1:{self._ports[f'{link} grpc']}") as channel:
            call = open_relay(channel, 1, 0, "studio")
            for block in islice(cycle(self._blocks), nbytes // CHUNK_BYTES):
                await call.write(block)
            await call.done_writing()
            await call.read()
        return nbytes

    def _send_tcp(self, nbytes: int) -> int:
        with socket.create_connection(("127.0.0.1", self._ports["tcp"])) as connection:
            for block in islice(cycle(self._blocks), nbytes // CHUNK_BYTES):
                connection.sendall(block)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
        return nbytes


def request_of(checkpoint: Checkpoint, layers: int) -> LoadRequest:
    """As a coordinator sends it, but for the marks of tensors."""
    spec = describe(checkpoint)
    return LoadRequest(
        model=checkpoint.name, fingerprint=checkpoint.fingerprint, start=1, end=1 + layers, num_layers=spec.num_layers,
        dtype=spec.dtype, contents=Contents(headers=pack_headers(checkpoint.tensors)),
    )  # fmt: skip


async def _sessions(receiver: Receiver, checkpoint: Checkpoint, layers: int) -> str:
    """What sessions on a chain with the worker take, alone and while it is fed."""
    lines = []
    demo = open_folder(DEMO, name="demo")
    spec, wanted = describe(demo), request_of(checkpoint, layers)
    async with AsyncExitStack() as stack:
        peers = [receiver.peer("TLS") for _ in range(2)]
        for peer in peers:
            stack.push_async_callback(peer.close)
        nodes = [Node(name, 1 << 40) for name in ("studio", NAME)]
        deployment = Deployment(demo, plan(spec, nodes, NO_SPEEDS, Objective(512)), peers[:1])
        engine = await stack.enter_async_context(Engine(await stack.enter_async_context(joined(deployment))))
        await _answers(engine)
        for is_fed in (False, True, False, True):
            receiver.forget()
            await asyncio.sleep(_PAUSE_S)
            feeding = (
                asyncio.create_task(push_weights(peers[1], wanted, checkpoint, lambda report: None)) if is_fed else None
            )
            rate = await _answers(engine)
            if feeding:
                await feeding
            lines.append(("while layers come" if is_fed else "alone", f"{rate:.0f}"))
    return table(("", "tokens/s"), lines, 1)


async def _answers(engine: Engine) -> float:
    """Return the tokens per second of all."""
    began = time.perf_counter()
    requests = [Request((5 + number, 6, 7), _TOKENS, Sampling()) for number in range(_SESSIONS)]
    answers = await asyncio.gather(*map(engine.answer, requests))
    return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - began)


def _throughput(ways: Sequence[Way]) -> str:
    header = "way", "link", "MB/s", "of TCP", "of gRPC", "CPU s/GB sender", "receiver"
    tcp, lines = ways[0].median(0), []
    for way in ways:
        grpc = next((each.median(0) for each in ways if each.name == "bare gRPC" and each.link == way.link), None)
        of_grpc = f"{100 * way.median(0) / grpc:.0f} %" if grpc else ""
        cpu = [f"{way.median(column):.2f}" for column in (1, 2)]
        rate = way.median(0)
        lines.append((way.name, way.link, f"{rate:.0f}", f"{100 * rate / tcp:.0f} %", of_grpc, *cpu))
    return table(header, lines, 2)


if __name__ == "__main__":
    run_command(main)
