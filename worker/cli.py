"""`brigade worker`: checks the flags of one node, and imports MLX only if they are valid."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from worker.config import (
    CONFIG,
    NO_DRAFTER,
    USING_CONFIG,
    ClusterConfig,
    TlsConfig,
    is_node_name,
    load_cluster,
    split_address,
)
from worker.errors import ConfigError, InputError
from worker.model.repository import require_model
from worker.platform.installation import skip_init

DEFAULT_BIND = "127.0.0.1:50070"
_MODEL = (
    "This node's copy of the model, whatever name a coordinator gives it. (default: `model:` of its entry, or of "
    "cluster.yaml; the bundled model is always there)"
)
_CONFIG = (
    "cluster.yaml; --name is this node's entry in it. (default with --name: cluster.yaml of this folder, if it exists "
    "and neither --bind nor --keys is given)"
)
_KEYS = "Without --config: the folder of the certificate NAME.pem that `brigade keys issue NAME` made."
_DRAFT_MODEL = "A copy of the model or head that drafts. (default: the coordinator sends it)"
Announce = Annotated[
    bool | None,
    typer.Option(
        "--announce/--no-announce",
        help="Announce this node in the network, for `brigade nodes` and `brigade init`. (default: cluster.yaml's)",
        show_default=False,
    ),
]
KeepAlive = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        min=0.1,
        help="Free the layers after S seconds without use; the next coordinator loads them again. (default: never)",
        show_default=False,
    ),
]


def worker(
    config: Annotated[Path | None, typer.Option(help=_CONFIG)] = None,
    name: Annotated[str | None, typer.Option(help="This node's name.")] = None,
    bind: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = None,
    keys: Annotated[Path | None, typer.Option(metavar="FOLDER", help=_KEYS)] = None,
    model: Annotated[str | None, typer.Option(metavar="PATH_OR_REPO", help=_MODEL)] = None,
    draft_model: Annotated[str | None, typer.Option(metavar="PATH_OR_REPO", help=_DRAFT_MODEL)] = None,
    announce: Announce = None,
    keep_alive: KeepAlive = None,
    follow_parent: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve as a node until SIGTERM. Sessions in progress move to the other nodes, or have ten seconds to end.

    On another Mac a name and a certificate are enough: brigade worker --name mini --bind 0.0.0.0:50070 --keys keys

    Or beside a copy of cluster.yaml: brigade worker --name mini

    If copies differ, the coordinator's counts, and it warns. Without one the node listens on 127.0.0.1:50070 only.

    The node opens no path that a coordinator names. It loads its own model, those directly below the folders of
    `models:` in its cluster.yaml, and those in its hub cache. The coordinator sends it the layers of any other model,
    which go to a cache (`brigade cache ls`). With `pull: hub` it downloads them from the hub instead, with `pull: none`
    it does neither.
    """
    if not config and name and not bind and not keys and os.path.lexists(CONFIG):
        print(USING_CONFIG, file=sys.stderr, flush=True)
        config = CONFIG
    cluster = load_cluster(config) if config else _without_config(name, keys)
    if config and keys:
        raise InputError("keys", "not expected with --config: its `tls:` names the folder")
    entry = next((worker for worker in cluster.workers if worker.name == name), None)
    if config and entry is None and (name or not bind):
        found = f"{config} has no worker {name!r}" if name else "--name is missing"
        known = ", ".join(worker.name for worker in cluster.workers)
        expected = f"one of: {known}" if known else "an entry under `workers:` there"
        raise ConfigError(f"{found}: expected {expected}")
    for named in (model, None if draft_model == NO_DRAFTER else draft_model):
        if named is not None:
            require_model(named)
    binds = (bind,) if bind else entry.addresses if entry else (DEFAULT_BIND,)
    _, port = split_address(binds[0])

    skip_init("mlx_lm")
    from worker.node.model_sources import ModelSources
    from worker.node.network import Network
    from worker.node.serve import serve

    given_name, name = name or "", name or f"worker-{port}"
    serve(
        name,
        binds,
        Network.of(cluster, name, partial(_warn, name)),
        cluster=cluster,
        given_name=given_name,
        sources=ModelSources.of(cluster, name, model, draft_model),
        memory_bytes=entry.memory if entry else None,
        announces=cluster.announce if announce is None else announce,
        keep_alive_s=keep_alive,
        follow_parent=follow_parent,
    )


def _warn(name: str, line: str) -> None:
    print(f"worker {name}: warning: {line}", file=sys.stderr, flush=True)


def _without_config(name: str | None, keys: Path | None) -> ClusterConfig:
    """Return the configuration of a node without cluster.yaml. Raises ConfigError if its flags are wrong."""
    if name is not None and not is_node_name(name):
        raise ConfigError(f"--name: expected letters, digits, '-', '_' and '.', found {name!r}")
    if keys and not name:
        raise ConfigError("--name is missing: --keys needs the name that the certificate carries")
    return ClusterConfig(tls=TlsConfig(keys=os.path.expanduser(keys))) if keys else ClusterConfig()
