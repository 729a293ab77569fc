"""The certificates that workers are sent: from the folder of keys, made where one is missing."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from coordinator.cluster.authority import Authority
from worker.config import Cluster
from worker.node.identity import Keys, Role, file_name


def certificates(cluster: Cluster, names: Iterable[str], say: Callable[[str], None]) -> dict[str, bytes]:
    """The file of each node, by name; none where links are not encrypted.

    Raises:
        ConfigError: one will not do, or is missing and cannot be made here.
    """
    if cluster.tls is None:
        return {}
    folder = Path(cluster.tls.keys)
    found = {}
    for name in names:
        path = folder / file_name(name)
        if not path.exists():
            authority = Authority.open(folder)
            with _alone_in(folder):
                if not path.exists():
                    say(f"made {authority.issue(name, Role.WORKER)}, the certificate of {name}")
        Keys(folder, name, Role.WORKER).read()
        found[name] = path.read_bytes()
    return found


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Of several launches at once one makes what is missing."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)
