"""Flags of servers, and of commands that may ask one instead of loading a model; what they amount to in its words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli.refusals import given_flags

_SERVER = "Server"
LOADING = (
    "config", "model", "local", "layers", "objective", "context", "trust_remote_code", "check_finite", "rejoin_timeout",
    "recovery_timeout",
)  # fmt: skip
_NO_IDS = "not expected with --server, which tells no token ids; its /v1 routes tell logprobs by the tokens' text"
NOT_THERE = {  # parameters that a server has no use for, and why
    LOADING: "not expected with --server, which has its model loaded",
    ("prefill_step_size",): "not expected with --server, which feeds prompts as it was started to",
    ("stats", "trace"): "not expected with --server, which tells a client nothing of its stages",
    ("journal",): "not expected with --server, which keeps no journal for its clients",
    ("logprobs",): _NO_IDS,
}
_BODY = (
    "max_tokens", "stop", "ignore_eos", "decode", "window", "entropy_threshold", "position_penalty", "repeat_guard",
    "kv", "max_kv_size",
)  # fmt: skip
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Ask a `brigade serve` that runs, such as http://localhost:9338, instead of loading anything.",
        rich_help_panel=_SERVER,
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="Keys, a line each: KEY or NAME KEY. A server lets all of them in; a client brings the first.",
        rich_help_panel=_SERVER,
    ),
]


def server_body(ctx: typer.Context, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, as fields of a body; what was not is the server's choice, except `max_tokens`."""
    given = given_flags(ctx)
    chosen = {name: value for name, value in sampling.items() if name != "logprobs" and value not in (0.0, {})}
    zeros = {"temperature": 0.0} if "temp" in given and not ctx.params["temp"] else {}
    named = {name: ctx.params[name] for name in _BODY if name in given or name == "max_tokens"}
    return chosen | zeros | {name: value for name, value in named.items() if value is not None}
