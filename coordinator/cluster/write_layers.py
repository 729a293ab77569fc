"""Writes a plan's layers into cluster.yaml, whose lines all stay as they are."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from coordinator.planning.plan import Plan
from worker.config import ClusterConfig, load_cluster
from worker.errors import ConfigError


def write_layers(path: Path, cluster: ClusterConfig, plan: Plan) -> None:
    """Add the plan's `layers:` as the file's last line; `cluster` is what it says by now.

    Raises:
        ConfigError: the plan is not over the file's nodes in the file's order, or the line cannot be added.
    """
    layers = list(plan.layers)
    require_changeable(path)
    _require_same_nodes(path, cluster, plan)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        text = path.read_text(encoding="utf-8")
        gap = "" if text.endswith("\n") else "\n"
        unfinished.write_text(f"{text}{gap}layers: {layers}  # as brigade plan says\n", encoding="utf-8")
        shutil.copymode(path, unfinished)
        if not _says(unfinished, layers):
            raise ConfigError(f"{path}: cannot add a line to it; write there yourself: layers: {layers}")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def require_changeable(path: Path) -> None:
    """Raise ConfigError if the file is read-only, which replacing it would not heed."""
    if not os.access(path, os.W_OK) or not path.stat().st_mode & 0o222:  # the superuser may write to all
        raise ConfigError(f"{path} is read-only: expected a file that may be changed (chmod u+w), or no --write")


def _require_same_nodes(path: Path, cluster: ClusterConfig, plan: Plan) -> None:
    listed = [cluster.coordinator.name, *(worker.name for worker in cluster.workers)]
    members = [assignment.name for assignment in plan.assignments]
    if members != listed:
        raise ConfigError(
            f"{path}: expected a plan over {', '.join(listed)}, in this order, as `layers:` counts them; the fastest "
            f"is over {', '.join(members)}: list the workers so there"
        )


def _says(path: Path, layers: Sequence[int]) -> bool:
    """Whether it is still a configuration, with these layers: a file may end in the middle of something."""
    try:
        return list(load_cluster(path).layers or ()) == list(layers)
    except ConfigError:
        return False
