"""How near the plan's split is to the best: which splits are tried, and what is said of them."""

import pytest

from coordinator.planning.speeds import NO_SPEEDS, LinkSpeed
from tests.unit.planning.test_planner import GB, ROOMY, model, nodes, surveyed
from tools.plan_check import predict, report, worth_trying
from worker.errors import ConfigError

SPEC = model([GB] * 8)


def test_the_best_split_on_paper_is_tried_with_its_neighbours_and_equal_parts() -> None:
    predicted = predict(SPEC, nodes(5 * GB + GB // 2, ROOMY), surveyed(SPEC, 400, 100, ports=[LinkSpeed(1)]), 1)
    assert max(predicted) == (5, 3) and predicted[5, 3] == pytest.approx(1e3 / (5 * 2.5 + 3 * 10 + 1))
    assert worth_trying(predicted) == ((5, 3), (4, 4), (3, 5))


def test_three_nodes_have_neighbours_in_every_direction() -> None:
    predicted = predict(SPEC, nodes(ROOMY, ROOMY, ROOMY), surveyed(SPEC, 100, 400, 100), 1)
    assert worth_trying(predicted) == ((1, 6, 1), (2, 5, 1), (3, 4, 1), (1, 5, 2), (1, 4, 3), (2, 3, 3))


@pytest.mark.parametrize("count", [1, 4])
def test_too_few_and_too_many_nodes_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="expected 2 to 3 nodes that have measured themselves"):
        predict(SPEC, nodes(*[ROOMY] * count), surveyed(SPEC, *[400] * count), 1)


def test_nodes_of_unknown_speed_are_refused() -> None:
    with pytest.raises(ConfigError):
        predict(SPEC, nodes(ROOMY, ROOMY), NO_SPEEDS, 1)


def test_the_verdict_compares_what_was_measured() -> None:
    lines = report({(5, 3): 25.0, (4, 4): 20.0, (6, 2): 30.0}, {(5, 3): 18.0, (4, 4): 20.0}).splitlines()
    assert lines[2:4] == ["| 4+4 | 20.0 | 20.0 |", "| 5+3 | 25.0 | 18.0 |"]
    assert lines[-1] == "the plan's split makes 90% of the best measured one"
