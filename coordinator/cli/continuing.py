"""An answer that goes on from its journal: the request is the journal's, and nothing that is asked for may differ."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from coordinator.cli.wish import Wish, prompt_of
from coordinator.cluster.open import read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.tokenizer import Tokenizer
from coordinator.resident.frontend import Frontend, Task
from coordinator.sessions.answer import Known
from coordinator.sessions.journal import Header, Journal
from coordinator.sessions.request import Request, check_request, make_sampling
from coordinator.sessions.text import TextStream, TokenIds
from protos.brigade_pb2 import CacheKind, Contents
from worker.errors import InputError, ModelError
from worker.model.checkpoint import Checkpoint
from worker.model.contents import check_contents, contents_of
from worker.process.call_thread import run_aside

_PROMPTS = {"text", "prompt", "prompt_tokens"}
_SAMPLING = {
    "temp": "temperature",
    **{name: name for name in ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")},
    **{name: name for name in ("frequency_penalty", "seed", "logprobs", "logit_bias")},
}


async def header_of(task: Task) -> Header:
    """The first record of a task's journal."""
    contents = await run_aside(partial(contents_of, task.checkpoint))
    marks = Contents(marks=contents.marks, hub_hashes=contents.hub_hashes)
    checkpoint = task.checkpoint
    return Header(checkpoint.name, checkpoint.fingerprint, marks, task.request, task.tokenizer is not None)


async def resume(wish: Wish, options: ClusterOptions, journal: Journal) -> Task:
    """The journal's request, with what is known of its answer.

    Raises:
        InputError: the model is another one than the journal's, or something else was asked for than the journal has.
    """
    header = journal.header
    checkpoint, spec = await read_model(options.model)
    await run_aside(partial(_check_model, header, checkpoint))
    request = replace(header.request, known=journal.known)
    tokenizer = Tokenizer(checkpoint, trust_remote_code=options.trust_remote_code) if header.has_text else None
    asked_prompt = None
    if wish.given & _PROMPTS:
        asked_prompt = await Frontend(checkpoint, spec, tokenizer).prompt_ids(prompt_of(wish, tokenizer))
    for name, asked, kept in _pairs(wish, request, asked_prompt):
        if asked != kept:
            found = "another one" if name == "prompt" else f"{_short(kept)}, not {_short(asked)}"
            raise InputError(name, f"the journal's request has {found}; leave it out")
    spec = replace(spec, cache=request.cache)
    check_request(request, spec)
    return Task(checkpoint, spec, request, tokenizer, {})


def recall(known: Known, request: Request, text: TextStream | TokenIds) -> None:
    """Take in the text that was printed when the tokens became known."""
    for token in known.tokens:
        if token.token not in request.eos:
            text.push(token.token)
    if known.finish_reason is not None:
        text.finish()


def _check_model(header: Header, checkpoint: Checkpoint) -> None:
    expected = f"expected the model that the journal's answer is of ({header.model}), found another one"
    if checkpoint.fingerprint != header.fingerprint:
        raise InputError("journal", f"{expected} ({checkpoint.name}); give it with --model")
    try:
        check_contents(checkpoint, header.contents)
    except ModelError as error:
        raise InputError("journal", f"{expected}: {checkpoint.name} has other weights") from error


def _pairs(wish: Wish, request: Request, prompt: tuple[int, ...] | None) -> Iterator[tuple[str, Any, Any]]:
    """Each parameter that was given, what was asked for and what the journal's request has."""
    given = wish.given
    if prompt is not None:
        yield "prompt", prompt, request.prompt
    elif beside := given & {"raw", "system_prompt"}:
        raise InputError(min(beside), "expected with the prompt that the journal has, or not at all")
    asked = make_sampling(**wish.sampling)
    for name in sorted(given & _SAMPLING.keys()):
        yield _SAMPLING[name], *(_plain(getattr(sampling, _SAMPLING[name])) for sampling in (asked, request.sampling))
    for name, value, kept in (
        ("max_tokens", wish.max_tokens, request.max_tokens),
        ("stop", wish.stops, request.stops),
        ("repeat_guard", wish.repeat_guard, request.repeat_guard),
        ("ignore_eos", wish.ignore_eos, not request.eos),
        ("kv", CacheKind.Name(wish.cache.kind), CacheKind.Name(request.cache.kind)),
        ("max_kv_size", wish.cache.size, request.cache.size),
        ("window", wish.decode.window, request.decode.window),
        ("entropy_threshold", wish.decode.entropy_threshold, request.decode.entropy_threshold),
        ("position_penalty", wish.decode.position_penalty, request.decode.position_penalty),
        ("decode", wish.decode.kind, request.decode.kind if wish.decode.kind != "auto" else "auto"),
    ):
        if name in given:
            yield name, value, kept


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float) else dict(value)


def _short(value: Any) -> str:
    said = str(value)
    return said if len(said) <= 60 else f"{said[:57]}..."
