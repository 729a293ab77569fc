"""Where Brigade keeps files on this machine."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where Brigade keeps what it can find out, or fetch, again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "brigade"
