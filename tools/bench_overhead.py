"""What the chain costs: a two-node chain against one process with the same model, and against a bare gRPC echo.

python -m tools.bench_overhead [--model demo] [--tokens 128] [--rounds 5]

Runs in turn, in one go: the whole model in this process, the same model on this process and one worker process, and a
bare `grpc.aio` stream to another process that carries the same bytes. Prints medians and their ratios.
"""

import itertools
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from typing import Annotated, Any

import grpc
import typer
import uvloop

from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.engine.engine import generate_once
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from tools.child import child
from tools.figures import table
from worker.model.model_spec import DTYPE_BYTES, ModelSpec
from worker.node.network import Network
from worker.platform.machine import machine_name
from worker.platform.run import run_command
from worker.platform.threads import MlxThread

_ECHO = "/brigade.bench.Echo/Stream"


def main(
    model: Annotated[str, typer.Option(help="As for `brigade generate`.")] = "demo",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode per round.")] = 128,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    echo: Annotated[bool, typer.Option("--echo", hidden=True)] = False,
) -> None:
    """Measure the overhead of a two-node chain per token, and its prefill against one process."""
    if echo:
        uvloop.run(_serve_echo())
    else:
        uvloop.run(_measure(cluster_options(None, model, 0), tokens, prompt, rounds))


async def _measure(options: ClusterOptions, num_tokens: int, num_prompt: int, rounds: int) -> None:
    checkpoint, spec = await read_model(options.model)
    options = replace(options, context=num_prompt + num_tokens)
    short = Request((5, 6, 7, 8), num_tokens)
    long = Request(tuple(5 + i % 64 for i in range(min(num_prompt, spec.context - 1))), 1)
    one_ms, two_ms, one_s, two_s = [], [], [], []
    with closing(MlxThread()) as thread:
        async with (
            open_chain(options, checkpoint, thread) as one,
            open_chain(replace(options, local=1), checkpoint, thread) as two,
        ):
            for _ in range(rounds):
                one_ms += _token_ms(await generate_once(one, short))
                two_ms += _token_ms(await generate_once(two, short))
            for _ in range(rounds):
                one_s.append((await generate_once(one, long)).ttft_s)
                two_s.append((await generate_once(two, long)).ttft_s)
            layers = two.plan.layers
    echo_ms = await _echo_ms(spec, num_tokens * rounds)
    _print(spec, layers, len(long.prompt), one_ms, two_ms, echo_ms, one_s, two_s)


def _token_ms(answer: Answer) -> list[float]:
    return [(after - before) / 1e6 for before, after in itertools.pairwise(answer.token_times)]


def _print(
    spec: ModelSpec, layers: list[int], num_prompt: int,
    one_ms: list[float], two_ms: list[float], echo_ms: list[float], one_s: list[float], two_s: list[float],
) -> None:  # fmt: skip
    one, two, echo = (statistics.median(values) for values in (one_ms, two_ms, echo_ms))
    bound = max(1.0, 6 * echo)
    single, pair = statistics.median(one_s), statistics.median(two_s)
    lines = [
        ("one process, per token", f"{one:.3f} ms"),
        (f"two nodes {layers}, per token", f"{two:.3f} ms"),
        ("overhead per token", f"{two - one:+.3f} ms (wanted at most {bound:.3f})"),
        (f"bare stream echo of {_hidden_bytes(spec)} bytes, round trip", f"{echo:.3f} ms"),
        (f"prompt of {num_prompt} tokens, one process", f"{single:.3f} s"),
        (f"prompt of {num_prompt} tokens, two nodes", f"{pair:.3f} s"),
        ("prefill, two nodes against one process", f"{single / pair:.2f}x (wanted at least 1.5)"),
    ]
    print(f"{spec.name} on {machine_name()}\n", table(("what", "median"), lines, 1), sep="\n", end="")


def _hidden_bytes(spec: ModelSpec) -> int:
    return spec.hidden_size * DTYPE_BYTES[spec.dtype]


async def _echo_ms(spec: ModelSpec, count: int) -> list[float]:
    """Round trips of one token's hidden state over a bare bidirectional stream to another process."""
    payload = bytes(_hidden_bytes(spec))
    async with (
        child("tools.bench_overhead", "--echo") as (port, _, _),
        Network().channel("echo", f"127.0.0.1:{int(port)}") as channel,
    ):
        call = channel.stream_stream(_ECHO)()  # type: ignore[call-arg]
        times = []
        for _ in range(count):
            before = time.perf_counter()
            await call.write(payload)
            await call.read()
            times.append((time.perf_counter() - before) * 1e3)
        call.cancel()
        return times


async def _serve_echo() -> None:
    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    network = Network()
    server = network.server()
    handler = grpc.stream_stream_rpc_method_handler(echo)
    service, method = _ECHO.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    print(network.listen(server, "127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination(timeout=600)


if __name__ == "__main__":
    run_command(main)
