"""The one thread of a process that owns MLX. Arrays never leave it; whoever holds a shard elsewhere holds a handle."""

import sys

import mlx.core as mx

from worker.process.call_thread import CallThread

_SWITCH_INTERVAL_S = 0.0002  # Python's own 5 ms would let the event loop wait that long while a graph is built


class MlxThread(CallThread):
    """Where everything that touches arrays runs."""

    def __init__(self) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        super().__init__("mlx", at_end=mx.clear_streams)  # MLX asks for this at the end of every thread that used it
