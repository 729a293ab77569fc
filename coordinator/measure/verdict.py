"""What `brigade verify` found, case by case, and how it is told."""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from coordinator.measure.rounding import Rounding
from coordinator.planning.plan import Assignment


@dataclass(frozen=True)
class Case:
    """One prompt, its sampling, what both sides made of it, and what lies between them where they first differ."""

    name: str
    expected: list[int]
    found: list[int]
    rounding: Rounding | None = None

    @property
    def first_difference(self) -> int | None:
        pairs = enumerate(zip_longest(self.expected, self.found))
        return next((i for i, (expected, found) in pairs if expected != found), None)

    @property
    def verdict(self) -> str:
        """`equal`, or `rounding` where that explains the first difference, or `DIFFERS`."""
        if self.first_difference is None:
            return "equal"
        return "rounding" if self.rounding is not None and self.rounding.explains else "DIFFERS"

    @property
    def num_equal(self) -> int:
        """Tokens that were compared and are equal: after a difference the texts are two."""
        return len(self.found) if self.first_difference is None else self.first_difference

    def to_json(self) -> dict[str, Any]:
        figures = self.rounding and {name: _number(value) for name, value in vars(self.rounding).items()}
        return {
            "name": self.name, "expected": self.expected, "found": self.found, "verdict": self.verdict.lower(),
            "first_difference": self.first_difference, "rounding": figures,
        }  # fmt: skip

    def __str__(self) -> str:
        at = self.first_difference
        if at is None:
            return f"equal    {self.name}: {len(self.found)} tokens"
        told = f"token {at} is {self.found[at : at + 1]}, alone it is {self.expected[at : at + 1]}"
        if self.rounding is not None:
            told += f"; {self.rounding.margin:.2g} between their logits, rounding makes {self.rounding.measured:.2g}"
        rest = ", what follows is another text" if self.verdict == "rounding" else ""
        return f"{self.verdict:<8} {self.name}: {told}{rest}"


@dataclass
class Report:
    """All tensors, and the cases so far."""

    split: tuple[Assignment, ...]
    num_tensors: int
    differing: list[tuple[str, str]]  # node and tensor
    cases: list[Case] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether the cluster is the model, as far as this machine can compute the same thing twice."""
        return not self.differing and all(case.verdict != "DIFFERS" for case in self.cases)

    def to_json(self) -> str:
        verdicts = Counter(case.verdict for case in self.cases)
        return json.dumps(
            {
                "equal": self.holds,
                "within_rounding": verdicts["rounding"],
                "num_tensors": self.num_tensors,
                "tensors": [{"node": node, "tensor": tensor} for node, tensor in self.differing],
                "cases": [case.to_json() for case in self.cases],
            }
        )

    def of_tensors(self) -> list[str]:
        """The split, and what became of the tensors; a line per case and the summary follow."""
        own, *workers = self.split
        places = {own.name: "the coordinator"} | {worker.name: f"worker {worker.name}" for worker in workers}
        tensors = [f"DIFFERS  tensor {tensor} on {places[node]}" for node, tensor in self.differing]
        where = "the coordinator" + (f" and {len(workers)} worker(s)" if workers else "")
        return [
            "split: " + " · ".join(f"{node.name} [{node.start}, {node.end})" for node in self.split),
            *(tensors or [f"equal    {self.num_tensors} tensors on {where}"]),
        ]

    def summary(self) -> str:
        if not self.holds:
            return "the cluster is NOT the model"
        rounded = sum(case.verdict == "rounding" for case in self.cases)
        more = f", {rounded} difference{'s' if rounded > 1 else ''} within rounding" if rounded else ""
        return f"the cluster is the model: {sum(case.num_equal for case in self.cases)} tokens equal{more}"


def _number(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None
