"""`brigade launch`: installs and runs the workers on the other Macs, over ssh."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from coordinator.cli import flags
from coordinator.cli.flags import find_config, given_flags
from coordinator.cluster.progress import say, show_progress, telling_interrupts
from coordinator.cluster.tables import fitting, plain_console
from protos.brigade_pb2 import LoadProgress
from worker.config import CLUSTER_FILE, CONFIG, ClusterConfig, WorkerConfig, load_cluster
from worker.errors import BrigadeError, ConfigError, InputError
from worker.platform.text import printable_lines
from worker.platform.threads import run_in_thread
from worker.yaml_file import read_yaml

if TYPE_CHECKING:
    from coordinator.deploy.launch import Outcome, SayOf


RequiredConfig = Annotated[
    Path, typer.Option(help="cluster.yaml: the workers, with `ssh:`.", rich_help_panel=flags.CLUSTER)
]


async def launch(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Only these workers.", show_default=False)
    ] = None,
    *,
    config: RequiredConfig = CONFIG,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the workers until the next launch.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Restart workers that are up to date, too.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Reinstall and restart even where this version is installed.")
    ] = False,
) -> int:
    """Install and start the workers of cluster.yaml on their Macs, over ssh; exit code 3 if one failed.

    On the Mac of every worker with `ssh: user@host` this version is installed, the worker's configuration and
    certificate are written, and it is started as a service of that user. Workers that are up to date are left as they
    are.

    `ssh user@host` has to work without a password.

    After an update of brigade here, or a change of cluster.yaml: brigade launch

    To take one Mac away: brigade launch --stop mini
    """
    if stop + restart + update > 1:
        raise InputError("", "expected one of --stop, --restart and --update")
    cluster = _load(ctx, config)
    workers = workers_of(cluster, names or ())

    from coordinator.deploy import launch as deploy
    from coordinator.deploy.authority import certificates
    from coordinator.deploy.install import LaunchMode
    from coordinator.deploy.package import installed
    from coordinator.deploy.ssh import require_ssh
    from worker.node.certificates import expiry_warning
    from worker.node.network import Network

    require_ssh()
    if stop:
        with _shown() as report:
            return tell(await deploy.stop(workers, report))
    action = LaunchMode.UPDATE if update else LaunchMode.RESTART if restart else LaunchMode.START
    raw, _ = read_yaml(config, CLUSTER_FILE)
    keys = certificates(cluster, [worker.name for worker in workers], say)
    network = Network.of(cluster)
    own = network.own  # an error in it is raised before anything is sent
    if own and (warning := expiry_warning(own.name, own.role, own.until)):
        say(f"warning: {warning}")
    package = await run_in_thread(installed)
    if others := [worker.name for worker in cluster.workers if not worker.ssh]:
        say(f"not launched, since their entries have no `ssh:`: {', '.join(others)}")
    with _shown() as report:
        return tell(await deploy.Launch(raw, package, keys, network, action).run(workers, report))


def workers_of(cluster: ClusterConfig, names: list[str] | tuple[()]) -> list[WorkerConfig]:
    """Return the workers of these names, or all, that have `ssh:`.

    Raises:
        ConfigError: there are none, or a named one does not exist or has no `ssh:`.
    """
    if not cluster.workers:
        sought = f"one named {names[0]!r}" if names else "one"
        raise ConfigError(f"{cluster.file} has no workers: expected {sought} under `workers:`; brigade init finds some")
    known = {worker.name: worker for worker in cluster.workers}
    if strange := [name for name in names if name not in known]:
        raise ConfigError(f"{cluster.file} has no worker {strange[0]!r}: expected one of: {', '.join(known)}")
    wanted = [known[name] for name in dict.fromkeys(names)] or list(cluster.workers)
    accounts = [(worker.ssh, worker.name.lower()) for worker in cluster.workers if worker.ssh]
    if len(set(accounts)) < len(accounts):
        raise ConfigError(f"{cluster.file}: expected workers of one account to differ in more than case")
    reached = [worker for worker in wanted if worker.ssh]
    missing = [worker.name for worker in wanted if not worker.ssh]
    if not reached or (names and missing):
        names_of = ", ".join(missing) or "any worker"
        raise ConfigError(
            f"{cluster.file} does not say how to reach {names_of}: expected `ssh: user@host` in its entry"
        )
    return reached


@contextlib.contextmanager
def _shown() -> Iterator[SayOf]:
    """Show the progress of each node, also if the command is interrupted."""
    phases: dict[str, str] = {}
    with show_progress() as draw:

        def report(node: str, phase: str) -> None:
            phases[node] = phase
            draw(node, LoadProgress(phase=phase))

        def interrupted() -> str:
            were = "; ".join(f"{node}: {phase}" for node, phase in phases.items())
            return (
                f"interrupted ({were}). Nothing is undone: started workers keep running, the same command does the rest"
            )

        with telling_interrupts(interrupted):
            yield report


def tell(outcomes: Sequence[Outcome]) -> int:
    """Print what became of each Mac; return the exit code."""
    heads = ("node", "ssh", "service", "", "answers at")
    rows: list[list[str | Text]] = [
        [each.name, each.place, each.kind, Text("failed", "bold red") if each.error else Text(each.done, "green"),
         each.address]
        for each in outcomes
    ]  # fmt: skip
    console = plain_console()
    console.print(fitting(heads, rows, console.width, num_left=len(heads)))
    failures = [each.error for each in outcomes if each.error]
    for error in failures:
        print(f"error: {printable_lines(str(error))}", file=sys.stderr)
    return BrigadeError.exit_code if failures else 0


def logs(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The worker's name in cluster.yaml.")],
    config: RequiredConfig = CONFIG,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines, too, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 100,
) -> Coroutine[Any, Any, None]:
    """Print the log of a worker that brigade launch has started.

    brigade logs mini -f
    """
    [worker] = workers_of(_load(ctx, config), [name])

    from coordinator.deploy.ssh import Remote

    assert worker.ssh is not None
    return Remote(worker.name, worker.ssh).log(lines, print_line, follows=follow)


def print_line(line: str) -> None:
    """Print a line of another program without its control characters."""
    print(printable_lines(line), flush=True)


def _load(ctx: typer.Context, config: Path) -> ClusterConfig:
    """Load the configuration; say so if it is that of this folder. Raises ConfigError if it does not exist."""
    return load_cluster(config if "config" in given_flags(ctx) else find_config(None) or config)
