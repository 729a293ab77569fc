"""What a repository on the Hugging Face hub is called. Opening one is for hub.py, which takes long to import."""

import re

_PART = r"\w[\w.-]*"  # no part may lead anywhere else, as `..` would
_REPOSITORY = re.compile(rf"{_PART}/{_PART}(@{_PART})?")


def is_repository(model: str) -> bool:
    """Whether the name has the shape owner/name or owner/name@revision."""
    return _REPOSITORY.fullmatch(model) is not None
