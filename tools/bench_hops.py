"""What slow hops cost each decoder: a chain of local workers with a delaying TCP proxy in front of every one.

python -m tools.bench_hops [--delay-ms 20] [--workers 2] [--model demo]

Every connection to a worker, the coordinator's and its predecessor's, goes through that worker's proxy, which holds
each piece back for `--delay-ms` in either direction. What a step waits for crosses each hop once and one way: frames
from the coordinator to worker 1 and on from worker to worker, the result from the last worker back to the coordinator
(on the stream that the coordinator opened). So a step of a chain with N workers is (N + 1) times `--delay-ms` slower,
60 ms for two workers and 20 ms. Nothing else that travels is on that path: acknowledgements, keepalive and status
calls overlap with it or come after the last token.
"""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from coordinator.cli.demo import DEMO_PROMPT
from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment
from coordinator.cluster.open import choose_plan, open_peers
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.cluster.peer import Peer
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import generate_once
from coordinator.engine.inputs import InputProcessor
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import require_fit
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Conversation, Request, check_request
from tools.joined import joined
from tools.proxy import proxy_to
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.model.model_spec import ModelSpec
from worker.node.network import Network
from worker.platform.machine import machine_name
from worker.platform.run import run_command

PROMPTS = (
    DEMO_PROMPT,
    "Tell me a story about a fox.",
    "What is the capital of France?",
    "Write a Python function that multiplies a number by 12.",
)
AR = Decode("ar")
LEARNING = (Decode("diffusion"), Decode("draft"))  # they choose for themselves
DRAFTING = (
    *(Decode("ngram"), *LEARNING, Decode("draft", num_drafts=3), Decode("draft", num_drafts=7)),
    *(Decode("diffusion", 16), Decode("diffusion", 32), Decode("diffusion-fast")),
)
_WARM_UP_TOKENS = 12  # of each decoder, not counted


@dataclass
class Row:
    """What one decoder made of all prompts."""

    name: str
    num_tokens: int = 0
    num_steps: int = 0
    seconds: float = 0.0  # from the prompts' sending to the last tokens
    answers: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def add(self, answer: Answer) -> None:
        self.num_tokens += len(answer.tokens)
        self.num_steps += answer.usage.num_steps
        self.seconds += answer.ttft_s + answer.decode_s
        self.answers.append(answer.tokens)


def main(
    delay_ms: Annotated[float, typer.Option(min=0, help="Added to every hop, one way.")] = 20.0,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Worker processes beside the coordinator.")] = 2,
    model: Annotated[str, typer.Option(help="As for `brigade generate`; the prompts suit `demo`.")] = "demo",
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens per answer.")] = 256,
    draft_model: Annotated[str | None, typer.Option(help="As for `brigade generate`.")] = None,
) -> None:
    """Tokens per second of every decoder over slow hops, all in one run."""
    options = cluster_options(None, model, workers, draft_model=draft_model)
    rows, layers = uvloop.run(measure(options, delay_ms / 1e3, max_tokens))
    _print(rows, layers, delay_ms)


async def measure(options: ClusterOptions, delay_s: float, max_tokens: int) -> tuple[list[Row], list[int]]:
    """A row per decoder that the model can run on, `ar` first, and the layers of each node.

    The decoders take turns at each prompt. What a chain learns of its steps is kept from one prompt to the next, and
    only for the windows that choose for themselves.
    """
    inputs = await InputProcessor.read(options)
    spec = inputs.spec
    decodes = [AR, *(decode for decode in DRAFTING if _is_able(decode, spec))]
    rows = [Row(_name(decode)) for decode in decodes]
    async with open_slow_chain(options, inputs.checkpoint, delay_s) as chain:
        costs = chain.costs
        for number, prompt in enumerate((PROMPTS[0], *PROMPTS)):
            ids = await inputs.prompt_ids(Conversation.of(prompt))
            for row, decode in zip(rows, decodes, strict=True):
                request = Request(ids, max_tokens if number else _WARM_UP_TOKENS, decode=decode, eos=inputs.eos)
                check_request(request, spec)
                chain.costs = costs if decode in LEARNING else ChainCosts(chain.num_stages)
                answer = await generate_once(chain, request)
                if number:
                    row.add(answer)
            print(f"{number}/{len(PROMPTS)} prompts", file=sys.stderr, flush=True)
        return rows, chain.plan.layers


@asynccontextmanager
async def open_slow_chain(options: ClusterOptions, checkpoint: Checkpoint, delay_s: float) -> AsyncIterator[Chain]:
    """As `open_chain`, but every worker's address, to the coordinator and to its predecessor, is its proxy's."""
    spec = describe(checkpoint)
    async with open_peers(options, spec) as direct, AsyncExitStack() as stack:
        peers = []
        for peer in direct:
            proxy = stack.enter_context(proxy_to(peer.address, latency_s=delay_s))
            peers.append(Peer(peer.name, [proxy.address], Network()))
            stack.push_async_callback(peers[-1].close)
        plan, _, _ = await choose_plan(replace(options, by_speed=False, context=spec.context), checkpoint, peers)
        require_fit(plan, spec)
        yield await stack.enter_async_context(joined(Deployment(checkpoint, plan, peers)))


def _is_able(decode: Decode, spec: ModelSpec) -> bool:
    if decode.kind == "ngram":
        return spec.can_take_back
    if decode.kind == "draft":
        return spec.drafter is not None
    return spec.mask_token is not None and not spec.recurrent_layers


def _name(decode: Decode) -> str:
    if decode.kind == "diffusion":
        return f"diffusion, {decode.window or 'auto'}"
    if decode.kind == "draft":
        return f"draft, {decode.num_drafts or 'auto'}"
    return decode.kind


def _print(rows: Sequence[Row], layers: Sequence[int], delay_ms: float) -> None:
    ar = rows[0]
    hops = len(layers)
    table = Table(
        title=f"{hops} nodes {list(layers)}, {delay_ms:g} ms on each of {hops} hops a round trip, {machine_name()}",
        title_justify="left",
    )
    table.add_column("decoder")
    for column in ("tok/s", "against ar", "tokens per step", "round trips per 100", "equal to ar"):
        table.add_column(column, justify="right")
    for row in rows:
        num_equal = sum(found == expected for found, expected in zip(row.answers, ar.answers, strict=True))
        table.add_row(
            row.name, f"{row.tokens_per_s:.1f}", f"{row.tokens_per_s / ar.tokens_per_s:.2f}x",
            f"{row.num_tokens / row.num_steps:.2f}", f"{100 * row.num_steps / row.num_tokens:.1f}",
            f"{num_equal} of {len(row.answers)}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
