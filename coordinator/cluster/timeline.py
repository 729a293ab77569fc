"""Timeline: when a recovery got how far, for whoever measures it."""

from dataclasses import dataclass


@dataclass
class Timeline:
    """The latest recovery's. Seconds, monotonic; 0 for what has not happened."""

    lost_at: float = 0.0  # the loss was noticed
    found_at: float = 0.0  # there were enough nodes for a chain
    loaded_at: float = 0.0  # each of them had its layers
    opened_at: float = 0.0  # they were joined
