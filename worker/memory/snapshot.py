"""Snapshot: what caches held before a pass was built, to go back to if it is never computed."""

from collections.abc import Iterable
from typing import Any


class Snapshot:
    """The attributes of objects, which share their arrays with it: where a buffer is written, MLX copies it meanwhile.

    So it is let go of before the pass is computed.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        unique = {id(each): each for each in objects}  # several caches may lie in one pack
        self._saved = [(each, _copied(vars(each))) for each in unique.values()]

    def restore(self) -> None:
        for each, attributes in self._saved:
            vars(each).clear()
            vars(each).update(attributes)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Lists are copied: a layer replaces the arrays in its own."""
    return {name: list(value) if isinstance(value, list) else value for name, value in attributes.items()}
