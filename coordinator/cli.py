"""The `brigade` command line: flags in, one function of commands.py out. Imports MLX only when a command runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from coordinator.options import Config, Context, Json, Layers, Local, Model, cluster_options
from protos.brigade_pb2 import Sampling
from worker.cli import worker
from worker.errors import InputError

DEMO_PROMPT = "Tom has 48 apples. He buys 27 more and then gives away 30. How many apples does Tom have?"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run one language model on several Macs, token for token the model it would be on one.",
)
app.command()(worker)

SAMPLING, OUTPUT = "Sampling", "Output"


@app.command()
def demo(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask.")] = DEMO_PROMPT,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="The most tokens to generate.")] = 256,
    as_json: Json = False,
) -> None:
    """Two worker processes and this coordinator on loopback, the bundled model, one answer."""
    from coordinator.commands import Wish, run_generate
    from coordinator.run_async import run_async

    print(f"> {prompt}\n", file=sys.stderr, flush=True)
    wish = Wish(prompt=prompt, max_tokens=max_tokens, as_json=as_json)
    run_async(run_generate(cluster_options(None, "demo", 2, None, None), wish))


@app.command(name="generate")
def generate_command(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="What to ask; `-` reads standard input.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(metavar="1,2,3", help="The prompt as token ids.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Said to the model before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it stands, without the chat template.")] = False,
    config: Config = None,
    model: Model = None,
    local: Local = None,
    layers: Layers = None,
    context: Context = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="The most tokens to generate.")] = 256,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")] = False,
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the likeliest token.", rich_help_panel=SAMPLING)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 0 or 1 turns it off.", rich_help_panel=SAMPLING)] = 0.0,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest; 0 turns it off.", rich_help_panel=SAMPLING)] = 0,
    min_p: Annotated[float, typer.Option(help="Only p times as likely as the best.", rich_help_panel=SAMPLING)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Divides the logits of recent tokens.", rich_help_panel=SAMPLING)] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="Subtracted if a token is recent.", rich_help_panel=SAMPLING)] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Subtracted per recent use.", rich_help_panel=SAMPLING)] = 0.0,
    logit_bias: Annotated[str | None, typer.Option(metavar="ID:BIAS,...", help="Added to these tokens' logits.", rich_help_panel=SAMPLING)] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same tokens. [default: random]", rich_help_panel=SAMPLING)] = None,
    logprobs: Annotated[int | None, typer.Option(min=0, max=20, help="Report each token's log probability and that of N alternatives (with --json).", rich_help_panel=OUTPUT)] = None,
    prefill_step_size: Annotated[int, typer.Option(min=1, max=8192, help="Rows of a prompt chunk.")] = 512,
    as_json: Json = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of all stages to this file.", rich_help_panel=OUTPUT)] = None,
) -> None:  # fmt: skip
    """Answer one prompt; the text goes to standard output as it comes.

    Everything in this process:  brigade generate --local 0 --prompt "What is the capital of France?"

    Two workers on this machine: brigade generate --local 2 --prompt "Write a Python function that adds two numbers."

    The workers of cluster.yaml: brigade generate --config cluster.yaml --prompt -
    """
    options = cluster_options(config, model, local, layers, context)
    sampling = Sampling(
        temperature=temp, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, logit_bias=parse_bias(logit_bias),
    )  # fmt: skip
    if top_k < 0:
        raise InputError(f"--top-k: expected 0 or more, got {top_k}")
    sampling.top_k = top_k
    sampling.logprobs = 0 if logprobs is None else logprobs + 1

    from coordinator.commands import Wish, random_seed, run_generate
    from coordinator.run_async import run_async

    sampling.seed = random_seed() if seed is None else seed
    wish = Wish(
        prompt=_read_prompt(prompt, prompt_tokens), prompt_tokens=parse_tokens(prompt_tokens), system=system_prompt,
        raw=raw, max_tokens=max_tokens, sampling=sampling, stops=tuple(stop or ()), ignore_eos=ignore_eos,
        chunk=prefill_step_size, as_json=as_json, trace=trace,
    )  # fmt: skip
    run_async(run_generate(options, wish))


@app.command(name="plan")
def plan_command(
    config: Config = None,
    model: Model = None,
    local: Local = None,
    layers: Layers = None,
    context: Context = None,
    as_json: Json = False,
) -> None:
    """Where each layer would go and whether it fits; loads nothing."""
    options = cluster_options(config, model, local, layers, context)

    from coordinator.commands import run_plan
    from coordinator.run_async import run_async

    run_async(run_plan(options, as_json=as_json))


@app.command(name="verify")
def verify_command(
    config: Config = None,
    model: Model = None,
    local: Local = None,
    layers: Layers = None,
    context: Context = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Tokens per prompt.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts and of sampling.")] = 0,
    as_json: Json = False,
) -> int:
    """Prove that the cluster's tokens equal those of mlx-lm's model in one process; exit code 1 if they do not."""
    options = cluster_options(config, model, local, layers, context)

    from coordinator.run_async import run_async
    from coordinator.verify import run_verify

    return run_async(run_verify(options, max_tokens=max_tokens, seed=seed, as_json=as_json))


def parse_tokens(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"--prompt-tokens: expected token ids like 1,2,3, got {text!r}") from None


def parse_bias(text: str | None) -> dict[int, float]:
    try:
        pairs = (pair.split(":") for pair in (text or "").split(",") if pair.strip())
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise InputError(f"--logit-bias: expected ID:BIAS pairs like 5:-1.5,7:2, got {text!r}") from None


def _read_prompt(prompt: str | None, prompt_tokens: str | None) -> str | None:
    if (prompt is None) == (prompt_tokens is None):
        raise InputError("expected either --prompt TEXT (`-` reads standard input) or --prompt-tokens 1,2,3")
    return sys.stdin.read() if prompt == "-" else prompt
