"""Imports that a process can do without, and where it finds the others. Knows nothing of what is imported."""

import os
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path

_SOURCE = str(Path(__file__).resolve().parents[2])  # where this very code is imported from


def skip_init(package: str) -> None:
    """Leave out what the package's own `__init__` does; its modules are imported as ever.

    mlx-lm's imports its commands and with them transformers, which only tokenizers need: two thirds of the time that
    a worker takes to start.
    """
    spec = find_spec(package)
    if package not in sys.modules and spec is not None:
        sys.modules[package] = module_from_spec(spec)


def search_path() -> str:
    """PYTHONPATH with this code. No part of it is empty: that would be the folder where the process happens to be."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([_SOURCE, *map(os.path.abspath, given)])
