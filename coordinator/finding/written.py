"""Writes a draft as a cluster.yaml that loads; never over another file unless that is wished."""

import contextlib
import os
from pathlib import Path
from typing import Any

import yaml

from coordinator.finding.draft import Draft
from worker.config import Cluster, Coordinator, load_cluster
from worker.errors import ConfigError

KEYS = "keys"  # the folder beside the file
_HEAD = "# Written by `brigade init`. All keys: docs/cluster_yaml.md\n"


def cluster_text(model: str, coordinator: str, draft: Draft) -> str:
    """The file: text from the network only ever as YAML's own strings."""
    said: dict[str, Any] = {"model": model}
    if draft.is_encrypted:
        said["tls"] = {"keys": KEYS}
    elif draft.is_exposed:
        said["insecure"] = True
    if coordinator != Coordinator().name:
        said["coordinator"] = {"name": coordinator}
    said["workers"] = [
        {"name": worker.name, "address": worker.addresses if len(worker.ways) > 1 else worker.addresses[0]}
        for worker in draft.workers
    ]
    return _HEAD + yaml.safe_dump(said, sort_keys=False, allow_unicode=False)


def require_room(path: Path, *, force: bool) -> None:
    """Raises ConfigError where there is no folder for it, or a file would be written over that nobody wished away."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder that is there; make it, or give another --config")
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path} is there already, and is not written over: give --force, or another --config")


def write_cluster(path: Path, text: str, *, force: bool) -> Cluster:
    """Write it, once it is known to load.

    Raises:
        ConfigError: it is there already, cannot be written, or would not load.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        load_cluster(unfinished)
        if not force:
            path.open("x").close()  # where another process has just written one, it stays
        unfinished.replace(path)
    except FileExistsError:
        require_room(path, force=False)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # why it could not be written says more
            unfinished.unlink()
    return load_cluster(path)
