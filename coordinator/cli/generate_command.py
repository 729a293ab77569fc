"""`brigade generate`: its flags, and what they amount to."""

import sys

import typer

from coordinator.cli import flags
from coordinator.cli.chosen import chosen_cluster, chosen_sampling, refuse_idle_objective
from coordinator.cli.parse import parse_bias, parse_tokens
from coordinator.cli.refusals import given_flags, refuse, refuse_idle, require_one_prompt, require_text
from coordinator.cli.server_flags import NOT_THERE, ApiKeyFile, ServerUrl, server_body
from coordinator.cluster.journal_file import holds_something
from coordinator.decoding.decode import Decode, make_cache_choice, make_decode
from coordinator.planning.recovery import USUAL
from coordinator.sessions.request import make_sampling
from worker.errors import InputError


def generate(
    ctx: typer.Context,
    text: flags.Text = None,
    prompt: flags.Prompt = None,
    prompt_tokens: flags.PromptTokens = None,
    system_prompt: flags.SystemPrompt = None,
    raw: flags.Raw = False,
    max_tokens: flags.MaxTokens = 256,
    stop: flags.Stop = None,
    ignore_eos: flags.IgnoreEos = False,
    prefill_step_size: flags.PrefillStepSize = None,
    server: ServerUrl = None,
    api_key_file: ApiKeyFile = None,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    objective: flags.Aims = "latency",
    context: flags.Context = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    check_finite: flags.CheckFinite = False,
    rejoin_timeout: flags.RejoinTimeout = USUAL.rejoin_s,
    recovery_timeout: flags.RecoveryTimeout = USUAL.recovery_s,
    temp: flags.Temp = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    min_p: flags.MinP = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    presence_penalty: flags.PresencePenalty = 0.0,
    frequency_penalty: flags.FrequencyPenalty = 0.0,
    logit_bias: flags.LogitBias = None,
    seed: flags.Seed = None,
    decode: flags.DecodeKind = "auto",
    window: flags.Window = "auto",
    entropy_threshold: flags.EntropyThreshold = Decode.entropy_threshold,
    position_penalty: flags.PositionPenalty = Decode.position_penalty,
    repeat_guard: flags.RepeatGuard = 0,
    kv: flags.Kv = "full",
    max_kv_size: flags.MaxKvSize = None,
    logprobs: flags.Logprobs = None,
    as_json: flags.Json = False,
    stats: flags.Stats = False,
    trace: flags.Trace = None,
    journal: flags.Journal = None,
) -> None:
    """Answer one prompt; the text goes to standard output as it comes.

    Everything in this process: brigade generate --local 0 "What is the capital of France?"

    Two workers on this machine: brigade generate --local 2 "Tell me a story about a fox."

    The workers of cluster.yaml: brigade generate --config cluster.yaml "Hello"

    A server that runs already: brigade generate --server http://localhost:9338 "Hello"
    """
    if server is None:
        refuse(ctx, ("api_key_file",), "expected only with --server")
    else:
        for names, why in NOT_THERE.items():
            refuse(ctx, names, why)
    if repeat_guard == 1:
        raise InputError("repeat_guard", "expected 0 (off) or at least 2 times, got 1")
    require_one_prompt(ctx, may_lack=holds_something(journal))
    require_text({"system_prompt": system_prompt, "stop": stop, "logit_bias": logit_bias})
    options = chosen_cluster(ctx)
    refuse_idle_objective(ctx)
    sampling = chosen_sampling(ctx) | {
        "logit_bias": parse_bias(logit_bias or ""),
        "logprobs": 0 if logprobs is None else logprobs + 1,
    }
    make_sampling(**sampling)  # refuses now what the model's own choices cannot mend
    tokens = None if prompt_tokens is None else parse_tokens(prompt_tokens)
    decoder = make_decode(decode, window, entropy_threshold, position_penalty)
    cache = make_cache_choice(kv, max_kv_size)
    refuse_idle(ctx)

    from coordinator.cluster.templates import TEMPLATES

    if server is None and not raw and (text, prompt) != (None, None):
        TEMPLATES.start()  # beside the imports below, which take a second
    from coordinator.cli.generate import run_generate
    from coordinator.cli.run_async import run_async
    from coordinator.cli.wish import Wish

    wish = Wish(
        prompt=read_prompt(text, prompt), prompt_tokens=tokens, system=system_prompt, raw=raw, max_tokens=max_tokens,
        sampling=sampling, stops=tuple(stop or ()), ignore_eos=ignore_eos, decode=decoder, cache=cache,
        repeat_guard=repeat_guard, chunk=prefill_step_size, as_json=as_json, with_stats=stats, trace=trace,
        journal=journal, given=given_flags(ctx),
    )  # fmt: skip
    if server is not None:
        from coordinator.cli.remote import run_remote

        run_async(run_remote(server, api_key_file, server_body(ctx, sampling), wish))
        return
    run_async(run_generate(options, wish))


def read_prompt(text: str | None, prompt: str | None) -> str | None:
    """The prompt, from standard input if it is `-`."""
    given = text if prompt is None else prompt
    return _standard_input() if given == "-" else given


def _standard_input() -> str:
    """As python reads a flag, whatever the locale: bytes that are no UTF-8 become lone surrogates."""
    return sys.stdin.buffer.read().decode(errors="surrogateescape")
