"""What flags and cluster.yaml amount to together. Flags win over the file, the file over defaults."""

from dataclasses import dataclass, replace
from pathlib import Path

from worker.config import Cluster, load_cluster
from worker.errors import InputError

DEFAULT_CONTEXT = 4096  # tokens that a plan reserves cache for, if nobody says
MOST_REQUESTS = 1024  # at once: as many as a scheduler lets wait


@dataclass(frozen=True)
class ClusterOptions:
    """Which model runs where; `local` is the number of own workers, None for those of the configuration."""

    cluster: Cluster
    model: str
    local: int | None
    context: int  # tokens

    @property
    def num_workers(self) -> int:
        return len(self.cluster.workers) if self.local is None else self.local

    def with_layers(self, layers: tuple[int, ...] | None) -> "ClusterOptions":
        """The same with this split; None leaves it to the plan."""
        return replace(self, cluster=self.cluster.model_copy(update={"layers": layers}))


def cluster_options(
    config: Path | None, model: str | None, local: int | None, layers: str | None, context: int | None
) -> ClusterOptions:
    """Raises ConfigError for what cannot be read or does not agree, InputError for layers that are no numbers."""
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
        raise InputError("layers", f"expected whole numbers like 3,2,1, got {text!r}") from None


def parse_tokens(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError("prompt_tokens", f"expected token ids like 1,2,3, got {text!r}") from None


def parse_counts(field: str, text: str, *, most: int = 1_000_000) -> tuple[int, ...]:
    """Whole numbers from 1 to `most`, ascending, each once."""
    try:
        counts = {int(part) for part in text.split(",")}
    except ValueError:  # no numbers, or of thousands of digits
        counts = {0}
    if not all(1 <= count <= most for count in counts):
        raise InputError(field, f"expected whole numbers from 1 to {most} like 1,4,8, got {text!r}")
    return tuple(sorted(counts))


def parse_times(field: str, text: str, *, least: float = 0.0) -> tuple[float, ...]:
    """Milliseconds from `least` to a million."""
    try:
        times = tuple(float(part) for part in text.split(","))
    except ValueError:
        times = (-1.0,)
    if not all(least <= time <= 1e6 for time in times):  # false for what is no number, too
        raise InputError(field, f"expected milliseconds from {least:g} to 1000000 like 26.5,6.5, got {text!r}")
    return times


def parse_bias(text: str) -> dict[int, float]:
    try:
        pairs = [pair.split(":") for pair in text.split(",") if pair.strip()]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise InputError("logit_bias", f"expected ID:BIAS pairs like 5:-1.5,7:2, got {text!r}") from None
