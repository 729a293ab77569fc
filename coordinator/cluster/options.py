"""What flags and cluster.yaml amount to together. Flags win over the file, the file over defaults."""

from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.planning.objective import USUAL_REQUESTS, Objective
from coordinator.planning.recovery import USUAL, Limits
from worker.config import Cluster, load_cluster

DEFAULT_CONTEXT = 4096  # tokens that a plan reserves cache for, if nobody says


@dataclass(frozen=True)
class ClusterOptions:
    """Which model runs where; `local` is the number of own workers, None for those of the configuration."""

    cluster: Cluster
    model: str
    local: int | None
    context: int  # tokens
    trust_remote_code: bool = False  # whether a tokenizer may be Python code; no file and no peer can say so
    check_finite: bool = False
    limits: Limits = USUAL  # of a recovery
    objective: Objective = "latency"  # of a plan by speed
    num_requests: int = USUAL_REQUESTS  # at once, where the objective is their throughput
    wished_context: int | None = None  # as flag or file say; None: nobody says

    @property
    def num_workers(self) -> int:
        return len(self.cluster.workers) if self.local is None else self.local

    @property
    def feeds(self) -> bool:
        """Whether workers are sent what they lack of the model."""
        return self.cluster.pull == "coordinator"

    def with_layers(self, layers: tuple[int, ...] | None) -> "ClusterOptions":
        """The same with this split; None leaves it to the plan."""
        return replace(self, cluster=self.cluster.model_copy(update={"layers": layers}))


def cluster_options(
    config: Path | None,
    model: str | None,
    local: int | None,
    layers: tuple[int, ...] | None,
    context: int | None,
    trust_remote_code: bool = False,
    check_finite: bool = False,
    limits: Limits = USUAL,
) -> ClusterOptions:
    """Raises ConfigError for what cannot be read or does not agree."""
    cluster = load_cluster(config) if config else Cluster()
    if layers is not None:
        cluster = cluster.model_copy(update={"layers": layers})
    elif local is not None:
        cluster = cluster.model_copy(update={"layers": None})  # the file's are meant for the file's workers
    name = model or cluster.model or "demo"
    wished = context or cluster.context
    return ClusterOptions(
        cluster,
        name,
        local,
        wished or DEFAULT_CONTEXT,
        trust_remote_code,
        check_finite,
        limits,
        wished_context=wished,
    )
