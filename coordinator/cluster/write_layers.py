"""Writes a plan's layers into cluster.yaml and leaves all other lines unchanged."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from coordinator.planning.plan import Plan
from worker.config import ClusterConfig, load_cluster
from worker.errors import ConfigError


def write_layers(path: Path, cluster: ClusterConfig, plan: Plan) -> None:
    """Append the plan's `layers:` to the file, whose present content is `cluster`.

    Raises:
        ConfigError: the plan's nodes are not the file's nodes in the file's order, or the line cannot be added.
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
    """Raise ConfigError if the file is read-only: replacing it would ignore that."""
    if not os.access(path, os.W_OK) or not path.stat().st_mode & 0o222:  # the superuser may write to any file
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
    """Return whether the file is a valid configuration with these layers: it may have ended inside a block."""
    try:
        return list(load_cluster(path).layers or ()) == list(layers)
    except ConfigError:
        return False
