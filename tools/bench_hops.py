"""What slow hops cost each decoder: a chain of local workers with a delaying TCP proxy in front of every one.

python -m tools.bench_hops [--delay-ms 20] [--workers 2] [--model demo]

Every connection to a worker, the coordinator's and its predecessor's, goes through that worker's proxy, which holds
each piece back for `--delay-ms` in either direction. What a step waits for crosses each hop once and one way: frames
from the coordinator to worker 1 and on from worker to worker, the result from the last worker back to the coordinator
(on the stream that the coordinator opened). So a step of a chain with N workers is (N + 1) times `--delay-ms` slower,
60 ms for two workers and 20 ms. Nothing else that travels is on that path: acknowledgements, keepalive and status
calls overlap with it or come after the last token.
"""

import math
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

import typer
import uvloop

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
from tools.figures import table
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


class Taken:
    """What one decoder made of each prompt when it was fastest: whatever else runs only adds to that."""

    def __init__(self, num_prompts: int) -> None:
        self._seconds = [math.inf] * num_prompts
        self._steps = [0] * num_prompts
        self.answers: list[list[int]] = [[] for _ in range(num_prompts)]

    def add(self, number: int, answer: Answer) -> None:
        self._seconds[number] = min(self._seconds[number], answer.ttft_s + answer.decode_s)
        self._steps[number] = answer.usage.num_steps
        self.answers[number] = answer.tokens

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def num_steps(self) -> int:
        return sum(self._steps)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / sum(self._seconds)


@dataclass(frozen=True)
class Measured:
    """All decoders on a chain with slow hops."""

    layers: list[int]  # of each node
    hop_ms: float  # that 64 bytes took to the first worker, one way
    taken: dict[str, Taken]  # by decoder


def main(
    delay_ms: Annotated[float, typer.Option(min=0, help="Added to every hop, one way.")] = 20.0,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Worker processes beside the coordinator.")] = 2,
    model: Annotated[str, typer.Option(help="As for `brigade generate`; the prompts suit `demo`.")] = "demo",
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens per answer.")] = 256,
    draft_model: Annotated[str | None, typer.Option(help="As for `brigade generate`.")] = None,
) -> None:
    """Tokens per second of every decoder over slow hops, all in one run."""
    options = cluster_options(None, model, workers, draft_model=draft_model)
    _print(uvloop.run(_measure(options, delay_ms, max_tokens)), delay_ms)


async def _measure(options: ClusterOptions, delay_ms: float, max_tokens: int) -> Measured:
    """Every decoder that the model can run on, `ar` first."""
    inputs = await InputProcessor.read(options)
    decodes = {_name(decode): decode for decode in (AR, *DRAFTING) if decode == AR or _is_able(decode, inputs.spec)}
    return await measure(options, inputs, decodes, delay_ms, max_tokens)


async def measure(
    options: ClusterOptions,
    inputs: InputProcessor,
    decodes: Mapping[str, Decode],
    delay_ms: float,
    max_tokens: int = 256,
    rounds: int = 1,
) -> Measured:
    """Answer each of `PROMPTS` by all decoders in turns, after short answers that do not count.

    What a chain learns of its steps is kept from one prompt to the next, and only for the windows that choose for
    themselves.
    """
    prompts = [await inputs.prompt_ids(Conversation.of(prompt)) for prompt in PROMPTS]
    taken = {name: Taken(len(prompts)) for name in decodes}
    async with open_slow_chain(options, inputs.checkpoint, delay_ms / 1e3) as chain:
        costs, hops_ms = chain.costs, [await _hop_ms(chain)]
        for turn, (number, ids) in product(range(rounds + 1), enumerate(prompts)):
            for name, decode in decodes.items():
                request = Request(ids, max_tokens if turn else _WARM_UP_TOKENS, decode=decode, eos=inputs.eos)
                check_request(request, inputs.spec)
                chain.costs = costs if decode in LEARNING else ChainCosts(chain.num_stages)
                answer = await generate_once(chain, request)
                if turn:
                    taken[name].add(number, answer)
        hops_ms.append(await _hop_ms(chain))
        rates = ", ".join(f"{each.tokens_per_s:.1f}" for each in taken.values())
        print(f"{delay_ms:g} ({min(hops_ms):.2f}) ms: {rates} tok/s", file=sys.stderr, flush=True)
        return Measured(chain.plan.layers, min(hops_ms), taken)


async def _hop_ms(chain: Chain) -> float:
    return (await chain.peers[0].measure_link()).rtt_ms / 2


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


def _print(found: Measured, delay_ms: float) -> None:
    ar, hops = found.taken["ar"], len(found.layers)
    print(f"{hops} nodes {found.layers}, {delay_ms:g} ms on each of {hops} hops a round trip, {machine_name()}\n")
    lines = []
    for name, taken in found.taken.items():
        num_equal = sum(answer == expected for answer, expected in zip(taken.answers, ar.answers, strict=True))
        lines.append((
            name, f"{taken.tokens_per_s:.1f}", f"{taken.tokens_per_s / ar.tokens_per_s:.2f}x",
            f"{taken.num_tokens / taken.num_steps:.2f}", f"{100 * taken.num_steps / taken.num_tokens:.1f}",
            f"{num_equal} of {len(taken.answers)}",
        ))  # fmt: skip
    header = "decoder", "tok/s", "against ar", "tokens per step", "round trips per 100", "equal to ar"
    print(table(header, lines, 1), end="")


if __name__ == "__main__":
    run_command(main)
