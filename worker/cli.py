"""`brigade worker`: the flags of one node, checked. Imports MLX only once they are right."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from worker.config import ClusterConfig, TlsConfig, is_node_name, load_cluster, split_address
from worker.errors import ConfigError, InputError
from worker.model.repository import require_model
from worker.platform.installation import skip_init

DEFAULT_BIND = "127.0.0.1:50070"
_MODEL = (
    "Its copy of the model, whatever a coordinator calls that; else `model:` of its entry, or of cluster.yaml. "
    "The bundled one it has anyway."
)
_KEYS = "Without --config: the folder of its certificate, NAME.pem, as `brigade keys issue NAME` made it."
Announce = Annotated[
    bool | None,
    typer.Option(
        "--announce/--no-announce",
        help="Tell the network that it is there, for `brigade nodes` and `brigade init`. (default: cluster.yaml's)",
        show_default=False,
    ),
]
KeepAlive = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        min=0.1,
        help="Let go of layers that no coordinator has used for so long, seconds; the next one has them read again. "
        "(default: never)",
        show_default=False,
    ),
]


def worker(
    config: Annotated[Path | None, typer.Option(help="cluster.yaml; --name says which of its workers this is.")] = None,
    name: Annotated[str | None, typer.Option(help="This node's name.")] = None,
    bind: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = None,
    keys: Annotated[Path | None, typer.Option(metavar="FOLDER", help=_KEYS)] = None,
    model: Annotated[str | None, typer.Option(metavar="PATH_OR_REPO", help=_MODEL)] = None,
    announce: Announce = None,
    keep_alive: KeepAlive = None,
    follow_parent: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve as a node until SIGTERM; sessions in progress go to the other nodes, or get ten seconds to end.

    On another Mac a name and a certificate will do: brigade worker --name mini --bind 0.0.0.0:50070 --keys keys

    Or a copy of cluster.yaml: brigade worker --config cluster.yaml --name mini

    Where copies differ, the coordinator's counts, and says so. Without any the node listens on 127.0.0.1:50070 only.

    It opens no path that a coordinator names: it loads its own model, those directly below the folders of `models:` in
    its cluster.yaml, and what its hub cache holds. The layers of any other the coordinator sends it, to be kept in a
    cache (`brigade cache ls`); with `pull: hub` there it downloads it from the hub instead, with `pull: none` neither.
    """
    cluster = load_cluster(config) if config else _without_config(name, keys)
    if config and keys:
        raise InputError("keys", "not expected with --config, whose `tls:` says it")
    entry = next((worker for worker in cluster.workers if worker.name == name), None)
    if config and entry is None and (name or not bind):
        found = f"{config} has no worker {name!r}" if name else "--name is missing"
        known = ", ".join(worker.name for worker in cluster.workers)
        expected = f"one of: {known}" if known else "an entry under `workers:` there"
        raise ConfigError(f"{found}: expected {expected}")
    if model is not None:
        require_model(model)
    binds = (bind,) if bind else entry.addresses if entry else (DEFAULT_BIND,)
    _, port = split_address(binds[0])

    skip_init("mlx_lm")
    from worker.node.identity import Role
    from worker.node.model_sources import ModelSources
    from worker.node.network import Network
    from worker.node.serve import serve

    name = name or f"worker-{port}"
    serve(
        name,
        binds,
        Network.of(cluster, name, Role.WORKER, partial(_warn, name)),
        cluster=cluster if config else None,
        sources=ModelSources.of(cluster, name, model),
        memory_bytes=entry.memory if entry else None,
        announces=cluster.announce if announce is None else announce,
        keep_alive_s=keep_alive,
        follow_parent=follow_parent,
    )


def _warn(name: str, line: str) -> None:
    print(f"worker {name}: warning: {line}", file=sys.stderr, flush=True)


def _without_config(name: str | None, keys: Path | None) -> ClusterConfig:
    """Return the configuration of a node that has no file. Raises ConfigError for a bad name, or keys without one."""
    if name is not None and not is_node_name(name):
        raise ConfigError(f"--name: expected letters, digits, '-', '_' and '.', found {name!r}")
    if keys and not name:
        raise ConfigError("--name is missing: expected with --keys the name that the certificate carries")
    return ClusterConfig(tls=TlsConfig(keys=str(keys.expanduser()))) if keys else ClusterConfig()
