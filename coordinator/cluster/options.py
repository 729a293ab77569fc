"""ClusterOptions: the model and the nodes that run it, from flags, cluster.yaml and defaults, in this order."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.planning.plan import USUAL_REQUESTS, Goal, Objective
from coordinator.planning.recovery import USUAL, Limits
from worker.config import ClusterConfig, load_cluster
from worker.errors import ConfigError, InputError
from worker.model.model_spec import ModelSpec

DEFAULT_CONTEXT = 4096  # tokens that a plan reserves cache for by default


@dataclass(frozen=True)
class ClusterOptions:
    """The model and the nodes that run it.

    `local` is the number of worker processes of our own; None stands for the workers of the configuration.
    Raises ConfigError if two nodes have the same name.
    """

    cluster: ClusterConfig
    model: str
    local: int | None
    context: int  # tokens of a session that a plan keeps memory for at least
    trust_remote_code: bool = False  # whether a tokenizer may be Python code; only a flag can allow it
    check_finite: bool = False
    limits: Limits = USUAL  # of a recovery
    objective: Goal = "latency"  # of a plan by speed
    num_requests: int = USUAL_REQUESTS  # at once, if the objective is throughput
    by_speed: bool = True  # plan by the measured speeds of nodes, if they are different machines
    may_be_alone: bool = True  # the plan may leave all workers out
    needs_all: bool = False  # it may leave none out
    max_context: int = 0  # tokens up to which that grows if memory is left
    given_context: int | None = None  # by a flag or the file; None: by neither
    draft_model: str | None = None  # a small model or a draft head; or NO_DRAFTER
    naming_secret: bytes = b""  # by which pieces of prefixes on disk are named; empty: that of this user

    def __post_init__(self) -> None:
        names = [self.cluster.coordinator.name, *self.worker_names]
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            file, where = self.cluster.file, "" if self.local is None else f", of which --local {self.local} starts one"
            raise ConfigError(
                f"{file}: expected a name of its own for each node, found two nodes called {repeated[0]}; "
                f"change one of them{where}"
            )

    @property
    def worker_names(self) -> list[str]:
        """The names of the workers, in the order of the configuration."""
        if self.local is not None:
            return [f"worker-{i + 1}" for i in range(self.local)]
        return [worker.name for worker in self.cluster.workers]

    @property
    def num_workers(self) -> int:
        return len(self.worker_names)

    @property
    def feeds(self) -> bool:
        """Whether workers are sent the weights that they lack."""
        return self.cluster.pull == "coordinator"

    def objective_of(self, spec: ModelSpec) -> Objective:
        """Return what a plan of this model is for."""
        return Objective(
            min(self.context, spec.context),
            self.max_context,
            goal=self.objective,
            num_requests=self.num_requests,
            layers=self.cluster.layers,
            is_order_fixed=self.cluster.order == "fixed",
            may_be_alone=self.may_be_alone,
            needs_all=self.needs_all,
        )

    def with_layers(self, layers: tuple[int, ...] | None) -> "ClusterOptions":
        """Return these options with this split; None leaves it to the plan."""
        return replace(self, cluster=self.cluster.model_copy(update={"layers": layers}))


def cluster_options(
    config: Path | None,
    model: str | None = None,
    local: int | None = None,
    layers: tuple[int, ...] | None = None,
    context: int | None = None,
    trust_remote_code: bool = False,
    check_finite: bool = False,
    limits: Limits = USUAL,
    draft_model: str | None = None,
    objective: Goal | None = None,
) -> ClusterOptions:
    """Return the options from a file, if there is one, and from flags, which take precedence.

    Raises:
        ConfigError: the file cannot be read, its values contradict each other, or two nodes have the same name.
        InputError: a model is named by an empty text.
    """
    for field, given in (("model", model), ("draft_model", draft_model)):
        if given == "":
            raise InputError(field, "expected a folder, a hub repository (owner/name) or a name, found nothing")
    cluster = load_cluster(config) if config else ClusterConfig()
    if local is not None:  # the file's layers belong to the file's workers
        cluster = cluster.model_copy(update={"layers": None, "workers": ()})
    if layers is not None:
        cluster = cluster.model_copy(update={"layers": layers})
    given_context = context or cluster.context
    return ClusterOptions(
        cluster,
        model or cluster.model or "demo",
        local,
        given_context or DEFAULT_CONTEXT,
        trust_remote_code,
        check_finite,
        limits,
        objective=objective or cluster.objective,
        given_context=given_context,
        draft_model=draft_model or cluster.draft_model,
    )
