"""ClusterOptions: which model runs where, by flags, cluster.yaml and defaults, in this order."""

from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.planning.plan import USUAL_REQUESTS, Goal
from coordinator.planning.recovery import USUAL, Limits
from worker.config import ClusterConfig, load_cluster

DEFAULT_CONTEXT = 4096  # tokens that a plan reserves cache for by default


@dataclass(frozen=True)
class ClusterOptions:
    """Which model runs where; `local` is the number of own workers, None for those of the configuration."""

    cluster: ClusterConfig
    model: str
    local: int | None
    context: int  # tokens
    trust_remote_code: bool = False  # whether a tokenizer may be Python code; no file and no peer can say so
    check_finite: bool = False
    limits: Limits = USUAL  # of a recovery
    objective: Goal = "latency"  # of a plan by speed
    num_requests: int = USUAL_REQUESTS  # at once, where the objective is their throughput
    wished_context: int | None = None  # by a flag or the file; None: by neither

    @property
    def num_workers(self) -> int:
        return len(self.cluster.workers) if self.local is None else self.local

    @property
    def feeds(self) -> bool:
        """Whether workers are sent what they lack of the model."""
        return self.cluster.pull == "coordinator"

    def with_layers(self, layers: tuple[int, ...] | None) -> "ClusterOptions":
        """Return these options with this split; None leaves it to the plan."""
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
    """Return the options by a file, if there is one, and by flags that win over it.

    Raises:
        ConfigError: the file cannot be read, or what it says does not agree.
    """
    cluster = load_cluster(config) if config else ClusterConfig()
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
