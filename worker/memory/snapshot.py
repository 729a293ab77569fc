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
            now = vars(each)
            now.update(attributes)  # first: other threads read these objects meanwhile
            for name in now.keys() - attributes.keys():
                del now[name]


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Lists are copied: a layer replaces the arrays in its own."""
    return {name: list(value) if isinstance(value, list) else value for name, value in attributes.items()}
