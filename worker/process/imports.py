"""Imports that a worker can do without. Knows nothing of what is imported."""

import sys
from importlib.util import find_spec, module_from_spec


def skip_init(package: str) -> None:
    """Leave out what the package's own `__init__` does; its modules are imported as ever.

    mlx-lm's imports its commands and with them transformers, which only tokenizers need: two thirds of the time that
    a worker takes to start.
    """
    spec = find_spec(package)
    if package not in sys.modules and spec is not None:
        sys.modules[package] = module_from_spec(spec)
