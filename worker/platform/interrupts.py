"""Ctrl-C while no event loop runs: it ends the process at once, even while MLX looks for a compiler."""

import os
import signal

INTERRUPTED = 130


def end_when_interrupted() -> None:
    """End the process silently at Ctrl-C from now on, during imports and parsing too."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))


def find_compiler() -> None:
    """Let MLX look for the CPU's compiler now, while this process has only one thread.

    MLX looks once per process, by system(), which ignores SIGINT until it returns, so that a Ctrl-C would be lost. With
    SIGINT blocked in the only thread, it takes effect when this function returns.
    """
    import mlx.core as mx

    if mx.default_device().type == mx.cpu:
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            mx.compile(lambda: mx.array(0))()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
