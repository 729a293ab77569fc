"""The table of what fits where: budgets as workers report them, plans as the planner makes them."""

import pytest

from coordinator.planning.plan import Assignment, Plan
from tools.plan_table import cell, main, nodes_of
from worker.errors import InputError
from worker.process.machine import budget_from

GIB = 2**30


def planned(*needed_gib: float) -> Plan:
    """Five layers on each of some Macs of 64 GB."""
    assignments = [
        Assignment(mac.name, 5 * i, 5 * i + 5, int(gib * GIB), 0, mac.memory_bytes)
        for i, (mac, gib) in enumerate(zip(nodes_of((64,) * len(needed_gib)), needed_gib, strict=True))
    ]
    return Plan(tuple(assignments), 1024)


def test_a_mac_has_the_budget_that_its_worker_would_report() -> None:
    (mac,) = nodes_of((64,))
    assert mac.memory_bytes == budget_from({"max_recommended_working_set_size": 48 * GIB}, available=0)


def test_a_cell_says_the_split_or_what_is_missing() -> None:
    assert cell(planned(40, 43)) == "5+5"
    assert cell(planned(45, 40, 45)) == "lacks 3.6 GiB"


def test_the_table_has_a_row_per_model_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    main(["Llama-3.3-70B", "Llama-3.1-405B"], context=16384)
    _, _, small, large = capsys.readouterr().out.splitlines()
    assert small == "| Llama-3.3-70B | 40 | 80 | 41+39 | 41+39 | 20+20+21+19 | ai-dynamo/aiconfigurator |"
    assert large.startswith("| Llama-3.1-405B | 228 | 126 | lacks ")


def test_a_model_without_a_file_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"expected one of .*GLM-5.*, got 'GLM-9'"):
        main(["GLM-9"], context=16384)
