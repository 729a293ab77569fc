"""The table of what fits where: budgets as workers report them, plans as the planner makes them."""

from pathlib import Path

import pytest

from coordinator.planning.plan import Assignment, Plan
from coordinator.planning.speeds import NO_SPEEDS, LinkSpeed
from tests.unit.planning.test_planner import GB, ROOMY, model, nodes, surveyed
from tools.plan_check import predict, report, worth_trying
from tools.plan_table import cell, main, nodes_of
from worker.errors import ConfigError, InputError
from worker.platform.machine import budget_from

GIB = 2**30


def planned(*needed_gib: float) -> Plan:
    """Five layers on each of some Macs of 64 GB."""
    assignments = [
        Assignment(mac.name, 5 * i, 5 * i + 5, int(gib * GIB), 0, mac.memory_bytes)
        for i, (mac, gib) in enumerate(zip(nodes_of((64,) * len(needed_gib)), needed_gib, strict=True))
    ]
    return Plan(tuple(assignments), 1024)


def test_the_page_has_the_rows_that_the_tool_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (mac,) = nodes_of((64,))
    assert mac.memory_bytes == budget_from({"max_recommended_working_set_size": 48 * GIB}, available=0)
    assert cell(planned(40, 43)) == "5+5" and cell(planned(45, 40, 45)) == "lacks 3.6 GiB"
    with pytest.raises(InputError, match=r"expected one of .*GLM-5.*, got 'GLM-9'"):
        main(["GLM-9"], context=16384)
    main(["Llama-3.3-70B", "gpt-oss-120b"], context=16384)
    printed = capsys.readouterr().out.splitlines()
    page = (Path(__file__).parents[3] / "docs" / "fits.md").read_text(encoding="utf-8").splitlines()
    assert len(printed) == 4
    assert [line for line in page if line in printed] == printed


SPEC = model([GB] * 8)


def test_the_best_split_on_paper_is_tried_with_its_neighbours_and_equal_parts() -> None:
    predicted = predict(SPEC, nodes(5 * GB + GB // 2, ROOMY), surveyed(SPEC, 400, 100, ports=[LinkSpeed(1)]), 1)
    assert max(predicted) == (5, 3) and predicted[5, 3] == pytest.approx(1e3 / (5 * 2.5 + 3 * 10 + 1))
    assert worth_trying(predicted) == ((5, 3), (4, 4), (3, 5))


def test_neighbours_are_tried_in_every_direction_and_compared() -> None:
    predicted = predict(SPEC, nodes(ROOMY, ROOMY, ROOMY), surveyed(SPEC, 100, 400, 100), 1)
    assert worth_trying(predicted) == ((1, 6, 1), (2, 5, 1), (3, 4, 1), (1, 5, 2), (1, 4, 3), (2, 3, 3))
    lines = report({(5, 3): 25.0, (4, 4): 20.0, (6, 2): 30.0}, {(5, 3): 18.0, (4, 4): 20.0}).splitlines()
    assert lines[2:4] == ["| 4+4 | 20.0 | 20.0 |", "| 5+3 | 25.0 | 18.0 |"]
    assert lines[-1] == "the plan's split makes 90% of the best measured one"


def test_too_few_and_too_many_nodes_and_those_of_unknown_speed_are_refused() -> None:
    for count, speeds in ((1, surveyed(SPEC, 400)), (4, surveyed(SPEC, *[400] * 4)), (2, NO_SPEEDS)):
        with pytest.raises(ConfigError):
            predict(SPEC, nodes(*[ROOMY] * count), speeds, 1)
