"""`brigade smoke`: one short try of the whole way, and what to do if it fails."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.cli import flags
from coordinator.cluster.options import ClusterOptions, cluster_options
from worker.errors import BrigadeError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coordinator.examine.trial import Trial


def smoke(
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    as_json: flags.Json = False,
) -> int:
    """Try the whole way: every node loads its part, and eight tokens are made twice; exit code 3 if the cluster fails.

    All workers of cluster.yaml take part, also those that a plan would leave out. Every hop is told, with its bytes and
    milliseconds. A worker that serves somebody else is left alone. Once the parts are loaded it takes seconds.

    brigade smoke --config cluster.yaml

    Without a second Mac: brigade smoke --local 2
    """
    options = cluster_options(config, model, local, None, None)

    from coordinator.cli.run_async import run_async

    return run_async(_try(options, _flags(config, model), as_json=as_json))


async def _try(options: ClusterOptions, given: str, *, as_json: bool) -> int:
    from coordinator.examine.smoke import try_cluster
    from coordinator.examine.trial import advice
    from worker.process.printable import printable

    try:
        trial = await try_cluster(options)
    except BrigadeError as error:
        told = advice(error, given)
        error.message = "\n".join(map(printable, error.message.splitlines()))
        if as_json:
            failed = {"model": options.model, "works": False, "error": {"message": str(error), "advice": told}}
            print(json.dumps(failed), flush=True)
        error.message = f"{error.message}\nwhat to do: {told}"
        raise
    if as_json:
        print(json.dumps(trial.as_json()))
    else:
        _print(trial)
    return 0 if trial.is_same else 1


def _print(trial: "Trial") -> None:
    from rich.console import Console

    from coordinator.cli.report import print_stats

    console = Console(highlight=False)
    nodes = ", ".join(f"{node.name} [{node.start}, {node.end})" for node in trial.plan.assignments)
    console.print(f"{trial.model} on {nodes}: open after {trial.opened_s:.1f} s", markup=False, soft_wrap=True)
    if trial.hops:
        console.print(_hops(trial))
    print_stats(trial.first, trial.plan, trial.first.waterfall())
    verdict = "the same tokens: it works" if trial.is_same else _other(trial)
    told = f"{len(trial.first.tokens)} tokens, twice, in {trial.answered_s:.1f} s: {verdict}"
    console.print(told, markup=False, soft_wrap=True)


def _hops(trial: "Trial") -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    from coordinator.planning.outlook import format_ms
    from worker.process.sizes import format_bytes

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("hop")
    for name in ("sent", "a frame takes"):
        table.add_column(name, justify="right", no_wrap=True)
    for hop in trial.hops:
        way = Text(f"{hop.source} → {hop.target}")
        table.add_row(way, format_bytes(hop.sent_bytes), format_ms(hop.frame_ms))
    return table


def _other(trial: "Trial") -> str:
    found = f"{trial.first.tokens}, then {trial.second.tokens}"
    return f"OTHER TOKENS the second time, {found}; brigade verify tells which node computes otherwise"


def _flags(config: Path | None, model: str | None) -> str:
    """Those that say which cluster it is, as they were typed."""
    given = {"--config": config, "--model": model}
    return " ".join(f"{name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None)
