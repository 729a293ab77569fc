"""Flags that do not go together, or that would change nothing: refused before anything is read. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from worker.errors import InputError
from worker.process.app import field_of

SAMPLED = ("top_p", "top_k", "min_p", "seed")  # what says how to draw: nothing is drawn at temperature 0


def refuse(ctx: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise InputError if one of these parameters was given on the command line."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if parameter.name in names and source and source.name == "COMMANDLINE":
            raise InputError(field_of(parameter), why)


def given_flags(ctx: typer.Context) -> frozenset[str]:
    """The parameters that were given on the command line."""
    names = [parameter.name or "" for parameter in ctx.command.params]
    sources = {name: ctx.get_parameter_source(name) for name in names}
    return frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")


def refuse_idle(ctx: typer.Context) -> None:
    """Refuse flags of a request that change nothing beside its other flags. What `auto` makes of them is its affair."""
    for names, why in _idle(ctx.params):
        refuse(ctx, names, why)


def require_text(texts: Mapping[str, Sequence[str] | str | None]) -> None:
    """Refuse parameters that were given an empty text, which would be as if they were not there."""
    for name, given in texts.items():
        if "" in ([given] if isinstance(given, str) else given or ()):
            raise InputError(name, "expected some text, found none")


def require_one_prompt(ctx: typer.Context, *, may_lack: bool = False) -> None:
    """Raise InputError unless there is exactly one prompt, or none where it `may_lack`."""
    found = {"the argument": "text", "--prompt": "prompt", "--prompt-tokens": "prompt_tokens"}
    given = [f"{name} {_short(ctx.params[key])}" for name, key in found.items() if ctx.params.get(key) is not None]
    if len(given) != 1 and (given or not may_lack):
        expected = "--prompt TEXT (or TEXT alone in quotes; `-` reads standard input)"
        if "prompt_tokens" in ctx.params:
            expected = f"either {expected} or --prompt-tokens 1,2,3"
        raise InputError("", f"expected {expected}, found {' and '.join(given) or 'none'}")


def _idle(given: Mapping[str, Any]) -> Iterator[tuple[Sequence[str], str]]:
    """Which parameters would change nothing beside these, and why."""
    if given.get("prompt_tokens"):
        yield ("raw", "system_prompt"), "changes nothing with --prompt-tokens, which are all that the model is given"
    if given.get("raw"):
        yield ("system_prompt",), "changes nothing with --raw, which gives the model nothing but the prompt"
    if given.get("as_json"):
        yield ("stats",), "changes nothing with --json, which has all figures"
    else:
        yield ("logprobs",), "changes nothing without --json, which is where they are written"
    if given.get("temp") == 0:
        yield SAMPLED, "changes nothing at --temp 0, which takes the likeliest token"
    if (decode := given.get("decode")) in ("ar", "ngram"):
        yield ("window",), f"changes nothing with --decode {decode}, which has no MASK rows"
    if decode != "diffusion-fast":
        yield ("entropy_threshold", "position_penalty"), "changes nothing without --decode diffusion-fast"


def _short(value: str) -> str:
    return repr(value if len(value) <= 40 else f"{value[:37]}...")
