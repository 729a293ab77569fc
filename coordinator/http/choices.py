"""Choices: what chats and completions tell alike of the answers to one prompt."""

from collections.abc import Sequence
from typing import Any

from coordinator.http.errors import HttpError
from coordinator.http.streams import data
from coordinator.resident.channels import Delta
from coordinator.shapes.answers import figures_of


def figures(lasts: Sequence[Delta]) -> Any:
    """What windows, recoveries and prefixes made of it; a list where there are several choices."""
    found = [figures_of(last) for last in lasts]
    return found[0] if len(found) == 1 else found


def tell(error: HttpError) -> bytes:
    """An error in the middle of a stream, as OpenAI's clients know it."""
    return data(error.to_openai())
