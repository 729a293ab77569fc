"""What losses of a worker took, as numbers: moments to times, trials to rows, rows to a table. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

KILLED, STOPPED = "killed", "stopped"  # by SIGKILL, by SIGSTOP
RESTARTED, SPARE = "restarted", "spare"  # what takes the lost worker's place

_DETECT_S = {KILLED: 0.05, STOPPED: 2.5}  # wanted on loopback, by what happened
_PREFILL = 1.2  # wanted: how much longer than as a prompt the tokens may take to be fed again


@dataclass(frozen=True)
class Case:
    """What happens to the last worker, and what takes its place."""

    loss: str
    place: str


CASES = [Case(loss, place) for loss in (KILLED, STOPPED) for place in (RESTARTED, SPARE)]


@dataclass(frozen=True)
class Moments:
    """One loss. Seconds on one clock."""

    struck: float
    lost: float  # noticed
    found: float  # there were enough nodes again
    loaded: float
    opened: float  # the chain
    tokens: Sequence[float]  # when each token came


@dataclass(frozen=True)
class Times:
    """Of one loss, or medians of several. Seconds; None where there is nothing to measure."""

    detect_s: float | None
    reopen_s: float | None  # from there to an open chain; of it
    find_s: float | None  # until there were enough nodes; of it
    start_s: float | None  # for another process to start
    load_s: float | None
    join_s: float | None
    replay_s: float | None  # from the open chain to the next token
    gap_s: float | None  # between two tokens
    prefill_s: float | None  # what as many tokens took as a prompt, right before


@dataclass(frozen=True)
class Row:
    """A case with so many tokens."""

    loss: str
    place: str
    context: int
    times: Times
    is_equal: bool  # whether the tokens were those of the unfailed run

    @property
    def wanted_detect_s(self) -> float:
        return _DETECT_S[self.loss]

    @property
    def wanted_gap_s(self) -> float | None:
        """Detection, a process's start where one had to be started, the load, and 1.2 times the prompt."""
        times = self.times
        if times.detect_s is None or times.load_s is None or times.prefill_s is None:
            return None
        return times.detect_s + (times.start_s or 0.0) + times.load_s + _PREFILL * times.prefill_s

    def as_json(self) -> dict[str, Any]:
        wanted = {"wanted_detect_s": self.wanted_detect_s, "wanted_gap_s": self.wanted_gap_s}
        named = {"loss": self.loss, "place": self.place, "context": self.context}
        return named | asdict(self.times) | wanted | {"tokens_equal": self.is_equal}


@dataclass(frozen=True)
class Failover:
    """All cases on one model."""

    machine: str
    model: str
    layers: list[int]
    rows: list[Row]

    @property
    def is_equal(self) -> bool:
        """Whether all answers had the tokens of the unfailed run."""
        return all(row.is_equal for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        rows = [row.as_json() for row in self.rows]
        return {"machine": self.machine, "model": self.model, "layers": self.layers, "rows": rows}


def times_of(moments: Moments, start_s: float | None, prefill_s: float) -> Times:
    """The parts that a loss is made of."""
    return Times(
        detect_s=moments.lost - moments.struck,
        reopen_s=moments.opened - moments.lost,
        find_s=moments.found - moments.lost,
        start_s=start_s,
        load_s=moments.loaded - moments.found,
        join_s=moments.opened - moments.loaded,
        replay_s=next((at - moments.opened for at in moments.tokens if at > moments.opened), None),
        gap_s=max((after - before for before, after in pairwise(moments.tokens)), default=None),
        prefill_s=prefill_s,
    )


def middle(trials: Sequence[Times]) -> Times:
    """The median of each figure, over the trials that have it."""
    columns = {name: [value for each in trials if (value := getattr(each, name)) is not None] for name in _NAMES}
    return Times(**{name: median(column) if column else None for name, column in columns.items()})


_NAMES = tuple(Times.__dataclass_fields__)
