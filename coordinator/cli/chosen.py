"""What the flags that commands share amount to: each command declares those that it has, here they are read. Pure."""

from dataclasses import replace
from typing import Any

import typer

from coordinator.cli.parse import parse_layers
from coordinator.cli.refusals import refuse
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.planning.recovery import USUAL, Limits

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLING = {"temp": "temperature"} | {name: name for name in ("top_p", "top_k", "min_p", *_PENALTIES, "seed")}


def chosen_cluster(ctx: typer.Context) -> ClusterOptions:
    """Which model runs where. Raises ConfigError for what cannot be read or does not agree."""
    given = ctx.params
    layers = given["layers"]
    options = cluster_options(
        given["config"],
        given["model"],
        given["local"],
        None if layers is None else parse_layers(layers),
        given["context"],
        given.get("trust_remote_code", False),
        given.get("check_finite", False),
        Limits(given.get("rejoin_timeout", USUAL.rejoin_s), given.get("recovery_timeout", USUAL.recovery_s)),
    )
    return replace(options, objective=given.get("objective", options.objective))


def refuse_idle_objective(ctx: typer.Context) -> None:
    """Raise InputError where no node will be measured, so that no plan goes by what is to be fast."""
    if ctx.params["config"] is None or ctx.params["local"] is not None:
        refuse(ctx, ("objective",), "changes nothing without --config: workers of one machine are not measured")


def chosen_sampling(ctx: typer.Context) -> dict[str, Any]:
    """How tokens are drawn, as far as the flags say."""
    found = {name: ctx.params.get(flag) for flag, name in _SAMPLING.items()}
    return {name: value for name, value in found.items() if value is not None}
