"""The flags that several commands share, and what they amount to together with cluster.yaml."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from worker.config import Cluster, load_cluster
from worker.errors import ConfigError

DEFAULT_CONTEXT = 4096  # tokens that a plan reserves cache for, if nobody says

Config = Annotated[
    Path | None, typer.Option(help="cluster.yaml: the model and the workers.", rich_help_panel="Cluster")
]
Model = Annotated[
    str | None,
    typer.Option(
        help="A folder, a hub repository (owner/name), or `demo`, the bundled model. [default: cluster.yaml's, or demo]",
        rich_help_panel="Cluster",
    ),
]
Local = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=16,
        help="Start this many workers on loopback instead of using cluster.yaml's; 0 runs everything in this process.",
        rich_help_panel="Cluster",
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(
        metavar="3,2,1", help="Layers per node, coordinator first. [default: planned]", rich_help_panel="Cluster"
    ),
]
Context = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per session that the plan keeps memory for.", rich_help_panel="Cluster"),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout at the end, nothing else there.")]


@dataclass(frozen=True)
class ClusterOptions:
    """Which model runs where."""

    cluster: Cluster
    model: str
    local: int | None
    context: int  # tokens


def cluster_options(
    config: Path | None, model: str | None, local: int | None, layers: str | None, context: int | None
) -> ClusterOptions:
    """Flags over cluster.yaml over defaults. Raises ConfigError."""
    cluster = load_cluster(config) if config else Cluster()
    if layers is not None:
        cluster = cluster.model_copy(update={"layers": parse_layers(layers)})
    elif local is not None:
        cluster = cluster.model_copy(update={"layers": None})  # the file's are meant for the file's workers
    tokens = context or cluster.context or DEFAULT_CONTEXT
    return ClusterOptions(cluster, model or cluster.model or "demo", local, tokens)


def parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--layers: expected whole numbers like 3,2,1, got {text!r}") from None
