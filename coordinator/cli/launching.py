"""What `brigade launch` does once its flags are parsed, and what it shows: progress, then a table."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.cluster.progress import say, show_progress, telling_interrupts
from coordinator.fleet.certificates import certificates
from coordinator.fleet.launch import Launch, Outcome, Report, stop
from coordinator.fleet.packing import installed
from coordinator.fleet.ssh import require_ssh
from coordinator.fleet.steps import Action
from protos.brigade_pb2 import LoadProgress
from worker.config import Cluster, Worker
from worker.errors import BrigadeError
from worker.node.identity import Role
from worker.node.network import Network
from worker.process.call_thread import run_aside
from worker.process.printable import printable_lines
from worker.yaml_file import read_yaml


async def run_launch(config: Path, cluster: Cluster, workers: Sequence[Worker], action: Action) -> int:
    """Print how it went with each. The exit code: 0, or 3 if a node failed."""
    require_ssh()
    raw, _ = read_yaml(config)
    keys = certificates(cluster, [worker.name for worker in workers], say)
    network = Network.of(cluster, cluster.coordinator.name, Role.COORDINATOR)
    own = network.own  # if that will not do, it is told before anything is sent
    if warning := own.warning() if own else "":
        say(f"warning: {warning}")
    package = await run_aside(installed)
    if others := [worker.name for worker in cluster.workers if not worker.ssh]:
        say(f"not launched, since their entries have no `ssh:`: {', '.join(others)}")
    with _shown() as report:
        outcomes = await Launch(raw, package, keys, network, action, report).run(workers)
    return _tell(outcomes)


async def run_stop(workers: Sequence[Worker]) -> int:
    """The same for the end of workers."""
    require_ssh()
    with _shown() as report:
        outcomes = await stop(workers, report)
    return _tell(outcomes)


@contextlib.contextmanager
def _shown() -> Iterator[Report]:
    """Show what is done on each node, and where each was if this is interrupted."""
    phases: dict[str, str] = {}
    with show_progress() as draw:

        def report(node: str, phase: str) -> None:
            phases[node] = phase
            draw(node, LoadProgress(phase=phase))

        with telling_interrupts(lambda: _interrupted(phases)):
            yield report


def _interrupted(phases: Mapping[str, str]) -> str:
    were = "; ".join(f"{node}: {phase}" for node, phase in phases.items())
    return f"interrupted ({were}). Nothing is undone: workers that run go on, the same command does the rest"


def _tell(outcomes: Sequence[Outcome]) -> int:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("node", "ssh", "service", "", "answers at"):
        table.add_column(heading)
    for each in outcomes:
        done = Text("failed", "bold red") if each.error else Text(each.done, "green")
        table.add_row(Text(each.name), Text(each.place), Text(each.kind), done, Text(each.address))
    Console(highlight=False).print(table)
    failures = [each.error for each in outcomes if each.error]
    for error in failures:
        print(f"error: {printable_lines(str(error))}", file=sys.stderr)
    return BrigadeError.exit_code if failures else 0
