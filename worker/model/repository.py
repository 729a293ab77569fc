"""What a repository on the Hugging Face hub is called. Opening one is for hub.py, which takes long to import."""

import os.path
import re
from pathlib import Path

from worker.errors import InputError

_PART = r"\w[\w.-]*"  # no part may lead anywhere else, as `..` would
_REPOSITORY = re.compile(rf"{_PART}/{_PART}(@{_PART})?")


def is_repository(model: str) -> bool:
    """Whether the name has the shape owner/name or owner/name@revision."""
    return _REPOSITORY.fullmatch(model) is not None


def folder_of(model: str) -> Path:
    """The folder of this name; `~name` stays as it is where no user has that name."""
    return Path(os.path.expanduser(model))


def require_model(model: str) -> None:
    """Raise InputError unless this may be a model's place: a folder that is there, a repository's name, or `demo`."""
    if not model or not (model == "demo" or is_repository(model) or folder_of(model).is_dir()):
        raise InputError("model", f"expected a folder, a hub repository (owner/name) or `demo`, found {model!r}")
