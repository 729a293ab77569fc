"""What feeding does beside gRPC, each part alone: for tools/bench_feed.py."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from worker.node.framing import CHUNK_BYTES

_BLOCKS = 512  # more than a processor's caches hold, as files are
_ROUNDS = 5


def costs_alone(folder: Path) -> dict[str, float]:
    """Processor time in seconds per GB, medians, by one thread that does nothing else meanwhile."""
    blocks = [os.urandom(CHUNK_BYTES) for _ in range(_BLOCKS)]
    path, hashed = folder / "alone", blake3()

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for block in blocks:
                file.write(block)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.read(CHUNK_BYTES):
                pass

    def digest() -> None:
        for block in blocks:
            hashed.update(block)

    per_gb = 1e9 / (_BLOCKS * CHUNK_BYTES)
    works: dict[str, Callable[[], None]] = {"write a file": write, "read it": read, "its digest": digest}
    return {what: per_gb * statistics.median(_cpu_s(work) for _ in range(_ROUNDS)) for what, work in works.items()}


def _cpu_s(work: Callable[[], None]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
