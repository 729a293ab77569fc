"""Ctrl-C or SIGTERM while no event loop runs ends the process at once; while MLX looks for a compiler, after that."""

import os
import signal

INTERRUPTED = 130


def end_when_interrupted() -> None:
    """From now on, end the process silently at Ctrl-C or SIGTERM, even during imports and the parsing of flags."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(INTERRUPTED))


def find_compiler() -> None:
    """Make MLX look for the CPU's compiler now, while this process has only one thread.

    MLX looks for it once per process, by system(), which ignores SIGINT until it returns: a Ctrl-C would be lost. This
    function blocks SIGINT in the only thread, so that it takes effect afterwards.
    """
    import mlx.core as mx

    if mx.default_device().type == mx.cpu:
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            mx.compile(lambda: mx.array(0))()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
