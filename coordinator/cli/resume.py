"""An answer that goes on from its journal: the request is the journal's, and what is asked for besides must agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from coordinator.cli.generate import GenerateOptions, Prepared
from coordinator.cli.parse import SAMPLING_FLAGS, shortened
from coordinator.cluster.options import ClusterOptions
from coordinator.sessions.journal import Header, Journal
from coordinator.sessions.request import Request, check_request, make_sampling
from protos.brigade_pb2 import CacheKind, Contents
from worker.errors import InputError, ModelError
from worker.platform.threads import run_in_thread

if TYPE_CHECKING:
    from worker.model.checkpoint import Checkpoint

_PROMPTS = {"text", "prompt", "prompt_tokens"}
_SAMPLING = SAMPLING_FLAGS | {"logprobs": "logprobs", "logit_bias": "logit_bias"}


async def header_of(prepared: Prepared) -> Header:
    """Return the first record of a request's journal."""
    from worker.model.contents import contents_of

    checkpoint, tokenizer = prepared.inputs.checkpoint, prepared.inputs.tokenizer
    contents = await run_in_thread(partial(contents_of, checkpoint))
    marks = Contents(marks=contents.marks, hub_hashes=contents.hub_hashes)
    return Header(checkpoint.name, checkpoint.fingerprint, marks, prepared.request, tokenizer is not None)


async def resume(asked: GenerateOptions, options: ClusterOptions, journal: Journal) -> Prepared:
    """Return the journal's request, with what is known of its answer.

    Raises:
        InputError: the model is another one than the journal's, or what is asked for differs from its request.
    """
    from coordinator.cluster.open import read_model
    from coordinator.engine.inputs import InputProcessor
    from coordinator.engine.tokenizer import Tokenizer

    header = journal.header
    checkpoint, spec = await read_model(options.model)
    await run_in_thread(partial(_check_model, header, checkpoint))
    request = replace(header.request, known=journal.known)
    tokenizer = Tokenizer(checkpoint, trust_remote_code=options.trust_remote_code) if header.has_text else None
    inputs, prompt = InputProcessor(checkpoint, spec, tokenizer), None
    if asked.given & _PROMPTS:
        prompt = await inputs.prompt_ids(asked.require_prompt(has_template=inputs.has_chat_template))
    for name, value, kept in _pairs(asked, request, prompt):
        if value != kept:
            found = "another one" if name == "prompt" else f"{shortened(str(kept))}, not {shortened(str(value))}"
            raise InputError(name, f"the journal's request has {found}; leave it out")
    check_request(request, replace(spec, cache=request.cache))
    return Prepared(inputs, request, {})


def _check_model(header: Header, checkpoint: Checkpoint) -> None:
    from worker.model.contents import check_contents

    expected = f"expected the model that the journal's answer is of ({header.model}), found another one"
    if checkpoint.fingerprint != header.fingerprint:
        raise InputError("journal", f"{expected} ({checkpoint.name}); give it with --model")
    try:
        check_contents(checkpoint, header.contents)
    except ModelError as error:
        raise InputError("journal", f"{expected}: {checkpoint.name} has other weights") from error


def _pairs(asked: GenerateOptions, request: Request, prompt: tuple[int, ...] | None) -> Iterator[tuple[str, Any, Any]]:
    """Yield each parameter that a flag gives, with its value and that of the journal's request."""
    given = asked.given
    if prompt is not None:
        yield "prompt", prompt, request.prompt
    elif beside := given & {"raw", "system_prompt"}:
        raise InputError(min(beside), "expected with the prompt that the journal has, or not at all")
    sampling = make_sampling(**asked.sampling)
    for flag in sorted(given & _SAMPLING.keys()):
        name = _SAMPLING[flag]
        yield name, _plain(getattr(sampling, name)), _plain(getattr(request.sampling, name))
    for name, value, kept in (
        ("max_tokens", asked.max_tokens, request.max_tokens),
        ("stop", asked.stops, request.stops),
        ("repeat_guard", asked.repeat_guard, request.repeat_guard),
        ("ignore_eos", asked.ignore_eos, not request.eos),
        ("kv", CacheKind.Name(asked.cache.kind), CacheKind.Name(request.cache.kind)),
        ("max_kv_size", asked.cache.size, request.cache.size),
        ("window", asked.decode.window, request.decode.window),
        ("entropy_threshold", asked.decode.entropy_threshold, request.decode.entropy_threshold),
        ("position_penalty", asked.decode.position_penalty, request.decode.position_penalty),
        ("decode", asked.decode.kind, request.decode.kind if asked.decode.kind != "auto" else "auto"),
    ):
        if name in given:
            yield name, value, kept


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float) else dict(value)
