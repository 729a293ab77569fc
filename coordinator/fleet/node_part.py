"""What one worker needs of cluster.yaml: its own entry, and the keys that count on workers. Pure."""

from collections.abc import Mapping
from typing import Any

KEYS = "keys"  # the folder of its certificate there, beside its cluster.yaml
_OF_THE_COORDINATOR = {"context", "layers", "order", "coordinator"}
_OF_ITS_ENTRY_TOO = {"ssh"}  # keys of a worker's entry that count on the coordinator only


def node_part(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The configuration of the worker `name`: the file as it stands, without what is others' affair.

    Another worker's new address, or the coordinator's new split, is thus no news to this one.

    Args:
        raw: the keys of a cluster.yaml that `load_cluster` accepts.
    """
    part = {key: value for key, value in raw.items() if key not in _OF_THE_COORDINATOR}
    if part.get("tls"):
        part["tls"] = {"keys": KEYS}
    if part.get("models"):
        part["models"] = [_from_home(folder) for folder in part["models"]]
    [entry] = [worker for worker in raw["workers"] if worker["name"] == name]
    part["workers"] = [{key: value for key, value in entry.items() if key not in _OF_ITS_ENTRY_TOO}]
    return part


def _from_home(folder: str) -> str:
    """Relative to the account's home there: what lies beside this Mac's file is not there."""
    return folder if folder.startswith(("/", "~")) else f"~/{folder}"
