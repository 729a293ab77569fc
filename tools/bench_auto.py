"""What windows and drafts cost where drafts fail, and bring where they hold, against one token per step.

python -m tools.bench_auto [--model demo] [--draft-model FOLDER] [--local 1] [--requests 1,8] [--rounds 5] [--warm-up 2]

Prompts are random tokens. Sampled at a high temperature no draft holds for long; greedily the bundled model's often do.
`python -m tools.random_model MODEL --drafter DRAFTER` writes a pair of which all drafts hold.
"""

import random
import statistics
import time
from typing import Annotated

import typer

from coordinator.cli.flags import parse_counts
from coordinator.cli.run import run_async
from coordinator.cluster.chain import Chain
from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.decoding.decode_options import Decode, suit
from coordinator.engine.engine import Engine
from coordinator.sessions.request import Request, check_request
from protos.brigade_pb2 import Cache, Sampling
from tools.figures import table
from worker.platform.machine import machine_name
from worker.platform.run import run_command
from worker.platform.tasks import together

_NUM_PROMPT = 16
_TEMPERATURES = {"greedy": 0.0, "sampled, temperature 1.6": 1.6}
_AR = Decode("ar")


def main(
    model: Annotated[str, typer.Option(help="A mask-trained model, as for `brigade generate`.")] = "demo",
    local: Annotated[int, typer.Option(min=0, help="Workers on this machine.")] = 1,
    requests: Annotated[str, typer.Option(help="How many requests at once, in turn.")] = "1,8",
    rounds: Annotated[int, typer.Option(min=1, help="Of each, in turn; the median counts.")] = 5,
    warm_up: Annotated[int, typer.Option(min=0, help="Rounds before them: costs and kernels are new.")] = 2,
    draft_model: Annotated[str | None, typer.Option(help="As for `brigade generate`.")] = None,
    num_tokens: Annotated[int, typer.Option("--num-tokens", "-g", min=2, help="Tokens of each answer.")] = 64,
) -> None:
    """Tokens per second of all requests together, from the first prompt to the last token."""
    options = cluster_options(None, model, local, draft_model=draft_model)
    run_async(_measure(options, parse_counts("requests", requests), rounds, warm_up, num_tokens))


async def _measure(
    options: ClusterOptions, counts: tuple[int, ...], rounds: int, warm_up: int, num_tokens: int
) -> None:
    checkpoint, spec = await read_model(options.model, options.draft_model)
    auto_decode = suit(Decode("draft" if options.draft_model else "diffusion"), Cache(), spec)  # or it is refused
    lines = []
    async with open_chain(options, checkpoint) as chain:
        for name, temperature in _TEMPERATURES.items():
            for count in counts:
                taken = [
                    await _round(chain, auto_decode, number, count, temperature, num_tokens)
                    for number in range(warm_up + rounds)
                ][warm_up:]
                one, auto, per_step = (statistics.median(column) for column in zip(*taken, strict=True))
                ratios = sorted(each[1] / each[0] for each in taken)
                spread = f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                cells = (f"{one:.1f}", f"{auto:.1f}", spread, f"{per_step:.2f}")
                lines.append((name, str(count), *cells))
    header = "sampling", "requests", "ar", "auto", "auto against ar", "tokens per step"
    print(f"{spec.name} on {machine_name()}\n", table(header, lines, 1), sep="\n", end="")


async def _round(
    chain: Chain, auto: Decode, number: int, count: int, temperature: float, num_tokens: int
) -> tuple[float, float, float]:
    """Tokens per second by `ar` and by `auto` on the same prompts, and the latter's tokens per step."""
    numbers = random.Random(number)
    prompts = [tuple(numbers.randrange(chain.spec.vocab_size) for _ in range(_NUM_PROMPT)) for _ in range(count)]
    speeds, num_steps = {}, {}
    for decode in (_AR, auto) if number % 2 else (auto, _AR):
        samplings = [Sampling(seed=seed, temperature=temperature) for seed in range(count)]
        asked = [Request(p, num_tokens, s, decode) for p, s in zip(prompts, samplings, strict=True)]
        check_request(asked[0], chain.spec)
        async with Engine(chain) as engine:
            before = time.perf_counter()
            answers = await together(*(engine.answer(each) for each in asked))
            speeds[decode] = count * num_tokens / (time.perf_counter() - before)
        num_steps[decode] = sum(answer.usage.num_steps for answer in answers)
    return speeds[_AR], speeds[auto], count * num_tokens / num_steps[auto]


if __name__ == "__main__":
    run_command(main)
