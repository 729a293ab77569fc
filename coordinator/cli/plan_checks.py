"""Which flags of `plan` go together: those of nodes that are asked, of Macs that are not there, and of a simulation."""

import typer

from coordinator.cli.refusals import refuse
from worker.config import Cluster
from worker.errors import InputError

_TIMES = ("row_ms", "hop_ms", "gbps")
_LOAD = ("num_prompt", "num_tokens", "prefill_step_size")


def check_plan_flags(ctx: typer.Context) -> None:
    """Raise InputError for flags that contradict each other, or would change nothing."""
    given = ctx.params
    if given["simulate"]:
        _check_simulation(ctx)
    else:
        refuse(ctx, ("stage_ms", "measured", *_TIMES, *_LOAD), "expected only with --simulate")
    if given["measured"] is not None:
        refuse(ctx, _TIMES, "not expected with --measured, which holds the times")
    if given["config"] is None or given["local"] is not None:
        refuse(ctx, ("measure_again",), "changes nothing without --config: workers of one machine are not measured")
    if given["macs"] is not None:
        refuse(ctx, ("config", "local", "write"), "not expected with --nodes, which says what nodes there are")


def check_write(ctx: typer.Context, cluster: Cluster) -> None:
    """Raise InputError where --write has no split of its own to add to a file, or no file."""
    if not ctx.params["write"]:
        return
    if ctx.params["config"] is None:
        raise InputError("write", "expected with --config FILE, the cluster.yaml to which the split is added")
    refuse(ctx, ("local",), "not expected with --write: no cluster.yaml names these workers")
    refuse(
        ctx, ("layers",), f"not expected with --write, which adds what is planned: add it to {cluster.file} yourself"
    )
    if cluster.layers is not None:
        said = f"`layers: [{', '.join(map(str, cluster.layers))}]`"
        raise InputError("write", f"{cluster.file} says {said} already; remove that to have it planned anew")


def _check_simulation(ctx: typer.Context) -> None:
    """Its times come from flags, from a file, or from the nodes of a configuration."""
    given = ctx.params
    refuse(ctx, ("macs", "objective", "write", "measure_again"), "not expected with --simulate")
    sources = [name for name in ("stage_ms", "measured") if given[name] is not None]
    if not sources and given["config"] is not None:
        refuse(ctx, ("local", *_TIMES), "not expected with --simulate --config, whose nodes measure themselves")
        return
    refuse(ctx, ("local", "layers", "context"), "not expected with --simulate, which asks no nodes")
    if given["gbps"] is None:
        refuse(ctx, ("config", "model"), "expected with --simulate only where --gbps needs a model's row size")
    if len(sources) != 1:
        raise InputError(
            "simulate",
            "expected either --stage-ms 26.5,6.5, or --measured FILE of `brigade bench --json`, or --config FILE, "
            "whose nodes measure themselves",
        )
