"""`brigade launch`: installs and runs the workers on the other Macs, over ssh."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli import flags
from worker.config import Cluster, Worker, load_cluster
from worker.errors import ConfigError, InputError

Nodes = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Only these workers.", show_default=False)]
Config = Annotated[Path, typer.Option(help="cluster.yaml: the workers, with `ssh:`.", rich_help_panel=flags.CLUSTER)]
Stop = Annotated[bool, typer.Option("--stop", help="Stop them; they come back with the next launch only.")]
Restart = Annotated[bool, typer.Option("--restart", help="Restart those that run as they should, too.")]
Update = Annotated[bool, typer.Option("--update", help="Install anew even where this very version is, and restart.")]

CONFIG = Path("cluster.yaml")


def launch(
    names: Nodes = None, config: Config = CONFIG, stop: Stop = False, restart: Restart = False, update: Update = False
) -> int:
    """Install and start the workers of cluster.yaml on their Macs, over ssh; exit code 3 if one failed.

    For every worker with `ssh: user@host` it installs this very version there, sends its configuration and its
    certificate, starts it as a service of that user, and waits until it answers. What is right already stays as it is.

    Beforehand: `ssh user@host` has to work without a password.

    After an update of brigade here, or a change of cluster.yaml: brigade launch

    To take one Mac away: brigade launch --stop mini
    """
    if stop + restart + update > 1:
        raise InputError("", "expected one of --stop, --restart and --update")
    cluster = load_cluster(config)
    workers = workers_of(cluster, names or ())

    from coordinator.cli.launching import run_launch, run_stop
    from coordinator.cli.run_async import run_async
    from coordinator.fleet.steps import Action

    if stop:
        return run_async(run_stop(workers))
    action = Action.UPDATE if update else Action.RESTART if restart else Action.START
    return run_async(run_launch(config, cluster, workers, action))


def workers_of(cluster: Cluster, names: "list[str] | tuple[()]") -> list[Worker]:
    """Those of these names, or all, that ssh reaches.

    Raises:
        ConfigError: there is none, or one that is named is not there or has no `ssh:`.
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
        whom = ", ".join(missing) or "any worker"
        raise ConfigError(f"{cluster.file} does not say how to reach {whom}: expected `ssh: user@host` in its entry")
    return reached
