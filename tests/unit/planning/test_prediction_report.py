"""What is said of a plan: alternatives, and advice that says it plainly when one Mac alone would be faster."""

from dataclasses import replace
from typing import Any

import pytest

from coordinator.planning.plan import Objective
from coordinator.planning.prediction import PlanReport, report_plan
from coordinator.planning.speeds import NO_SPEEDS, LinkSpeed, Survey
from tests.unit.planning.test_planner import GB, ROOMY, model, nodes, surveyed

SPEC = model([GB] * 8)
LINK = LinkSpeed(rtt_ms=1.0)


def looked(
    *gbps: float,
    budgets: tuple[int, ...] = (),
    objective: Objective | None = None,
    layers: tuple[int, ...] | None = None,
) -> PlanReport:
    survey = surveyed(SPEC, *gbps, ports=[LINK] * len(gbps))
    return report_plan(
        SPEC, nodes(*(budgets or (ROOMY,) * len(gbps))), survey, replace(objective or Objective(1), layers=layers)
    )


def alternatives(report: PlanReport) -> dict[str, tuple[list[int], bool, float | None]]:
    return {name: (each.plan.layers, each.plan.fits, each.ms_per_token) for name, each in report.alternatives.items()}


THROUGHPUT = {"objective": Objective(1, goal="throughput", num_requests=8)}


@pytest.mark.parametrize(
    ("gbps", "more", "layers", "advice"),
    [
        ((400, 100), {}, [8], "n0 alone is fastest: 20.0 ms per token, against 28.5 ms per token of n0 + n1."),
        ((100, 800), {}, [1, 7], "n1 alone would be faster, 10.0 ms per token instead of 19.8 ms per token: run"),
        ((400, 100), {"budgets": (6 * GB, ROOMY)}, [6, 2], "n0 alone would make 20.0 ms per token instead of 36.0 ms"),
        ((400, 100), {"budgets": (6 * GB, ROOMY)}, [6, 2], ", but lacks 1.9 GiB."),
        ((400, 100), {"layers": (4, 4)}, [4, 4], "n0 alone would be faster, 20.0 ms per token instead of 51.0"),
        ((400,), {}, [8], ""),
        ((400, 400), THROUGHPUT, [4, 4], ""),
        ((400, 20), THROUGHPUT, [8], "n0 alone is fastest: 50.0 tok/s of 8 requests, against 20.0 tok/s of 8 requests"),
        ((400, 100), {"budgets": (GB, 3 * GB)}, [2, 6], "It does not fit: n0 lacks "),
        ((400, 100), {"budgets": (GB // 2, 9 * GB)}, [1, 7], "n1 alone would hold it: run it there."),
    ],
)
def test_one_faster_mac_is_told(gbps: tuple[float, ...], more: dict[str, Any], layers: list[int], advice: str) -> None:
    found = looked(*gbps, **more)
    assert found.chosen.plan.layers == layers
    assert advice in found.advice and bool(advice) == bool(found.advice)


def test_alternatives_are_each_mac_alone_all_together_without_the_slowest_and_in_equal_parts() -> None:
    found = looked(400, 100, 200, budgets=(5 * GB, ROOMY, ROOMY))
    assert alternatives(found) == {
        "n0 alone": ([8], False, 20.0),
        "n1 alone": ([8], True, 80.0),
        "n2 alone": ([8], True, 40.0),
        "n0 + n2": ([5, 3], True, 28.5),
        "without n1": ([5, 3], True, 28.5),
        "even split": ([3, 3, 2], True, 49.0),
    }
    assert found.left_out == ("n1",) and found.advice.startswith("n1 would make it no faster, and is left out.")


@pytest.mark.parametrize(
    ("first", "advice"),
    [
        (5 * GB, "Left out for lack of memory: n2. n1 would make it no faster, and is left out. "),
        (9 * GB, "Left out for lack of memory: n2. n0 alone is fastest: "),
    ],
)
def test_a_node_without_memory_for_any_layer_is_left_out_for_that(first: int, advice: str) -> None:
    found = looked(400, 100, 900, 200, budgets=(first, ROOMY, GB // 2, ROOMY))
    assert {"n1", "n2"} <= set(found.left_out) and found.advice.startswith(advice)


def test_several_nodes_that_bring_no_speedup_are_named_together() -> None:
    found = looked(400, 20, 400, 10, objective=THROUGHPUT["objective"])
    assert found.advice.startswith("n1 and n3 would make it no faster, and are left out.")


def test_a_cable_that_matters_is_named() -> None:
    survey = Survey(surveyed(SPEC, 400, 400, 400).speeds, {"n1": LinkSpeed(0.1), "n2": LinkSpeed(20)})
    found = report_plan(SPEC, nodes(3 * GB, 3 * GB, 3 * GB), survey, Objective(1))
    assert "Hops take 50% of a token's time" in found.advice and "n2" in found.advice


def test_unknown_speeds_are_said_to_be_unknown() -> None:
    found = report_plan(SPEC, nodes(ROOMY, ROOMY), NO_SPEEDS, Objective(1))
    assert found.chosen.plan.layers == [4, 4] and "not known" in found.advice
    assert alternatives(found) == {
        "n0 alone": ([8], True, None),
        "n1 alone": ([8], True, None),
        "even split": ([4, 4], True, None),
    }


@pytest.mark.parametrize("count", [3, 9])
def test_more_macs_than_layers_are_no_obstacle(count: int) -> None:
    spec = model([GB] * 2)
    found = report_plan(spec, nodes(*[ROOMY] * count), surveyed(spec, *[400] * count), Objective(1))
    assert found.chosen.plan.layers == [1, 1] and "even split" not in alternatives(found)
    small = report_plan(spec, nodes(*[GB // 2] * count), surveyed(spec, *[400] * count), Objective(1))
    assert small.chosen.plan.names == ["n0", "n1"] and small.advice.startswith("It does not fit: n0 lacks ")
