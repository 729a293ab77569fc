"""The one thread of a process that owns MLX. Arrays never leave it; whoever holds a shard elsewhere holds a handle."""

import mlx.core as mx

from worker.call_thread import CallThread


class MlxThread(CallThread):
    """Where everything that touches arrays runs."""

    def __init__(self) -> None:
        super().__init__("mlx", at_end=mx.clear_streams)  # MLX asks for this at the end of every thread that used it
