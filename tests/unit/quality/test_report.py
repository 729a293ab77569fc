"""What `verify` says of its findings, to people and as JSON."""

import math
from dataclasses import replace

from coordinator.planning.plan import Assignment
from coordinator.quality.report import ComparedAnswer, Rounding, VerifyReport, compare_tensors

SPLIT = (Assignment("coordinator", 0, 3, 0, 0, 0), Assignment("mini", 3, 4, 0, 0, 0))
EQUAL = ComparedAnswer("greedy, a", [1, 2, 3], [1, 2, 3], 0.25)
ROUNDED = ComparedAnswer("sampled, b", [1, 2, 3, 4], [1, 9, 3, 4], 0.002, {1: Rounding(0.0021, 0.034)})
DIFFERING = ComparedAnswer("sampled, c", [1, 2], [1, 3], 0.5, {1: Rounding(1.25, 0.034)})
ALL_EQUAL = VerifyReport(SPLIT, 40, [], cases=[EQUAL, EQUAL])


def lines(report: VerifyReport) -> list[str]:
    return [*report.of_tensors(), *map(str, report.cases), report.summary()]


def test_a_report_lists_split_tensors_and_cases_and_sums_them_up() -> None:
    assert lines(ALL_EQUAL) == [
        "split: coordinator [0, 3) · mini [3, 4)",
        "equal    40 tensors on the coordinator and worker mini",
        "equal    greedy, a: 3 tokens, smallest margin 0.25",
        "equal    greedy, a: 3 tokens, smallest margin 0.25",
        "the cluster is the model: 6 tokens equal, smallest margin 0.25",
    ]
    report = replace(ALL_EQUAL, cases=[replace(EQUAL, margin=None), ROUNDED], drafts_held=[0.625, 0.25])
    assert lines(report)[2:] == [
        "drafts held, by place: 62% · 25%",
        "equal    greedy, a: 3 tokens",
        "rounding sampled, b: token 1 is [9], alone it is [2]; 0.0021 between their logits, rounding makes 0.034",
        "the cluster is the model: 6 tokens equal, 1 difference within rounding, smallest margin 0.002",
    ]
    differing = [("coordinator", "a.weight"), ("mini", "b.weight")]
    assert lines(replace(ALL_EQUAL, cases=[DIFFERING], differing=differing))[1:] == [
        "DIFFERS  tensor a.weight on the coordinator",
        "DIFFERS  tensor b.weight on worker mini",
        "DIFFERS  sampled, c: token 1 is [3], alone it is [2]; 1.2 between their logits, rounding makes 0.034",
        "the cluster is NOT the model",
    ]


def test_a_report_holds_only_if_rounding_explains_every_difference() -> None:
    assert ALL_EQUAL.holds and replace(ALL_EQUAL, cases=[EQUAL, ROUNDED]).holds
    report = replace(ALL_EQUAL, cases=[EQUAL, ROUNDED, DIFFERING])
    assert [(case.verdict, case.num_equal) for case in report.cases] == [("equal", 3), ("rounding", 3), ("DIFFERS", 1)]
    assert not report.holds and not replace(ALL_EQUAL, differing=[("mini", "b.weight")]).holds
    # those without figures: a missing token, one too many, or one of a decoder that has no other way of evaluation
    for expected, found in (([1, 2], [1]), ([1, 2], [1, 3]), ([1], [1, 2])):
        case = ComparedAnswer("d", expected, found)
        assert case.verdict == "DIFFERS" and not replace(ALL_EQUAL, cases=[EQUAL, case]).holds
    roundings = {0: Rounding(0.001, 0.03), 2: Rounding(5.0, 0.03)}  # what it does not explain comes first
    case = ComparedAnswer("g", [1, 2, 3, 4], [9, 2, 9, 4], 0.001, roundings)
    assert (case.verdict, case.first_difference, case.num_equal) == ("DIFFERS", 2, 2) and str(case).endswith("; 1 more")


def test_a_nodes_tensors_are_compared_with_those_of_its_layers() -> None:
    ours = [{"0.w": "a", "embed": "e"}, {"1.w": "b"}, {"2.w": "c"}, {"3.w": "d", "embed": "e"}]
    first, last = {"0.w": "a", "embed": "e", "1.w": "b", "2.w": "c"}, {"3.w": "d", "embed": "e"}
    assert compare_tensors(SPLIT, [first, last], ours) == (6, [])
    other = {"0.w": "a", "1.w": "x", "2.w": "c", "embed": "e"}
    assert compare_tensors(SPLIT, [other, last], ours) == (6, [("coordinator", "1.w")])
    assert compare_tensors(SPLIT, [first, {"3.w": "d", "4.w": "f"}], ours) == (6, [("mini", "4.w"), ("mini", "embed")])
    assert compare_tensors(SPLIT, [first, last | {"\x1b[2K": "f"}], ours) == (
        6,
        [("mini", "\N{REPLACEMENT CHARACTER}[2K")],
    )


def test_json_holds_the_verdicts_and_figures() -> None:
    never = replace(DIFFERING, margin=math.inf, roundings={1: Rounding(math.inf, 0.034)})
    found = replace(ALL_EQUAL, is_streamed=True, cases=[EQUAL, ROUNDED, never]).as_json()
    assert (found["equal"], found["within_rounding"], found["num_tensors"], found["tensors"]) == (False, 1, 40, [])
    assert (found["streamed"], found["margin"]) == (True, 0.002)
    for held in ([], [0.625, 0.25]):
        assert replace(ALL_EQUAL, drafts_held=held).as_json()["drafts_held"] == held
    keys = ("verdict", "margin", "first_difference", "num_differences", "rounding")
    assert [tuple(case[key] for key in keys) for case in found["cases"]] == [
        ("equal", 0.25, None, 0, None),
        ("rounding", 0.002, 1, 1, {"margin": 0.0021, "measured": 0.034}),
        ("differs", None, 1, 1, {"margin": None, "measured": 0.034}),
    ]
    assert found["cases"][1]["expected"] == [1, 2, 3, 4]
