"""What a soak went through, and what it found."""

from collections import Counter
from dataclasses import dataclass, field

from tools.figures import table
from tools.soak_held import Ledger


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
