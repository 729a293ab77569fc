"""Random faults under load, for as long as wanted: right tokens to the last one, and nothing left behind.

python -m tools.soak [--minutes 2] [--seed 0] [--model demo]

In rounds of some seconds each. A round opens a cluster over two workers behind proxies, which live on from round to
round, and one that the coordinator keeps itself; six readers ask for answers of a table that was made without faults,
by every decoder, greedy, sampled and penalised, some with prefixes in common, and now and then one leaves early. Every
few seconds a worker is killed, stopped for a while, cut off for a while, or all its connections are reset. After each
round, with the cluster closed, memory, descriptors and threads of this process and of each worker that has survived
are compared with what they were after its first round.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from coordinator.cli.run import run_async
from coordinator.cluster.local import LocalWorker
from coordinator.cluster.nodes import Nodes
from coordinator.cluster.open import cluster_over, open_chain, read_model
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.cluster.peer import Peer
from coordinator.cluster.progress import say
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine, generate_once
from coordinator.planning.recovery import Limits
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from tools.soak_report import Soak, print_soak
from tools.soak_worker import SoakWorker
from worker.errors import BrigadeError
from worker.model.checkpoint import Checkpoint
from worker.model.model_spec import ModelSpec
from worker.node.network import Network
from worker.platform.machine import machine_name
from worker.platform.run import run_command
from worker.platform.threads import MlxThread

READERS = 6
_DECODES = (Decode(), Decode("ngram"), Decode("diffusion"), Decode("diffusion-fast", 8))
_SAMPLINGS = (
    Sampling(),
    Sampling(seed=7, temperature=0.8, top_p=0.95),
    Sampling(seed=5, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.2),
)
_NUM_TOKENS = 32
_CONTEXT = 1024
_ROUND_S = 15.0
_FAULT_S = 1.0, 5.0  # between two faults
_LEAVES = 0.1  # of the requests are left by their reader
_STUCK_S = 180.0  # without an end, though every recovery has a deadline of 60 s
_LIMITS = Limits(rejoin_s=1.5, recovery_s=60.0)  # some losses are waited for, some planned around

Tell = Callable[[str], None]
Fault = Callable[[random.Random], Awaitable[None]]


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="For how long; 60 are an hour.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Of faults and load.")] = 0,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Each fault, and what the coordinator says.")
    ] = False,
    model: Annotated[str, typer.Option(help="A mask-trained model, as for `brigade generate`.")] = "demo",
) -> int:
    """Exit code 1 if a token was wrong, a request failed or stood still, or something was left behind."""
    tell = _say_when if verbose else lambda line: None  # the table counts what happened
    soak = run_async(run(cluster_options(None, model, 0, None, _CONTEXT), minutes * 60, seed, tell))
    print_soak(soak)
    return 1 if soak.violations else 0


async def run(options: ClusterOptions, seconds: float, seed: int, tell: Tell) -> Soak:
    """Rounds of faults for so long, the first of them without any; `tell` takes what happens."""
    checkpoint, spec = await read_model(options.model)
    soak, numbers = Soak(machine_name(), spec.name, seed), random.Random(seed)
    async with AsyncExitStack() as stack:
        thread = stack.enter_context(contextlib.closing(MlxThread()))
        table = await make_table(options, checkpoint, spec, thread)
        workers = [await stack.enter_async_context(SoakWorker.running(f"mac-{i}", options.model)) for i in (1, 3)]
        options = replace(options, limits=_LIMITS)
        while soak.soaked_s < seconds:
            round_s = min(_ROUND_S, seconds - soak.soaked_s)
            one = Round(options, checkpoint, table, workers, soak, numbers, thread, tell)
            here = [worker.pid for worker in workers]
            await one.run(round_s, is_faulty=soak.num_rounds > 0)
            soak.num_rounds += 1
            for ended in filter(None, [await worker.revive() for worker in workers]):
                _violated(soak, ended)
            for more in await soak.ledger.settle([pid for worker in workers if (pid := worker.pid) in here]):
                _violated(soak, more)
    return soak


def make_requests(spec: ModelSpec) -> list[Request]:
    """Every decoder, greedy, sampled and penalised, prompts short and long, and prefixes in common; always the same."""
    numbers = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(spec.vocab_size) for _ in range(count))

    common = tokens(100)
    found = []
    for decode in _DECODES:
        for sampling in _SAMPLINGS:
            prompts = (tokens(numbers.randint(1, 40)), (*common, *tokens(5)), tokens(300))
            found += [Request(prompt, _NUM_TOKENS, sampling, decode) for prompt in prompts]
    return found


async def make_table(
    options: ClusterOptions, checkpoint: Checkpoint, spec: ModelSpec, thread: MlxThread
) -> list[tuple[Request, list[int]]]:
    """Requests with the tokens that one process makes of each, alone."""
    async with open_chain(options, checkpoint, thread) as chain:
        return [(request, (await generate_once(chain, request)).tokens) for request in make_requests(spec)]


@dataclass
class Round:
    """One cluster's life."""

    options: ClusterOptions
    checkpoint: Checkpoint
    table: Sequence[tuple[Request, list[int]]]
    workers: Sequence[SoakWorker]
    soak: Soak
    numbers: random.Random
    thread: MlxThread
    tell: Tell
    is_over: bool = False

    async def run(self, seconds: float, *, is_faulty: bool) -> None:
        """Serve for so long; faults end before, so that the last answers come through as they should."""
        async with AsyncExitStack() as stack:
            kept = await LocalWorker.start("mac-2", self.options.model)
            stack.push_async_callback(kept.stop)
            nodes = await stack.enter_async_context(self._nodes(kept))
            peers = nodes.peers(nodes.workers)
            opening = cluster_over(*(nodes, peers, self.options, self.checkpoint), say=self.tell, thread=self.thread)
            cluster = await stack.enter_async_context(opening)
            engine = await stack.enter_async_context(Engine(cluster.chain, when_lost=cluster.reopen))
            async with asyncio.TaskGroup() as group:
                for _ in range(READERS):
                    group.create_task(self._read(engine))
                if is_faulty:
                    await self._make_faults(nodes, seconds)
                else:
                    await asyncio.sleep(seconds)
                self.is_over = True
                self.soak.soaked_s += seconds
            self.soak.num_recoveries += cluster.num_recoveries

    def _nodes(self, kept: LocalWorker) -> Nodes:
        network, (first, last) = Network(), self.workers
        nodes = Nodes([first.peer(), Peer(kept.name, [kept.address], network), last.peer()])
        nodes.keep([kept], network, self.tell)
        return nodes

    async def _make_faults(self, nodes: Nodes, seconds: float) -> None:
        """One every few seconds, of workers that nothing is happening to; some at the same time."""
        until, busy = time.monotonic() + seconds, set[str]()
        async with asyncio.TaskGroup() as group:
            while (pause_s := self.numbers.uniform(*_FAULT_S)) < until - time.monotonic():
                await asyncio.sleep(pause_s)
                victims = [(name, kind, fault) for name, kind, fault in self._faults(nodes) if name not in busy]
                if victims:
                    name, kind, fault = self.numbers.choice(victims)
                    busy.add(name)
                    self.soak.faults[kind] += 1
                    self.tell(f"{name}: {kind}")
                    group.create_task(self._suffer(fault, name, busy))

    async def _suffer(self, fault: Fault, name: str, busy: set[str]) -> None:
        try:
            await fault(self.numbers)
        finally:
            busy.discard(name)

    def _faults(self, nodes: Nodes) -> list[tuple[str, str, Fault]]:
        """Whom, what, and how."""
        found: list[tuple[str, str, Fault]] = []
        for worker in self.workers:
            found += [
                (worker.name, "killed", worker.kill_and_start),
                (worker.name, "stopped", worker.stop_for_a_while),
                (worker.name, "cut off", worker.cut_for_a_while),
                (worker.name, "reset", worker.reset),
            ]
        if own := nodes.workers["mac-2"].local:

            async def kill(numbers: random.Random) -> None:
                own.kill()

            found.append((own.name, "killed, the coordinator's own", kill))
        return found

    async def _read(self, engine: Engine) -> None:
        """Ask for one answer after another until the round is over."""
        while not self.is_over:
            request, expected = self.numbers.choice(self.table)
            most = self.numbers.randrange(1, 8) if self.numbers.random() < _LEAVES else None
            try:
                async with asyncio.timeout(_STUCK_S):
                    answer = await _answer(engine, request, most)
            except TimeoutError:
                _violated(self.soak, f"no end of an answer after {_STUCK_S:.0f} s: {_name(request)}")
            except BrigadeError as error:
                self.fail(request, error)
            else:
                self.compare(request, expected, answer)

    def fail(self, request: Request, error: BrigadeError) -> None:
        if error.message.startswith("given up: the chain was lost"):
            self.soak.ends["given up after three losses without a token"] += 1
            self.tell(f"given up: {_name(request)}")
        else:
            _violated(self.soak, f"{error} ({_name(request)})")

    def compare(self, request: Request, expected: Sequence[int], answer: Answer) -> None:
        soak, is_whole = self.soak, bool(answer.finish_reason)
        soak.num_tokens += len(answer.tokens)
        soak.longest_still_s = max(soak.longest_still_s, answer.usage.still_s)
        if answer.tokens != list(expected if is_whole else expected[: len(answer.tokens)]):
            _violated(soak, f"expected {expected}, got {answer.tokens} ({_name(request)})")
        elif not is_whole:
            soak.ends["left by its reader"] += 1
        else:
            soak.ends["equal, after a loss" if answer.usage.num_recoveries else "equal"] += 1


async def _answer(engine: Engine, request: Request, most: int | None) -> Answer:
    """All of it, or no more than so many pieces."""
    answer, num_pieces = Answer(), 0
    async with contextlib.aclosing(engine.generate(request)) as pieces:
        async for piece in pieces:
            answer.add(piece)
            num_pieces += 1
            if num_pieces == most:
                break
    return answer


def _say_when(line: str) -> None:
    say(f"{time.monotonic():.1f} {line}")


def _violated(soak: Soak, what: str) -> None:
    soak.violations.append(what)
    say(f"VIOLATION in round {soak.num_rounds}: {what}")


def _name(request: Request) -> str:
    return f"{request.decode.kind}, prompt of {len(request.prompt)}, {request.sampling!s:.100}".replace("\n", " ")


if __name__ == "__main__":
    run_command(main)
