"""`brigade doctor`: what is wrong with nodes and links, and how to mend it."""

import json
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.cli import flags
from coordinator.cluster.options import cluster_options
from coordinator.examine.finding import Finding, Level

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.MEND: "bold red"}
_SIGNS = {Level.OK: "ok", Level.NOTE: "note", Level.MEND: "MEND"}
_PAGE = "Brigade's documentation has a page on doctor, with a section for each of these words"


def doctor(
    config: flags.Config = None,
    model: flags.Model = None,
    as_json: flags.Json = False,
) -> int:
    """What is wrong with nodes and links, and how to mend it; exit code 1 if something must be mended.

    Every worker of cluster.yaml is asked about its machine (memory, versions, sleep, firewall, cables). Every hop is
    measured: which interface it takes, its round trip and bytes per second by gRPC and by plain sockets, and what it
    takes of each token of the model. Nothing is loaded, changed or stopped.

    brigade doctor --config cluster.yaml

    Without --config this Mac alone, for the bundled model: brigade doctor
    """
    options = cluster_options(config, model, None, None, None)

    from coordinator.cli.run_async import run_async
    from coordinator.cluster.progress import show_steps
    from coordinator.examine.collect import num_steps
    from coordinator.examine.doctor import examine_cluster

    with show_steps(num_steps(options.cluster)) as begin:
        found = run_async(examine_cluster(options, begin))
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
    console.print(_summary(levels.count(Level.MEND), levels.count(Level.NOTE)), soft_wrap=not console.is_terminal)


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
