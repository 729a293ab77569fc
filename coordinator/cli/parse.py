"""What flags amount to: numbers, a cluster and its model, sampling parameters; and flags that contradict each other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import typer

from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.cluster.progress import say
from coordinator.planning.recovery import USUAL, Limits
from worker.errors import InputError
from worker.platform.run import field_of

T = TypeVar("T")
Number = TypeVar("Number", int, float)

CONFIG = Path("cluster.yaml")  # taken where it is, unless --config names another
SAMPLING_FLAGS = {  # flags, and the parameters of a request that they set
    "temp": "temperature",
    **{name: name for name in ("top_p", "top_k", "min_p", "seed")},
    **{name: name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")},
}
_BODY = (
    "max_tokens", "stop", "ignore_eos", "decode", "window", "entropy_threshold", "position_penalty", "repeat_guard",
    "kv", "max_kv_size",
)  # fmt: skip
_PROMPTS = {"text": "the argument", "prompt": "--prompt", "prompt_tokens": "--prompt-tokens"}


def find_config(config: Path | None) -> Path | None:
    """Return the file that --config names, else ./cluster.yaml if it is there, with a line on standard error."""
    if config is None and CONFIG.is_file():
        say(f"using ./{CONFIG} (--config names another)")
        return CONFIG
    return config


def chosen_cluster(ctx: typer.Context) -> ClusterOptions:
    """Return which model runs where, by the flags of this command and its cluster.yaml.

    Raises:
        ConfigError: a file or a value cannot be read, or they do not agree.
    """
    given = ctx.params
    layers = given.get("layers")
    options = cluster_options(
        find_config(given.get("config")),
        given["model"],
        given.get("local"),
        None if layers is None else parse_layers(layers),
        given.get("context"),
        given.get("trust_remote_code", False),
        given.get("check_finite", False),
        Limits(given.get("rejoin_timeout", USUAL.rejoin_s), given.get("recovery_timeout", USUAL.recovery_s)),
    )
    return replace(options, objective=given.get("objective", options.objective))


def chosen_sampling(ctx: typer.Context) -> dict[str, Any]:
    """Return the sampling parameters that the flags set, by their names in a request."""
    found = {name: ctx.params.get(flag) for flag, name in SAMPLING_FLAGS.items()}
    return {name: value for name, value in found.items() if value is not None}


def server_body(ctx: typer.Context, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request to a server. What was not asked for is the server's choice, but `max_tokens`."""
    given = given_flags(ctx)
    chosen = {name: value for name, value in sampling.items() if name != "logprobs" and value not in (0.0, {})}
    zeros = {"temperature": 0.0} if "temp" in given and not ctx.params["temp"] else {}
    named = {name: ctx.params[name] for name in _BODY if name in given or name == "max_tokens"}
    return chosen | zeros | {name: value for name, value in named.items() if value is not None}


def given_flags(ctx: typer.Context) -> frozenset[str]:
    """Return the parameters that were given on the command line."""
    names = [parameter.name or "" for parameter in ctx.command.params]
    sources = {name: ctx.get_parameter_source(name) for name in names}
    return frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")


def refuse_flags(ctx: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise InputError if one of these parameters was given on the command line."""
    given = given_flags(ctx)
    for parameter in ctx.command.params:
        if parameter.name in names and parameter.name in given:
            raise InputError(field_of(parameter), why)


def require_one_prompt(ctx: typer.Context, *, may_lack: bool = False) -> None:
    """Raise InputError unless there is exactly one prompt, or none where it `may_lack`."""
    prompts = {name: ctx.params.get(parameter) for parameter, name in _PROMPTS.items()}
    given = [f"{name} {shortened(repr(prompt))}" for name, prompt in prompts.items() if prompt is not None]
    if len(given) != 1 and (given or not may_lack):
        expected = "--prompt TEXT (or TEXT alone in quotes; `-` reads standard input)"
        if "prompt_tokens" in ctx.params:
            expected = f"either {expected} or --prompt-tokens 1,2,3"
        raise InputError("", f"expected {expected}, found {' and '.join(given) or 'none'}")


def shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def parse_layers(text: str) -> tuple[int, ...]:
    return tuple(_parse("layers", text, int, "whole numbers like 3,2,1"))


def parse_tokens(text: str) -> tuple[int, ...]:
    return tuple(_parse("prompt_tokens", text, int, "token ids like 1,2,3", has_gaps=True))


def parse_bias(text: str) -> dict[int, float]:
    def pair(part: str) -> tuple[int, float]:
        token, bias = part.split(":")
        return int(token), float(bias)

    return dict(_parse("logit_bias", text, pair, "ID:BIAS pairs like 5:-1.5,7:2", has_gaps=True))


def parse_counts(field: str, text: str, *, most: int = 1_000_000) -> tuple[int, ...]:
    """Return whole numbers from 1 to `most`, ascending, each once."""
    counts = _parse(field, text, _within(int, 1, most), f"whole numbers from 1 to {most} like 1,4,8")
    return tuple(sorted(set(counts)))


def parse_times(field: str, text: str, *, least: float = 0.0) -> tuple[float, ...]:
    """Return milliseconds from `least` to a million."""
    expected = f"milliseconds from {least:g} to 1000000 like 26.5,6.5"
    return tuple(_parse(field, text, _within(float, least, 1e6), expected))


def _parse(field: str, text: str, read: Callable[[str], T], expected: str, *, has_gaps: bool = False) -> list[T]:
    """Read what stands between commas, which may be nothing with `has_gaps`.

    Raises:
        InputError: `read` raised ValueError for one of the parts.
    """
    try:
        return [read(part) for part in text.split(",") if part.strip() or not has_gaps]
    except ValueError:
        raise InputError(field, f"expected {expected}, got {text!r}") from None


def _within(read: Callable[[str], Number], least: Number, most: Number) -> Callable[[str], Number]:
    def number(part: str) -> Number:
        found = read(part)
        if not least <= found <= most:  # true for nan, too
            raise ValueError(part)
        return found

    return number
