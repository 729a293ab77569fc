"""Ctrl-C while no event loop runs: it ends the process at once, and none is lost to MLX's look for a compiler."""

import os
import signal

INTERRUPTED = 130


def end_when_interrupted() -> None:
    """From now on Ctrl-C is an end without a word, whatever is being imported or parsed."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))


def find_compiler() -> None:
    """Have MLX look for the CPU's compiler now, while this process has only one thread.

    MLX looks once per process, by system(), which ignores SIGINT until it returns: a Ctrl-C would be lost. Blocked in
    the only thread, SIGINT waits instead, and takes effect when this function returns.
    """
    import mlx.core as mx

    if mx.default_device().type == mx.cpu:
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            mx.compile(lambda: mx.array(0))()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
