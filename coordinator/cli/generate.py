"""`brigade generate`: one request and its statistics; with a journal it can continue after a crash."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from coordinator.cli import flags
from coordinator.cli.flags import given_flags, refuse_flags
from coordinator.cli.report import print_stats, print_summary, stages_of, stats_of
from coordinator.cli.show import Printer, with_prompt_shown
from coordinator.cli.trace import trace_events
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.decoding.decode_options import SYSTEM, cache_name, make_cache_choice
from coordinator.engine.bounded import TEMPLATES
from coordinator.engine.journal_file import JournalFile, holds_something
from coordinator.sessions.journal import Header, Journal
from coordinator.sessions.output import Answer, Output, Token
from coordinator.sessions.request import (
    Conversation,
    Request,
    RequestSpec,
    SamplingParams,
    check_request,
    make_sampling,
    most_rows,
    require_text,
    room_for_answer,
)
from protos.brigade_pb2 import Contents, Sampling
from worker.errors import BrigadeError, InputError, ModelError
from worker.platform.files import require_writable, writing
from worker.platform.text import counted
from worker.platform.threads import run_in_thread

if TYPE_CHECKING:
    from coordinator.engine.inputs import InputProcessor
    from worker.model.checkpoint import Checkpoint

_cache = partial(typer.Option, rich_help_panel="Cache")
_PROMPTS = {"text": "the argument", "prompt": "--prompt", "prompt_tokens": "--prompt-tokens"}
_SERVER_FIELDS = ("max_tokens", "stop", "ignore_eos", *flags.WINDOWS, "repeat_guard", "kv", "max_kv_size", "kv_keep")

Keep = Callable[[Output, Callable[[str], None]], Awaitable[None]]


def generate(
    ctx: typer.Context,
    prompt: flags.PromptFlags,
    *,
    max_tokens: flags.MaxTokens = 256,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue past the end-of-sequence token.")] = False,
    prefill_step_size: flags.PrefillStepSize = None,
    server: flags.ServerFlags,
    cluster: flags.ClusterFlags,
    sampling: flags.SamplingFlags,
    windows: flags.DecodeFlags,
    repeat_guard: Annotated[
        int, typer.Option(min=0, help="End the answer once its last tokens repeat this many times, at least 2; 0: off.")
    ] = 0,
    kv: Annotated[
        str,
        _cache(
            metavar="full|rotating|int8|int4",
            help="The KV cache: every token; the first and the latest, --max-kv-size in all; every token in 8 or 4 "
            "bits, in about 0.55 or 0.3 of the bytes.",
        ),
    ] = "full",
    max_kv_size: Annotated[int | None, _cache(min=1, help="Tokens that a rotating cache keeps.")] = None,
    kv_keep: Annotated[
        str | None,
        _cache(
            metavar="N|system",
            help="Tokens at the beginning that a rotating cache never drops (attention sinks): a number, or as many as "
            "the system prompt has. (default: 4)",
        ),
    ] = None,
    prompt_cache: Annotated[
        Path | None,
        _cache(
            metavar="FILE",
            help="Keep the prompt's caches in this file: a later prompt that begins alike goes on from there, also on "
            "other nodes.",
        ),
    ] = None,
    output: flags.OutputFlags,
) -> Coroutine[Any, Any, None]:
    """Answer one prompt; the text goes to standard output as it comes.

    Everything in this process: brigade generate --local 0 "What is the capital of France?"

    Two workers on this machine: brigade generate --local 2 "Tell me a story about a fox."

    The workers of cluster.yaml: brigade generate --config cluster.yaml "Hello"

    A running server: brigade generate --server http://localhost:9338 "Hello"
    """
    server.refuse_others(ctx)
    for other in filter(None, (output.journal, prompt_cache)):
        flags.require_other_file("trace", output.trace, other)
    if prompt.raw or prompt.prompt_tokens is not None:
        why = "not expected with --raw or --prompt-tokens, which are everything that the model gets"
        refuse_flags(ctx, ("system_prompt",), why)
    if not output.as_json and output.journal is None:
        refuse_flags(ctx, ("logprobs",), "expected only with --json, which prints them, or --journal")
    if repeat_guard == 1:
        raise InputError("repeat_guard", "expected 0 (off) or at least 2 times, got 1")
    require_one_prompt(prompt, may_lack=holds_something(output.journal))
    if "" in (stop or ()):
        raise InputError("stop", "expected some text, found none")
    flags.refuse_drafter(ctx, [windows.decode])
    chosen = sampling.chosen()
    tokens = None if prompt.prompt_tokens is None else flags.parse_tokens(prompt.prompt_tokens)
    spec = RequestSpec(
        (), max_tokens, chosen if output.logprobs is None else chosen | {"logprobs": output.logprobs + 1},
        windows.decoder(), make_cache_choice(kv, max_kv_size, kv_keep), kv_keep == SYSTEM, tuple(stop or ()),
        ignore_eos=ignore_eos, repeat_guard=repeat_guard, **sampling.tokens(),
    )  # fmt: skip
    options = cluster.options() if server.server is None else None
    asked = GenerateOptions(
        *(read_prompt(prompt), tokens, prompt.system_prompt, prompt.raw, spec, prefill_step_size, prompt_cache),
        output=output,
        given=given_flags(ctx),
    )
    if options is not None:
        if asked.prompt is not None and not asked.raw:
            TEMPLATES.start()  # in parallel to imports that take a second
        return run_generate(options, asked)

    from coordinator.cli.remote import run_remote

    named = {name: value for name in _SERVER_FIELDS if (value := ctx.params[name]) is not None}
    body = {name: value for name, value in named.items() if name in {"max_tokens"} | asked.given}
    return run_remote(server, windows.in_numbers(body) | chosen | sampling.tokens(), asked)


def require_one_prompt(prompt: flags.PromptFlags, *, is_text: bool = False, may_lack: bool = False) -> None:
    """Raise InputError unless there is exactly one prompt, or none where it `may_lack`.

    Args:
        is_text: the command takes no token ids.
    """
    found = {name: getattr(prompt, parameter) for parameter, name in _PROMPTS.items()}
    given = [f"{name} {_shortened(repr(each))}" for name, each in found.items() if each is not None]
    if len(given) != 1 and (given or not may_lack):
        expected = "--prompt TEXT (or TEXT alone in quotes; `-` reads standard input)"
        if not is_text:
            expected = f"either {expected} or --prompt-tokens 1,2,3"
        raise InputError("", f"expected {expected}, found {' and '.join(given) or 'none'}")


def read_prompt(prompt: flags.PromptFlags) -> str | None:
    """Return the prompt, from standard input if it is `-`: bytes that are not UTF-8 become lone surrogates."""
    given = prompt.text if prompt.prompt is None else prompt.prompt
    return sys.stdin.buffer.read().decode(errors="surrogateescape") if given == "-" else given


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


@dataclass(frozen=True)
class GenerateOptions:
    """What `generate` is asked for beyond the cluster: the prompt, how to continue it, and what to print."""

    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    system: str | None = None
    raw: bool = False
    spec: RequestSpec = RequestSpec((), 256)  # noqa: RUF009 - immutable; without the prompt
    chunk: int | None = None  # the most rows of a prompt chunk
    prompt_cache: Path | None = None
    output: flags.OutputFlags = flags.OutputFlags()  # noqa: RUF009 - immutable
    given: frozenset[str] = frozenset()  # flags of the command line, which must agree with a journal's request

    def require_prompt(self, *, has_template: bool = True) -> Conversation | str | tuple[int, ...]:
        """Return what the model gets: a conversation if its template is to be used, else text or token ids.

        Raises:
            InputError: there is no text, or it is not UTF-8, or there is a system prompt without a template.
        """
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        require_text("prompt", self.prompt or "")
        require_text("system_prompt", self.system or "")
        if self.prompt is None or not (self.prompt if self.raw else self.prompt.strip()):
            raise InputError("prompt", "expected some text, found none")
        if self.raw or not has_template:
            if self.system:
                raise InputError("system_prompt", "this model has no chat template that would use it")
            return self.prompt
        return Conversation.of(self.prompt, self.system)


class Prepared(NamedTuple):
    """A checked request, and the processor that decodes its tokens."""

    inputs: InputProcessor
    request: Request
    own_sampling: Mapping[str, float]  # parameters from the model's generation_config.json


async def prepare(asked: GenerateOptions, options: ClusterOptions) -> Prepared:
    """Read the model's configuration and check the request against it, before any node is asked.

    Raises:
        InputError: the model cannot serve it. ModelError: there is no such model, or it cannot be read.
    """
    from coordinator.engine.inputs import InputProcessor, renaming

    if asked.output.trace is not None:
        require_writable("trace", asked.output.trace)
    needs_text = asked.prompt is not None or bool(asked.spec.stops)
    inputs = await InputProcessor.read(options, needs_text=needs_text)
    spec = replace(asked.spec, prompt=asked.require_prompt(has_template=inputs.has_chat_template))
    with renaming({} if asked.prompt_tokens is None else {"prompt": "prompt_tokens"}):
        request = await inputs.make_request(spec)
    if asked.prompt is not None and not inputs.has_chat_template and not asked.raw:
        say("note: this model has no chat template; the prompt is given as it stands")
    own = {name: value for name, value in inputs.defaults.items() if name not in asked.spec.sampling}
    return Prepared(inputs, request, own)


async def run_generate(options: ClusterOptions, asked: GenerateOptions) -> None:
    """Answer one request: text to standard output as it comes, the summary to standard error."""
    if asked.output.journal is None:
        await _answer(options, asked, await prepare(asked, options))
        return
    async with JournalFile(asked.output.journal) as journal:
        if journal.found is not None:
            prepared = await _resume(asked, options, journal.found)
        elif asked.prompt is None and asked.prompt_tokens is None:
            raise InputError("journal", "it ends before its request does, so it cannot be continued; give a prompt")
        else:
            prepared = await prepare(asked, options)
            await journal.begin(await _header_of(prepared))
        await _answer(options, asked, prepared, journal.keep)


async def _answer(
    options: ClusterOptions, asked: GenerateOptions, prepared: Prepared, keep: Keep | None = None
) -> None:
    """Print an answer, or the part of it that its journal lacks."""
    from coordinator.engine.engine import open_engine
    from coordinator.engine.prompt_cache import PromptCache

    inputs, request, own_sampling = prepared
    output, parser, answer = asked.output, inputs.parser(request), Answer()
    if request.known.finish_reason is not None:
        _print_finished(asked, request, parser.text)
        return
    options = replace(options, context=max(options.context, most_rows(request, inputs.spec.context)))
    is_traced = output.as_json or output.stats or output.trace is not None
    prompt_cache = None
    if asked.prompt_cache is not None:
        opening = partial(PromptCache, asked.prompt_cache, inputs.checkpoint, options.cluster.cache_disk)
        prompt_cache = await run_in_thread(opening)
        options = prompt_cache.options(options)
    async with open_engine(inputs, options, max_waiting=1) as engine:
        with Printer(answer, is_silent=output.as_json) as printer:
            try:
                outputs = engine.generate(request, parser=parser, chunk=asked.chunk, traced=is_traced)
                await print_outputs(with_prompt_shown(outputs, engine, request), printer, answer, keep)
                answer.statuses = await engine.chain.statuses()  # while the caches are still there
            except BrigadeError as error:
                if output.as_json:  # the part of the answer that came before the error
                    tokens = [*request.known.tokens, *answer.samples]
                    _print_json(request, tokens, None, parser.text, error={"message": str(error)})
                raise
        chain = engine.chain  # on which the answer ended
        if output.trace is not None:
            events = json.dumps(trace_events(answer.usage.legs, answer.token_times))
            with writing("trace", output.trace):
                output.trace.write_text(events, encoding="utf-8")
        if output.as_json:
            known, waterfall = request.known.tokens, answer.waterfall()
            _print_json(
                *(request, [*known, *answer.samples], answer.finish_reason, parser.text),
                stats=stats_of(answer) | ({"tokens_from_journal": len(known)} if known else {}),
                stages=stages_of(answer, chain.plan, waterfall),
                waterfall=waterfall.as_json(),
            )
        else:
            drawn = how_drawn(request.sampling, own_sampling)
            print_summary(answer, how_it_ended(request, answer, inputs.spec.context), drawn)
            if output.stats:
                print_stats(answer, chain.plan, answer.waterfall())
        if prompt_cache:
            await prompt_cache.keep(engine)


async def print_outputs(
    outputs: AsyncGenerator[Output, None], printer: Printer, answer: Answer, keep: Keep | None = None
) -> None:
    """Print an engine's outputs as they come, and add them to `answer`; `keep` saves each one before it is printed."""
    async with aclosing(outputs):
        async for output in outputs:
            if keep is None:
                printer.write(output.text)
            else:
                await keep(output, printer.write)
            answer.add(output)


def how_it_ended(request: Request, answer: Answer, context: int) -> str:
    """Return why an answer ended; `context` is the model's, in tokens."""
    if answer.finish_reason == "length":
        num_tokens = len(request.known.tokens) + len(answer.tokens)
        if num_tokens >= request.max_tokens:
            return f"cut off at --max-tokens {request.max_tokens}"
        if num_tokens >= room_for_answer(request, context):
            return f"cut off where the model's context of {context} tokens ends"
        return "cut off where the memory of the nodes ends"
    if answer.stop is not None:
        return "ended at a --stop text"
    return "ended by itself" if answer.tokens[-1] in request.eos else "ended because it repeated itself"


def how_drawn(sampling: Sampling, own: Mapping[str, float]) -> str:
    """Return the temperature and seed of a sampled answer and where they come from; "" for greedy decoding."""
    if not sampling.temperature:
        return ""
    names = ", ".join(f"{name} {value:g}" for name, value in own.items())
    choice = f"as the model's generation_config.json says ({names})" if own else f"at --temp {sampling.temperature:g}"
    return f"sampled {choice}, --seed {sampling.seed}"


def _print_finished(asked: GenerateOptions, request: Request, text: str) -> None:
    """Print an answer that is complete in its journal; no node is asked."""
    known = request.known
    if asked.output.trace is not None:
        say(f"note: {asked.output.trace} is not written: no step is left that it could show")
    if asked.output.as_json:
        untimed = dict.fromkeys(stats_of(Answer(last_at=1)))
        stats = untimed | {"tokens_from_journal": len(known.tokens), "recoveries": 0}
        _print_json(request, known.tokens, known.finish_reason, text, stats=stats)
    else:
        tokens = counted(len(known.tokens), "token")
        say(f"{asked.output.journal} holds the whole answer already: {tokens}; --json prints it")


def _print_json(
    request: Request, tokens: Sequence[Token], finish_reason: str | None, text: str, **figures: Any
) -> None:
    """Print the object of `--json`; without `figures` it has no statistics."""
    logprobs = [
        {
            "token": token.token,
            "logprob": token.logprob,
            "top": [[other.token, other.logprob] for other in token.alternatives],
        }
        for token in tokens
    ]
    found = {
        "text": text,
        "tokens": [token.token for token in tokens],
        "prompt_tokens": len(request.prompt),
        "finish_reason": finish_reason,
        "logprobs": logprobs if request.sampling.logprobs else None,
        "seed": request.sampling.seed,
    }
    flags.print_json({**found, "stats": None, "stages": [], "waterfall": None, **figures})


async def _header_of(prepared: Prepared) -> Header:
    """Return the first record of a request's journal."""
    from worker.model.contents import contents_of

    checkpoint, tokenizer = prepared.inputs.checkpoint, prepared.inputs.tokenizer
    contents = await run_in_thread(partial(contents_of, checkpoint))
    marks = Contents(marks=contents.marks, hub_hashes=contents.hub_hashes)
    return Header(checkpoint.name, checkpoint.fingerprint, marks, prepared.request, tokenizer is not None)


async def _resume(asked: GenerateOptions, options: ClusterOptions, journal: Journal) -> Prepared:
    """Return the journal's request, with the known part of its answer.

    Raises:
        InputError: the model or a given flag differs from the journal's.
    """
    from coordinator.cluster.open import read_model
    from coordinator.engine.inputs import InputProcessor
    from coordinator.engine.tokenizer import Tokenizer

    header = journal.header
    checkpoint, _ = await read_model(options.model, options.draft_model)
    await run_in_thread(partial(_check_model, header, checkpoint))
    request = replace(header.request, known=journal.known)
    tokenizer = Tokenizer(checkpoint, trust_remote_code=options.trust_remote_code) if header.has_text else None
    inputs, prompt = InputProcessor(checkpoint, tokenizer), None
    if asked.given & _PROMPTS.keys():
        prompt = await inputs.prompt_ids(asked.require_prompt(has_template=inputs.has_chat_template))
    breakers = await inputs.dry_breakers(asked.spec)
    for name, value, kept in _pairs(asked, request, prompt, inputs.eos, breakers):
        if value != kept:
            is_text = name in ("prompt", "dry_sequence_breaker")  # its tokens are compared
            found = "another one" if is_text else f"{_shortened(_typed(kept))}, not {_shortened(_typed(value))}"
            raise InputError(name, f"the journal's request has {found}; leave it out, or give another --journal")
    check_request(request, replace(inputs.spec, cache=request.cache))
    return Prepared(inputs, request, {})


def _check_model(header: Header, checkpoint: Checkpoint) -> None:
    from worker.model.contents import check_contents

    expected = f"expected the journal's model ({header.model}), found another one"
    if checkpoint.fingerprint != header.fingerprint:
        raise InputError("journal", f"{expected} ({checkpoint.name}); give it with --model")
    try:
        check_contents(checkpoint, header.contents)
    except ModelError as error:
        raise InputError("journal", f"{expected}: {checkpoint.name} has other weights") from error


def _pairs(
    asked: GenerateOptions,
    request: Request,
    prompt: tuple[int, ...] | None,
    eos: frozenset[int],
    breakers: Sequence[int],
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, the journal's value) of each parameter that was given as a flag.

    Args:
        eos: the model's end-of-sequence tokens.
        breakers: what the flags' dry_sequence_breakers amount to.
    """
    given = asked.given
    if prompt is not None:
        yield "prompt", prompt, request.prompt
    elif others := given & {"raw", "system_prompt"}:
        raise InputError(min(others), "expected with the prompt of the journal, or not at all")
    spec, sampling = asked.spec, make_sampling(**asked.spec.sampling)
    for name in SamplingParams.__annotations__:
        if name == "logprobs" and name in given:
            yield name, sampling.logprobs - 1, request.sampling.logprobs - 1 if request.sampling.logprobs else ()
        elif ("temp" if name == "temperature" else name) in given:
            yield name, _plain(getattr(sampling, name)), _plain(getattr(request.sampling, name))
    own = eos if eos <= request.eos else frozenset()  # else the journal's request ignores them
    for name, value, kept in (
        ("dry_sequence_breaker", list(breakers), list(request.sampling.dry_breakers)),
        ("max_tokens", spec.max_tokens, request.max_tokens),
        ("stop", spec.stops, request.stops),
        ("repeat_guard", spec.repeat_guard, request.repeat_guard),
        ("stop_token_ids", sorted({*spec.stop_token_ids} - own), sorted(request.eos - own)),
        ("ignore_eos", spec.ignore_eos, not own),
        ("kv", cache_name(spec.cache), cache_name(request.cache)),
        ("max_kv_size", spec.cache.size, request.cache.size),
        ("kv_keep", request.cache.keep if spec.keeps_system else spec.cache.keep, request.cache.keep),
        ("decode", spec.decode.kind, request.decode.kind if spec.decode.kind != "auto" else "auto"),
        ("num_draft_tokens", spec.decode.num_drafts, request.decode.num_drafts),
        *(
            (name, getattr(spec.decode, name), getattr(request.decode, name))
            for name in flags.WINDOWS
            if name not in ("decode", "num_draft_tokens")
        ),
    ):
        if name in given:
            yield name, value, kept


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float) else dict(value)


def _typed(value: Any) -> str:
    """Return a parameter's value about as a flag gives it."""
    match value:
        case None:
            return "auto"
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}"
        case dict():
            return ",".join(f"{token}:{bias:g}" for token, bias in value.items()) or "none"
        case list() | tuple():
            return ",".join(repr(each) if isinstance(each, str) else _typed(each) for each in value) or "none"
    return str(value)
