"""`brigade doctor` and `brigade smoke`: find problems of nodes and links, and try a short answer through all nodes."""

import shlex
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.cli import flags
from coordinator.cli.report import print_stats
from coordinator.cli.run import TakeFlags
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import show_steps
from coordinator.cluster.tables import fitting, plain_console
from coordinator.deploy.findings import Finding, Level
from coordinator.planning.speeds import format_ms
from worker.errors import BrigadeError
from worker.platform.text import counted, format_bytes, printable

if TYPE_CHECKING:
    from coordinator.deploy.trial import ChainTrial

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}
_SIGNS = {Level.OK: "ok", Level.NOTE: "note", Level.PROBLEM: "FIX"}
_PAGE = "Brigade's documentation has a page on doctor, with a section for each of these words"


def doctor(
    *, cluster: Annotated[flags.ClusterFlags, TakeFlags(*flags.MODEL)], as_json: flags.JsonFlag = False
) -> Coroutine[Any, Any, int]:
    """Find problems of nodes and links and say how to fix them; exit code 1 if there are any.

    Every worker of cluster.yaml is asked about its machine (memory, versions, sleep, firewall, cables). Every hop is
    measured: its network interface, its round trip and bytes per second over gRPC and over plain sockets, and its share
    of the time per token. If there is no problem, every node loads its part and eight tokens are generated through all
    of them. Workers that serve another coordinator are left alone.

    brigade doctor --config cluster.yaml

    Without a cluster.yaml, this Mac alone with the bundled model: brigade doctor
    """
    return run_doctor(cluster.options(), as_json=as_json)


async def run_doctor(options: ClusterOptions, *, as_json: bool) -> int:
    """Print the findings. Return the exit code: 1 if there is a problem."""
    from coordinator.deploy.doctor import examine_cluster, num_steps, try_answer

    with show_steps(num_steps(options.cluster)) as begin:
        found = await examine_cluster(options, begin)
    found = await try_answer(options, found)
    if as_json:
        flags.print_json(found.as_json())
    else:
        print_findings(found.findings, plain_console())
    return 0 if found.is_healthy else 1


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings under a heading per node and hop; each is one line if this is no terminal."""
    for about in dict.fromkeys(each.about for each in findings):
        console.print(Text(about, "bold"))
        for row in _rows([each for each in findings if each.about == about], is_filled=console.is_terminal):
            console.print(row, soft_wrap=not console.is_terminal)
        console.print()
    levels = [each.level for each in findings]
    num_problems, num_notes = levels.count(Level.PROBLEM), levels.count(Level.NOTE)
    summary = f"{num_problems or 'nothing'} to fix; {counted(num_notes, 'note')}"
    shown = Text(f"{summary}. {_PAGE}", "bold red") if num_problems else Text(summary, "green")
    console.print(shown, soft_wrap=not console.is_terminal)


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


def smoke(
    *, cluster: Annotated[flags.ClusterFlags, TakeFlags(*flags.MODEL, "local")], as_json: flags.JsonFlag = False
) -> Coroutine[Any, Any, int]:
    """Load the model on every node and generate eight tokens twice; exit code 3 if the cluster fails.

    All workers of cluster.yaml take part, also those that a plan would leave out, but none that serves another
    coordinator. Every hop is listed with its bytes and milliseconds. Once the model is loaded it takes seconds.

    brigade smoke --config cluster.yaml

    Without a second Mac: brigade smoke --local 2
    """
    typed = {"--config": cluster.config, "--model": cluster.model, "--draft-model": cluster.draft_model}
    given = " ".join(f"{name} {shlex.quote(str(value))}" for name, value in typed.items() if value is not None)
    return run_smoke(cluster.options(), given, as_json=as_json)


async def run_smoke(options: ClusterOptions, given: str, *, as_json: bool) -> int:
    """Try the cluster and print how it went. Return the exit code.

    Args:
        given: the flags that name the cluster, as they were typed: advice repeats them.
    """
    from coordinator.deploy.trial import advice, try_cluster

    try:
        trial = await try_cluster(options)
    except BrigadeError as error:
        what_to_do = advice(error, given)
        error.message = "\n".join(map(printable, error.message.splitlines()))
        if as_json:
            failed = {"model": options.model, "works": False, "error": {"message": str(error), "advice": what_to_do}}
            flags.print_json(failed)
        error.message = f"{error.message}\nwhat to do: {what_to_do}"
        raise
    if as_json:
        flags.print_json(trial.as_json())
    else:
        _print(trial)
    return 0 if trial.is_same else 1


def _print(trial: "ChainTrial") -> None:
    console = plain_console()
    console.print(f"{trial.model} on {trial.plan}: open after {trial.opened_s:.1f} s", soft_wrap=True)
    if trial.hops:
        rows = [
            (f"{hop.source} → {hop.target}", format_bytes(hop.sent_bytes), format_ms(hop.frame_ms))
            for hop in trial.hops
        ]
        console.print(fitting(("hop", "sent", "a frame takes"), rows, console.width))
    print_stats(trial.first, trial.plan, trial.first.waterfall())
    verdict = "the same tokens: it works"
    if not trial.is_same:
        found = f"{trial.first.tokens}, then {trial.second.tokens}"
        verdict = f"OTHER TOKENS the second time, {found}; brigade verify finds the node that computes differently"
    result = f"{len(trial.first.tokens)} tokens, twice, in {trial.answered_s:.1f} s: {verdict}"
    console.print(result, soft_wrap=True)
