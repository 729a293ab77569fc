"""`brigade doctor`: what is wrong with nodes and links, and how to mend it."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from coordinator.cli import flags
from coordinator.cluster.options import cluster_options
from coordinator.examine.finding import Finding, Level

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.MEND: "bold red"}
_SIGNS = {Level.OK: "ok", Level.NOTE: "note", Level.MEND: "MEND"}
_PAGE = "docs/doctor.md has a section for each of these words"


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
        console = Console(highlight=False, soft_wrap=True)
        for line in _lines(found.findings):
            console.print(line)
        console.print(_summary(found.count(Level.MEND), found.count(Level.NOTE)))
    return 0 if found.is_healthy else 1


def _lines(findings: Sequence[Finding]) -> Iterator[Text]:
    """Below a heading for each node and hop a line per finding."""
    for about, group in groupby(findings, key=lambda finding: finding.about):
        yield Text(about, "bold")
        for each in group:
            style = _STYLES[each.level]
            line = Text.assemble("  ", (f"{_SIGNS[each.level]:<5}", style), (f"{each.kind:<14}", "dim"), each.text)
            yield line.append(f" → {each.fix}", "cyan") if each.fix else line
        yield Text()


def _summary(num_to_mend: int, num_notes: int) -> Text:
    if not num_to_mend:
        return Text(f"nothing must be mended; {num_notes} notes. {_PAGE}", "green")
    return Text(f"{num_to_mend} must be mended; {num_notes} notes. {_PAGE}", "bold red")
