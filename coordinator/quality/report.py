"""The report of `brigade verify`: cases, tensors and the result, as text and as JSON. Pure."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from coordinator.planning.plan import Assignment
from worker.platform.text import counted, printable


@dataclass(frozen=True)
class Rounding:
    """Two measurements where two sequences of tokens differ, in logits."""

    margin: float  # the least change of a logit with which the reference draws the other token
    measured: float  # the largest difference of the reference's logits between windows of several lengths

    @property
    def explains(self) -> bool:
        """Whether rounding explains the difference; False if no difference, or an infinite one, was measured."""
        return 0 < self.measured < math.inf and self.margin <= self.measured


@dataclass(frozen=True)
class ComparedAnswer:
    """One request: the cluster's answer, and the reference's token at each of its positions."""

    name: str
    expected: list[int]
    found: list[int]
    margin: float | None = None  # the smallest one between the reference's first and second choice, logits
    roundings: Mapping[int, Rounding] = field(default_factory=dict)  # by position, where the tokens differ

    @property
    def differences(self) -> list[int]:
        """The positions where the tokens differ."""
        pairs = enumerate(zip_longest(self.expected, self.found))
        return [at for at, (expected, found) in pairs if expected != found]

    @property
    def first_difference(self) -> int | None:
        """The first difference that rounding does not explain, else the first one; None if all are equal."""
        return next(iter([*self._unexplained, *self.differences]), None)

    @property
    def rounding(self) -> Rounding | None:
        """The measurement at the first difference, if there is one."""
        return None if self.first_difference is None else self.roundings.get(self.first_difference)

    @property
    def verdict(self) -> str:
        """`equal`, `rounding` if that explains every difference, or `DIFFERS`."""
        if not self.differences:
            return "equal"
        return "DIFFERS" if self._unexplained else "rounding"

    @property
    def num_equal(self) -> int:
        return len(self.found) - sum(at < len(self.found) for at in self.differences)

    @property
    def _unexplained(self) -> list[int]:
        return [at for at in self.differences if at not in self.roundings or not self.roundings[at].explains]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "expected": self.expected, "found": self.found, "verdict": self.verdict.lower(),
            "margin": _finite(self.margin), "first_difference": self.first_difference,
            "num_differences": len(self.differences),
            "rounding": self.rounding and {name: _finite(value) for name, value in vars(self.rounding).items()},
        }  # fmt: skip

    def __str__(self) -> str:
        at = self.first_difference
        if at is None:
            return f"equal    {self.name}: {counted(len(self.found), 'token')}{_margin_text(self.margin)}"
        text = f"token {at} is {self.found[at : at + 1]}, alone it is {self.expected[at : at + 1]}"
        if self.rounding is not None:
            text += f"; {self.rounding.margin:.2g} between their logits, rounding makes {self.rounding.measured:.2g}"
        others = f"; {more} more" if (more := len(self.differences) - 1) else ""
        return f"{self.verdict:<8} {self.name}: {text}{others}"


@dataclass
class VerifyReport:
    """The comparison of tensors, and of the cases so far."""

    split: tuple[Assignment, ...]
    num_tensors: int
    differing: list[tuple[str, str]]  # node and tensor
    is_streamed: bool = False  # whether the reference was read layer by layer
    drafts_held: Sequence[float] = ()  # the share of drafts that held, by place: tokens do not depend on it
    cases: list[ComparedAnswer] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether the cluster is the model, up to rounding."""
        return not self.differing and all(case.verdict != "DIFFERS" for case in self.cases)

    @property
    def margin(self) -> float | None:
        """The smallest margin of all cases."""
        return min((case.margin for case in self.cases if case.margin is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return the object of `verify --json`."""
        verdicts = Counter(case.verdict for case in self.cases)
        return {
            "equal": self.holds,
            "within_rounding": verdicts["rounding"],
            "margin": _finite(self.margin),
            "streamed": self.is_streamed,
            "drafts_held": list(self.drafts_held),
            "num_tensors": self.num_tensors,
            "tensors": [{"node": node, "tensor": tensor} for node, tensor in self.differing],
            "cases": [case.as_json() for case in self.cases],
        }

    def of_tensors(self) -> list[str]:
        """Return the lines about the split, the tensors and drafts, which come before those of the cases."""
        own, *workers = self.split
        places = {own.name: "the coordinator"} | {worker.name: f"worker {worker.name}" for worker in workers}
        tensors = [f"DIFFERS  tensor {tensor} on {places[node]}" for node, tensor in self.differing]
        where = " and ".join(places.values())
        held = ["drafts held, by place: " + " · ".join(f"{share:.0%}" for share in self.drafts_held)]
        return [
            "split: " + " · ".join(f"{node.name} [{node.start}, {node.end})" for node in self.split),
            *(tensors or [f"equal    {self.num_tensors} tensors on {where}"]),
            *(held if self.drafts_held else []),
        ]

    def summary(self) -> str:
        if not self.holds:
            return "the cluster is NOT the model"
        rounded = sum(len(case.differences) for case in self.cases)
        more = f", {counted(rounded, 'difference')} within rounding" if rounded else ""
        equal = sum(case.num_equal for case in self.cases)
        return f"the cluster is the model: {counted(equal, 'token')} equal{more}{_margin_text(self.margin)}"


def compare_tensors(
    split: Sequence[Assignment], theirs: Sequence[Mapping[str, str]], ours: Sequence[Mapping[str, str]]
) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of tensors that the nodes hold, and (node, tensor) for each that differs from our files.

    Args:
        theirs: by node, the digest of each tensor that it holds.
        ours: by layer, the digests of our files; the embedding and the head belong to the first and the last layer.
    """
    num_tensors, differing = 0, []
    for node, found in zip(split, theirs, strict=True):
        expected = {name: digest for layer in ours[node.start : node.end] for name, digest in layer.items()}
        num_tensors += len(expected)
        names = sorted({*expected, *found})
        differing += [(node.name, printable(name)) for name in names if found.get(name) != expected.get(name)]
    return num_tensors, differing


def _margin_text(margin: float | None) -> str:
    return "" if margin is None else f", smallest margin {margin:.2g}"


def _finite(value: float | None) -> float | None:
    """Return None for infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
