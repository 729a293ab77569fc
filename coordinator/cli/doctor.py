"""`brigade doctor`: what is wrong with nodes and links, and how to mend it."""

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.cli import flags
from coordinator.cli.parse import chosen_cluster
from coordinator.cluster.options import ClusterOptions
from coordinator.deploy.findings import Finding, Level
from worker.errors import BrigadeError

if TYPE_CHECKING:
    from coordinator.deploy.trial import ChainTrial

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}
_SIGNS = {Level.OK: "ok", Level.NOTE: "note", Level.PROBLEM: "MEND"}
_PAGE = "Brigade's documentation has a page on doctor, with a section for each of these words"


def doctor(
    ctx: typer.Context,
    config: flags.Config = None,
    model: flags.Model = None,
    as_json: flags.Json = False,
) -> int:
    """What is wrong with nodes and links, and how to mend it; exit code 1 if something must be mended.

    Every worker of cluster.yaml is asked about its machine (memory, versions, sleep, firewall, cables). Every hop is
    measured: which interface it takes, its round trip and bytes per second by gRPC and by plain sockets, and what it
    takes of each token of the model. If nothing must be mended, an answer of eight tokens
    is tried through every node: each loads its part. Workers that serve another coordinator are left alone.

    brigade doctor --config cluster.yaml

    Where there is no cluster.yaml, this Mac alone, for the bundled model: brigade doctor
    """
    options = chosen_cluster(ctx)

    from coordinator.cli.run import run_async
    from coordinator.cluster.progress import show_steps
    from coordinator.deploy.doctor import examine_cluster, num_steps, try_answer

    with show_steps(num_steps(options.cluster)) as begin:
        found = run_async(examine_cluster(options, begin))
    found = run_async(try_answer(options, found))
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        print_findings(found.findings, Console(highlight=False))
    return 0 if found.is_healthy else 1


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Below a heading for each node and hop its findings: filled on a terminal, elsewhere a line for each."""
    for about in dict.fromkeys(each.about for each in findings):
        console.print(Text(about, "bold"))
        for row in _rows([each for each in findings if each.about == about], is_filled=console.is_terminal):
            console.print(row, soft_wrap=not console.is_terminal)
        console.print()
    levels = [each.level for each in findings]
    console.print(_summary(levels.count(Level.PROBLEM), levels.count(Level.NOTE)), soft_wrap=not console.is_terminal)


def _rows(findings: Sequence[Finding], *, is_filled: bool) -> Iterator[RenderableType]:
    for each in findings:
        sign, kind = Text(f"  {_SIGNS[each.level]:<5}", _STYLES[each.level]), Text(f"{each.kind:<14}", "dim")
        text = Text.assemble(each.text, (f" → {each.fix}" if each.fix else "", "cyan"))
        if is_filled:
            row = Table.grid()
            row.add_row(sign, kind, text)
            yield row
        else:
            yield Text.assemble(sign, kind, text)


def _summary(num_to_mend: int, num_notes: int) -> Text:
    notes = f"{num_notes} note{'' if num_notes == 1 else 's'}"
    if not num_to_mend:
        return Text(f"nothing must be mended; {notes}", "green")
    return Text(f"{num_to_mend} must be mended; {notes}. {_PAGE}", "bold red")


def smoke(
    ctx: typer.Context,
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
    options = chosen_cluster(ctx)

    from coordinator.cli.run import run_async

    return run_async(_try(options, _flags(config, model), as_json=as_json))


async def _try(options: ClusterOptions, given: str, *, as_json: bool) -> int:
    from coordinator.deploy.trial import advice, try_cluster
    from worker.platform.text import printable

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


def _print(trial: "ChainTrial") -> None:
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


def _hops(trial: "ChainTrial") -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    from coordinator.planning.speeds import format_ms
    from worker.platform.text import format_bytes

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("hop")
    for name in ("sent", "a frame takes"):
        table.add_column(name, justify="right", no_wrap=True)
    for hop in trial.hops:
        way = Text(f"{hop.source} → {hop.target}")
        table.add_row(way, format_bytes(hop.sent_bytes), format_ms(hop.frame_ms))
    return table


def _other(trial: "ChainTrial") -> str:
    found = f"{trial.first.tokens}, then {trial.second.tokens}"
    return f"OTHER TOKENS the second time, {found}; brigade verify tells which node computes otherwise"


def _flags(config: Path | None, model: str | None) -> str:
    """Those that say which cluster it is, as they were typed."""
    given = {"--config": config, "--model": model}
    return " ".join(f"{name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None)
