"""The `brigade` command line: flags in, one function of another module out. MLX is imported once a command runs."""

import sys

import typer

from coordinator import flags
from coordinator.decode import make_cache_choice, make_decode
from coordinator.options import cluster_options, parse_bias, parse_tokens
from coordinator.request import make_sampling
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


@app.command()
def demo(
    prompt: flags.Prompt = DEMO_PROMPT,
    max_tokens: flags.MaxTokens = 256,
    as_json: flags.Json = False,
) -> None:
    """Two worker processes and this coordinator on loopback, the bundled model, one answer."""
    options = cluster_options(None, "demo", 2, None, None)

    from coordinator.commands import Wish, run_generate
    from coordinator.run_async import run_async

    print(f"> {prompt}\n", file=sys.stderr, flush=True)
    run_async(run_generate(options, Wish(prompt=prompt, max_tokens=max_tokens, as_json=as_json)))


@app.command()
def generate(
    prompt: flags.Prompt = None,
    prompt_tokens: flags.PromptTokens = None,
    system_prompt: flags.SystemPrompt = None,
    raw: flags.Raw = False,
    max_tokens: flags.MaxTokens = 256,
    stop: flags.Stop = None,
    ignore_eos: flags.IgnoreEos = False,
    prefill_step_size: flags.PrefillStepSize = None,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    context: flags.Context = None,
    temp: flags.Temp = 0.0,
    top_p: flags.TopP = 0.0,
    top_k: flags.TopK = 0,
    min_p: flags.MinP = 0.0,
    repetition_penalty: flags.RepetitionPenalty = 0.0,
    presence_penalty: flags.PresencePenalty = 0.0,
    frequency_penalty: flags.FrequencyPenalty = 0.0,
    logit_bias: flags.LogitBias = None,
    seed: flags.Seed = None,
    decode: flags.DecodeKind = "auto",
    window: flags.Window = "auto",
    entropy_threshold: flags.EntropyThreshold = 0.4,
    position_penalty: flags.PositionPenalty = 0.02,
    repeat_guard: flags.RepeatGuard = 0,
    kv: flags.Kv = "full",
    max_kv_size: flags.MaxKvSize = None,
    logprobs: flags.Logprobs = None,
    as_json: flags.Json = False,
    trace: flags.Trace = None,
) -> None:
    """Answer one prompt; the text goes to standard output as it comes.

    Everything in this process: brigade generate --local 0 -p "What is the capital of France?"

    Two workers on this machine: brigade generate --local 2 -p "Tell me a story about a fox."

    The workers of cluster.yaml: brigade generate --config cluster.yaml -p "Hello"
    """
    if repeat_guard == 1:
        raise InputError("--repeat-guard: expected 0 (off) or at least 2 times, got 1")
    if (prompt is None) == (prompt_tokens is None):
        raise InputError("expected either --prompt TEXT (`-` reads standard input) or --prompt-tokens 1,2,3")
    options = cluster_options(config, model, local, layers, context)
    sampling = make_sampling(
        temperature=temp, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=parse_bias(logit_bias or ""), seed=seed, logprobs=0 if logprobs is None else logprobs + 1,
    )  # fmt: skip
    tokens = None if prompt_tokens is None else parse_tokens(prompt_tokens)

    from coordinator.commands import Wish, run_generate
    from coordinator.run_async import run_async

    wish = Wish(
        prompt=_standard_input() if prompt == "-" else prompt, prompt_tokens=tokens, system=system_prompt, raw=raw,
        max_tokens=max_tokens, sampling=sampling, stops=tuple(stop or ()), ignore_eos=ignore_eos,
        decode=make_decode(decode, window, entropy_threshold, position_penalty),
        cache=make_cache_choice(kv, max_kv_size), repeat_guard=repeat_guard,
        chunk=prefill_step_size, as_json=as_json, trace=trace,
    )  # fmt: skip
    run_async(run_generate(options, wish))


@app.command()
def plan(
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    context: flags.Context = None,
    as_json: flags.Json = False,
) -> None:
    """Where each layer would go and whether it fits; loads nothing."""
    options = cluster_options(config, model, local, layers, context)

    from coordinator.commands import run_plan
    from coordinator.run_async import run_async

    run_async(run_plan(options, as_json=as_json))


@app.command()
def verify(
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    context: flags.Context = None,
    max_tokens: flags.MaxTokens = 32,
    seed: flags.Seed = 0,
    decode: flags.DecodeKind = "ar",
    window: flags.Window = "auto",
    entropy_threshold: flags.EntropyThreshold = 0.4,
    position_penalty: flags.PositionPenalty = 0.02,
    as_json: flags.Json = False,
) -> int:
    """Prove that the cluster's tokens are those of mlx-lm's model in one process; exit code 1 if they are not."""
    options = cluster_options(config, model, local, layers, context)
    decoder = make_decode(decode, window, entropy_threshold, position_penalty)

    from coordinator.run_async import run_async
    from coordinator.verify import run_verify

    return run_async(run_verify(options, decoder, max_tokens=max_tokens, seed=seed or 0, as_json=as_json))


def _standard_input() -> str:
    """As python reads a flag, whatever the locale: bytes that are no UTF-8 become lone surrogates."""
    return sys.stdin.buffer.read().decode(errors="surrogateescape")
