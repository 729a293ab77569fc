"""Names of models: folders, and repositories on the Hugging Face hub. Does not import hub.py, which is slow."""

import os.path
import re
from pathlib import Path

from worker.errors import InputError

_PART = r"\w[\w.-]*"  # never `..`, which would leave the folder
_REPOSITORY = re.compile(rf"{_PART}/{_PART}(@{_PART})?")


def is_repository(model: str) -> bool:
    """Return whether the name has the form owner/name or owner/name@revision."""
    return _REPOSITORY.fullmatch(model) is not None


def folder_of(model: str) -> Path:
    """Return the folder of this name, with `~` expanded."""
    return Path(os.path.expanduser(model))


def is_on_hub(model: str) -> bool:
    """Return whether this names a repository and not a local folder.

    If the folder `owner` exists, `owner/name` is a folder in it, even a missing one; `owner/name@revision` is not.
    """
    is_below = "@" not in model and folder_of(model.partition("/")[0]).is_dir()
    return is_repository(model) and not folder_of(model).exists() and not is_below


def require_model(model: str) -> None:
    """Raise InputError unless this names a model: an existing folder, a repository, or `demo`."""
    if not model or not (model == "demo" or is_on_hub(model) or folder_of(model).is_dir()):
        raise InputError("model", f"expected a folder, a hub repository (owner/name) or `demo`, found {model!r}")
