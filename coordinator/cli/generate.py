"""`brigade generate`: one request, its text as it comes, and what it took."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from coordinator.cli import flags
from coordinator.cli.parse import (
    chosen_cluster,
    chosen_sampling,
    given_flags,
    parse_bias,
    parse_tokens,
    refuse_flags,
    require_one_prompt,
    server_body,
)
from coordinator.cli.report import print_stats, print_summary, report_logprobs, require_writable, stages_of, stats_of
from coordinator.cli.show import Printer
from coordinator.cli.trace import trace_events
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.decoding.decode import Decode, make_cache_choice, make_decode
from coordinator.engine.journal_file import JournalFile, holds_something
from coordinator.planning.recovery import USUAL
from coordinator.sessions.output import Answer, Output, Token
from coordinator.sessions.request import (
    Conversation,
    Request,
    RequestSpec,
    make_sampling,
    most_rows,
    require_utf8,
    room_for_answer,
)
from protos.brigade_pb2 import Cache, Sampling
from worker.errors import BrigadeError, InputError

if TYPE_CHECKING:
    from coordinator.cluster.chain import Chain
    from coordinator.engine.inputs import InputProcessor

MAX_WAIT_S = 600.0  # for memory
_NO_FIGURES: dict[str, Any] = {"stages": [], "waterfall": None}

Keep = Callable[[Output, Callable[[str], None]], Awaitable[None]]


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
    server: flags.ServerUrl = None,
    api_key_file: flags.ApiKeyFile = None,
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
    if server is not None:
        for names, why in flags.ELSEWHERE.items():
            refuse_flags(ctx, names, why)
    if raw or prompt_tokens is not None:
        refuse_flags(
            ctx, ("system_prompt",), "not expected with --raw or --prompt-tokens, which are all that the model gets"
        )
    if repeat_guard == 1:
        raise InputError("repeat_guard", "expected 0 (off) or at least 2 times, got 1")
    require_one_prompt(ctx, may_lack=holds_something(journal))
    if "" in (stop or ()):
        raise InputError("stop", "expected some text, found none")
    sampling = chosen_sampling(ctx) | {
        "logit_bias": parse_bias(logit_bias or ""),
        "logprobs": 0 if logprobs is None else logprobs + 1,
    }
    make_sampling(**sampling)  # refuses now what the model's own choices cannot mend
    tokens = None if prompt_tokens is None else parse_tokens(prompt_tokens)
    decoder = make_decode(decode, window, entropy_threshold, position_penalty)
    cache = make_cache_choice(kv, max_kv_size)
    options = chosen_cluster(ctx) if server is None else None

    from coordinator.engine.bounded import TEMPLATES

    if server is None and not raw and (text, prompt) != (None, None):
        TEMPLATES.start()  # beside the imports below, which take a second
    from coordinator.cli.run import run_async

    asked = GenerateOptions(
        prompt=read_prompt(text, prompt), prompt_tokens=tokens, system=system_prompt, raw=raw, max_tokens=max_tokens,
        sampling=sampling, stops=tuple(stop or ()), ignore_eos=ignore_eos, decode=decoder, cache=cache,
        repeat_guard=repeat_guard, chunk=prefill_step_size, as_json=as_json, with_stats=stats, trace=trace,
        journal=journal, given=given_flags(ctx),
    )  # fmt: skip
    if options is not None:
        run_async(run_generate(options, asked))
    elif server is not None:
        from coordinator.cli.remote import run_remote

        run_async(run_remote(server, api_key_file, server_body(ctx, sampling), asked))


def read_prompt(text: str | None, prompt: str | None) -> str | None:
    """Return the prompt, read from standard input if it is `-`: bytes that are no UTF-8 become lone surrogates."""
    given = text if prompt is None else prompt
    return sys.stdin.buffer.read().decode(errors="surrogateescape") if given == "-" else given


@dataclass(frozen=True)
class GenerateOptions:
    """What `generate` is asked for beyond the cluster: the prompt, how to go on from it, and what to print."""

    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    system: str | None = None
    raw: bool = False
    max_tokens: int = 256
    sampling: Mapping[str, Any] = field(default_factory=dict)  # as chosen; the model's own choices are below it
    decode: Decode = field(default_factory=lambda: Decode("auto"))
    cache: Cache = field(default_factory=Cache)
    repeat_guard: int = 0
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    chunk: int | None = None
    as_json: bool = False
    with_stats: bool = False
    trace: Path | None = None
    journal: Path | None = None
    given: frozenset[str] = frozenset()  # flags of the command line, to be compared with a journal's request

    def require_prompt(self, *, has_template: bool = True) -> Conversation | str | tuple[int, ...]:
        """Return what the model is given: a conversation where its template is to be used, else text or token ids.

        Raises:
            InputError: there is no text, or bytes that are no UTF-8, or a system prompt without a template.
        """
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        require_utf8("prompt", self.prompt or "")
        require_utf8("system_prompt", self.system or "")
        if self.prompt is None or not (self.prompt if self.raw else self.prompt.strip()):
            raise InputError("prompt", "expected some text, found none")
        if self.raw or not has_template:
            if self.system:
                raise InputError("system_prompt", "this model has no chat template that would give it its place")
            return self.prompt
        system = [{"role": "system", "content": self.system}] if self.system else []
        return Conversation((*system, {"role": "user", "content": self.prompt}))


class Prepared(NamedTuple):
    """A checked request, and what makes its text."""

    inputs: InputProcessor
    request: Request
    own_sampling: Mapping[str, float]  # parameters that are the model's own choice


async def prepare(asked: GenerateOptions, options: ClusterOptions) -> Prepared:
    """Read the model's configuration and check the request against it, before any node is asked.

    Raises:
        InputError: the model cannot serve it. ModelError: there is no such model, or it cannot be read.
    """
    from coordinator.engine.inputs import InputProcessor

    if asked.trace is not None:
        require_writable("trace", asked.trace)
    needs_text = asked.prompt is not None or bool(asked.stops)
    inputs = await InputProcessor.read(
        options.model, trust_remote_code=options.trust_remote_code, needs_text=needs_text
    )
    spec = RequestSpec(
        prompt=asked.require_prompt(has_template=inputs.has_chat_template),
        max_tokens=asked.max_tokens,
        sampling=asked.sampling,
        decode=asked.decode,
        cache=asked.cache,
        stops=asked.stops,
        ignore_eos=asked.ignore_eos,
        repeat_guard=asked.repeat_guard,
    )
    try:
        request = await inputs.make_request(spec)
    except InputError as error:
        if error.field == "prompt" and asked.prompt_tokens is not None:
            raise InputError("prompt_tokens", error.message) from error
        raise
    if asked.prompt is not None and not inputs.has_chat_template and not asked.raw:
        say("note: this model has no chat template; the prompt is given as it stands")
    own = {name: value for name, value in inputs.defaults.items() if name not in asked.sampling}
    return Prepared(inputs, request, own)


async def run_generate(options: ClusterOptions, asked: GenerateOptions) -> None:
    """Answer one request: text to standard output as it comes, the summary to standard error."""
    from coordinator.cli.resume import header_of, resume

    if asked.journal is None:
        await _answer(options, asked, await prepare(asked, options))
        return
    async with JournalFile(asked.journal) as journal:
        if journal.found is not None:
            prepared = await resume(asked, options, journal.found)
        elif asked.prompt is None and asked.prompt_tokens is None:
            raise InputError(
                "journal", "it ends before its request does, so there is none to go on with; give a prompt"
            )
        else:
            prepared = await prepare(asked, options)
            await journal.begin(await header_of(prepared))
        await _answer(options, asked, prepared, journal.keep)


async def _answer(
    options: ClusterOptions, asked: GenerateOptions, prepared: Prepared, keep: Keep | None = None
) -> None:
    """Print an answer from where its journal ends, or all of it."""
    from coordinator.engine.engine import open_engine

    inputs, request, own_sampling = prepared
    parser, answer = inputs.parser(request), Answer()
    if request.known.finish_reason is not None:
        _tell_finished(asked, request, parser.text)
        return
    context = max(options.context, most_rows(request, inputs.spec.context))
    is_traced = asked.as_json or asked.with_stats or asked.trace is not None
    async with open_engine(inputs, options, context, max_waiting=1, max_wait_s=MAX_WAIT_S) as engine:
        with (
            Printer(is_silent=asked.as_json) as printer,
            _failures_as_json(asked, request, answer, lambda: parser.text),
        ):
            outputs = engine.generate(request, parser=parser, chunk=asked.chunk, traced=is_traced)
            await print_outputs(outputs, printer, answer, keep)
            answer.statuses = await engine.chain.statuses()  # while the caches are still there
        chain = engine.chain  # on which the answer ended
        if asked.trace is not None:
            asked.trace.write_text(json.dumps(trace_events(answer.usage.legs, answer.token_times)), encoding="utf-8")
        if asked.as_json:
            print(json.dumps(_as_json(request, chain, answer, parser.text)), flush=True)
            return
        drawn = how_drawn(request.sampling, own_sampling)
        print_summary(answer, how_it_ended(request, answer, inputs.spec.context), drawn)
        if asked.with_stats:
            print_stats(answer, chain.plan, answer.waterfall())


async def print_outputs(
    outputs: AsyncGenerator[Output, None], printer: Printer, answer: Answer, keep: Keep | None = None
) -> None:
    """Print an engine's outputs as they come, and add them up in `answer`; `keep` keeps each one, then prints it."""
    async with aclosing(outputs):
        async for output in outputs:
            printer.count(len(output.tokens))
            if keep is None:
                printer.write(output.text)
            else:
                await keep(output, printer.write)
            answer.add(output)


def how_it_ended(request: Request, answer: Answer, context: int) -> str:
    """Return why there are no more tokens of an answer by a model with a context of so many tokens."""
    if answer.finish_reason == "length":
        num_tokens = len(request.known.tokens) + len(answer.tokens)
        if num_tokens >= request.max_tokens:
            return f"cut off at --max-tokens {request.max_tokens}"
        if num_tokens >= room_for_answer(request, context):
            return f"cut off where the model's context of {context} tokens ends"
        return "cut off where the memory of the nodes ends"
    if answer.stop is not None:
        return "ended at a --stop text"
    return "ended by itself" if answer.tokens[-1] in request.eos else "ended as it began to repeat itself"


def how_drawn(sampling: Sampling, own: Mapping[str, float]) -> str:
    """Return temperature and seed of a sampled answer, and whose choice they were; "" for the likeliest tokens."""
    if not sampling.temperature:
        return ""
    names = ", ".join(f"{name} {value:g}" for name, value in own.items())
    choice = f"as the model's generation_config.json says ({names})" if own else f"at --temp {sampling.temperature:g}"
    return f"sampled {choice}, --seed {sampling.seed}"


@contextmanager
def _failures_as_json(
    asked: GenerateOptions, request: Request, answer: Answer, text: Callable[[], str]
) -> Iterator[None]:
    """With `--json`, print what there is of an answer that breaks off, and why it does."""
    try:
        yield
    except BrigadeError as error:
        if asked.as_json:
            known = _answer_as_json(request, [*request.known.tokens, *answer.samples], None, text())
            print(json.dumps({**known, "stats": None, **_NO_FIGURES, "error": {"message": str(error)}}), flush=True)
        raise


def _tell_finished(asked: GenerateOptions, request: Request, text: str) -> None:
    """Print an answer that its journal holds whole; no node was asked."""
    known = request.known
    if asked.as_json:
        stats = {"tokens_from_journal": len(known.tokens), "recoveries": 0}
        found = _answer_as_json(request, known.tokens, known.finish_reason, text)
        print(json.dumps({**found, "stats": stats, **_NO_FIGURES}), flush=True)
    else:
        say(f"{asked.journal} holds the whole answer already: {len(known.tokens)} tokens; --json prints it")


def _as_json(request: Request, chain: Chain, answer: Answer, text: str) -> dict[str, Any]:
    """Return the object of `--json`."""
    waterfall, known = answer.waterfall(), request.known.tokens
    return {
        **_answer_as_json(request, [*known, *answer.samples], answer.finish_reason, text),
        "stats": stats_of(answer) | ({"tokens_from_journal": len(known)} if known else {}),
        "stages": stages_of(answer, chain.plan, waterfall),
        "waterfall": {"wall_ms": waterfall.wall_ms, **waterfall.parts},
    }


def _answer_as_json(request: Request, tokens: Sequence[Token], finish_reason: str | None, text: str) -> dict[str, Any]:
    """Return the part of that object that does not depend on what the answer took."""
    return {
        "text": text,
        "tokens": [token.token for token in tokens],
        "prompt_tokens": len(request.prompt),
        "finish_reason": finish_reason,
        "logprobs": report_logprobs(tokens) if request.sampling.logprobs else None,
        "seed": request.sampling.seed,
    }
