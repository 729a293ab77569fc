"""What a soak went through, what processes hold while nothing runs, and whether it is ever more."""

import asyncio
import gc
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import psutil

from tools.figures import table

_SETTLES_S = 10.0
_MORE_BYTES = 64 * 2**20  # than after the first round: what allocators keep, and what load happened to be heaviest
_MORE_THREADS = 2  # gRPC has a pool of its own, which breathes


@dataclass(frozen=True)
class Held:
    """By one process."""

    resident_bytes: int
    num_descriptors: int
    num_threads: int

    @classmethod
    def by(cls, pid: int) -> "Held":
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(process.memory_info().rss, process.num_fds(), process.num_threads())

    def more_than(self, first: "Held") -> str:
        """What there is more of, for people; nothing if there is not."""
        found = []
        if (more := self.resident_bytes - first.resident_bytes) > _MORE_BYTES:
            found.append(f"{more / 2**20:.0f} MiB")
        if (num := self.num_descriptors - first.num_descriptors) > 0:
            found.append(f"{num} descriptors")
        if (num := self.num_threads - first.num_threads) > _MORE_THREADS:
            found.append(f"{num} threads")
        return ", ".join(found)


def connections(pid: int) -> list[str]:
    """The process's TCP connections."""
    found = psutil.Process(pid).net_connections("tcp")
    return [f"{each.laddr.port} - {each.raddr.port if each.raddr else ''} {each.status}" for each in found]


@dataclass
class Ledger:
    """By process: what it held after the first round that it was there for from begin to end, and after its last."""

    first: dict[int, Held] = field(default_factory=dict)
    last: dict[int, Held] = field(default_factory=dict)
    num_rounds: dict[int, int] = field(default_factory=dict)

    async def settle(self, workers: Sequence[int]) -> list[str]:
        """What this process and those workers hold more than at first, once they had time to let go of it."""
        found = []
        for pid in (os.getpid(), *workers):
            self.num_rounds[pid] = self.num_rounds.get(pid, 0) + 1
            if more := await self._wait_settled(pid):
                open_ones = ", ".join(connections(pid)) or "none"
                found.append(f"process {pid} holds {more} more than after its first round; connections: {open_ones}")
        return found

    async def _wait_settled(self, pid: int) -> str:
        """What it still holds more after a while."""
        if pid not in self.first:
            await asyncio.sleep(_SETTLES_S / 10)
            self.first[pid] = self._look(pid)
        until = time.monotonic() + _SETTLES_S
        while (more := self._look(pid).more_than(self.first[pid])) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        return more

    def _look(self, pid: int) -> Held:
        if pid == os.getpid():
            gc.collect()
            mx.clear_cache()
        self.last[pid] = Held.by(pid)
        return self.last[pid]


@dataclass
class Soak:
    """What has happened so far."""

    machine: str
    model: str
    seed: int
    num_rounds: int = 0
    soaked_s: float = 0.0  # while requests ran
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)  # of requests
    num_tokens: int = 0
    num_recoveries: int = 0
    longest_still_s: float = 0.0  # that a reader waited for a token
    violations: list[str] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)


def print_soak(soak: Soak) -> None:
    """On standard output."""
    title = f"{soak.model} on {soak.machine}: {soak.soaked_s:.0f} s of load, {soak.num_rounds} rounds, seed {soak.seed}"
    still = f"longest time without a token {soak.longest_still_s:.1f} s"
    print(title, f"faults: {_counts(soak.faults)}", f"answers: {_counts(soak.ends)}", sep="\n")
    print(f"{soak.num_tokens} tokens, {soak.num_recoveries} recoveries, {still}\n")
    print(_held(soak.ledger))
    print(f"{len(soak.violations)} violation(s)", *soak.violations, sep="\n")


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counter.most_common()) or "none"


def _held(ledger: Ledger) -> str:
    """Of each process that was there after more than one round; this one first."""
    lines = []
    for number, (pid, first) in enumerate(ledger.first.items()):
        last = ledger.last[pid]
        if ledger.num_rounds[pid] > 1:
            lines.append((
                f"worker {pid}" if number else "coordinator",
                str(ledger.num_rounds[pid]),
                f"{first.resident_bytes / 2**20:.0f} -> {last.resident_bytes / 2**20:.0f}",
                f"{first.num_descriptors} -> {last.num_descriptors}",
                f"{first.num_threads} -> {last.num_threads}",
            ))  # fmt: skip
    return table(("process", "rounds", "MiB", "descriptors", "threads"), lines, 1)
