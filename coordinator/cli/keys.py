"""`brigade keys`: the cluster's certificate authority, and a certificate per node."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli import flags
from coordinator.cli.flags import find_config
from coordinator.cluster.progress import say
from worker.config import KEYS_FOLDER, ClusterConfig, load_cluster
from worker.errors import ConfigError
from worker.platform.run import App

keys = App(no_args_is_help=True, help="Certificates, by which nodes recognise each other and encrypt their links.")


@keys.command()
def init(
    config: flags.Config = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Make a new authority, and delete the certificates of the old one: every node needs a new one.",
        ),
    ] = False,
) -> None:
    """Make the cluster's authority and the coordinator's certificate. The authority's key stays in this folder.

    In the folder that cluster.yaml names: brigade keys init --config cluster.yaml

    To shut a node out, and give the others new certificates: brigade keys init --replace --config cluster.yaml
    """
    config = find_config(config)
    cluster = load_cluster(config) if config else ClusterConfig()

    from coordinator.deploy.authority import Authority, require_certifiable
    from worker.node.certificates import Role

    name = cluster.coordinator.name
    require_certifiable(name)
    authority = Authority.make(_folder(cluster, config), name, replace=replace)
    say(f"made the authority in {authority.folder}; its key stays there")
    say(f"made {authority.issue(name, Role.COORDINATOR)}, the certificate of the coordinator {name}")
    if replace and (others := [file for file in authority.folder.glob("*.pem") if not authority.has_issued(file)]):
        say(f"kept {', '.join(sorted(map(str, others)))}: not known to be of the authority that was replaced")
    if cluster.tls is None:
        say(f"to use it, put into cluster.yaml: tls: {{keys: {KEYS_FOLDER}}}")
    steps = ["launch" if worker.ssh else f"keys issue {worker.name}" for worker in cluster.workers]
    for step in dict.fromkeys(steps):
        say(f"next: brigade {step}" + (f" --config {config}" if config else ""))


@keys.command()
def issue(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The node's name in cluster.yaml.")],
    coordinator: Annotated[
        bool, typer.Option("--coordinator", help="Let the node load and use workers: not for a worker.")
    ] = False,
    config: flags.Config = None,
) -> None:
    """Make or renew a node's certificate, valid for a year: one file to copy to that node.

    brigade keys issue mini --config cluster.yaml
    """
    config = find_config(config)
    cluster = load_cluster(config) if config else ClusterConfig()

    from coordinator.deploy.authority import NODE_VALID, Authority
    from worker.node.certificates import Role
    from worker.node.network import Network

    known = [cluster.coordinator.name, *(worker.name for worker in cluster.workers)] if config else []
    if name not in known and (spelled := [each for each in known if each.lower() == name.lower()]):
        raise ConfigError(f"expected {spelled[0]!r}, as {config} spells this node's name, found {name!r}")
    if name in known and coordinator != (name == cluster.coordinator.name):
        expected, found = ("no --coordinator", "a worker") if coordinator else ("--coordinator", "the coordinator")
        raise ConfigError(f"expected {expected} for {name!r}, which is {found} in {config}")
    role = Role.COORDINATOR if coordinator else Role.WORKER
    path = Authority.open(_folder(cluster, config)).issue(name, role)
    if config and name not in known:
        say(f"warning: {config} has no node {name!r}, only {', '.join(known)}: no node calls it by this name")
    say(f"made {path}, valid for {NODE_VALID.days} days")
    if launch := Network.of(cluster).launch_hint(name):
        say(f"to send it, {launch}")
    else:
        say(f"copy it into the folder of keys on {name} and nowhere else; only its user may read it (chmod 600)")


def _folder(cluster: ClusterConfig, config: Path | None) -> Path:
    if cluster.tls:
        return Path(cluster.tls.keys)
    return (config.parent if config else Path()) / KEYS_FOLDER
