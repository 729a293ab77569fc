"""What `verify` says of what it found."""

import json
import math
from dataclasses import replace

from coordinator.measure.rounding import Rounding
from coordinator.measure.verdict import Case, Report
from coordinator.planning.plan import Assignment

SPLIT = (Assignment("coordinator", 0, 3, 0, 0, 0), Assignment("mini", 3, 4, 0, 0, 0))
EQUAL = Case("greedy, a", [1, 2, 3], [1, 2, 3])
ROUNDED = Case("sampled, b", [1, 2, 3, 4], [1, 9, 8, 7], Rounding(0.0021, 0.034))
DIFFERING = Case("sampled, c", [1, 2], [1, 3], Rounding(1.25, 0.034))
ALL_EQUAL = Report(SPLIT, 40, [], [EQUAL, EQUAL])


def lines(report: Report) -> list[str]:
    return [*report.of_tensors(), *map(str, report.cases), report.summary()]


def test_tokens_are_counted_up_to_a_difference() -> None:
    assert [(case.verdict, case.num_equal) for case in (EQUAL, ROUNDED, DIFFERING)] == [
        ("equal", 3), ("rounding", 1), ("DIFFERS", 1),
    ]  # fmt: skip


def test_a_report_of_equal_cases() -> None:
    assert ALL_EQUAL.holds
    assert lines(ALL_EQUAL) == [
        "split: coordinator [0, 3) · mini [3, 4)",
        "equal    40 tensors on the coordinator and 1 worker(s)",
        "equal    greedy, a: 3 tokens",
        "equal    greedy, a: 3 tokens",
        "the cluster is the model: 6 tokens equal",
    ]


def test_what_rounding_explains_is_listed_with_both_figures_and_counted_and_does_not_fail() -> None:
    report = replace(ALL_EQUAL, cases=[EQUAL, ROUNDED])
    assert report.holds
    assert lines(report)[-2:] == [
        "rounding sampled, b: token 1 is [9], alone it is [2]; 0.0021 between their logits, rounding makes 0.034, "
        "what follows is another text",
        "the cluster is the model: 4 tokens equal, 1 difference within rounding",
    ]
    assert lines(replace(report, cases=[ROUNDED, ROUNDED]))[-1].endswith(
        "2 tokens equal, 2 differences within rounding"
    )


def test_any_other_difference_fails() -> None:
    report = replace(ALL_EQUAL, cases=[EQUAL, ROUNDED, DIFFERING])
    assert not report.holds
    assert lines(report)[-2:] == [
        "DIFFERS  sampled, c: token 1 is [3], alone it is [2]; 1.2 between their logits, rounding makes 0.034",
        "the cluster is NOT the model",
    ]


def test_a_difference_without_figures_fails() -> None:
    """Such as a missing token, or one of a decoder that has no other way of evaluation."""
    for case in (Case("d", [1, 2], [1]), Case("e", [1, 2], [1, 3]), Case("f", [1], [1, 2])):
        assert case.verdict == "DIFFERS" and not replace(ALL_EQUAL, cases=[EQUAL, case]).holds


def test_tensors_that_differ_fail_and_are_named_with_their_node() -> None:
    report = replace(ALL_EQUAL, differing=[("coordinator", "a.weight"), ("mini", "b.weight")])
    assert not report.holds
    assert lines(report)[1:3] == [
        "DIFFERS  tensor a.weight on the coordinator",
        "DIFFERS  tensor b.weight on worker mini",
    ]
    assert lines(report)[-1] == "the cluster is NOT the model"


def test_json_holds_the_verdicts_and_figures() -> None:
    never = replace(DIFFERING, rounding=Rounding(math.inf, 0.034))
    found = json.loads(replace(ALL_EQUAL, cases=[EQUAL, ROUNDED, never]).to_json())
    assert (found["equal"], found["within_rounding"], found["num_tensors"], found["tensors"]) == (False, 1, 40, [])
    assert [case["verdict"] for case in found["cases"]] == ["equal", "rounding", "differs"]
    assert [case["first_difference"] for case in found["cases"]] == [None, 1, 1]
    assert [case["rounding"] for case in found["cases"]] == [
        None, {"margin": 0.0021, "measured": 0.034}, {"margin": None, "measured": 0.034},
    ]  # fmt: skip
    assert found["cases"][1]["expected"] == [1, 2, 3, 4]
