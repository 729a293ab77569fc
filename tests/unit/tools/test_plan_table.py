"""The table of what fits where: budgets as workers report them, plans as the planner makes them."""

from pathlib import Path

import pytest

from coordinator.planning.plan import Assignment, Plan
from tools.plan_table import cell, main, nodes_of
from worker.errors import InputError
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
    rows = [line.replace(" ", "") for line in printed]  # the widths of columns are those of all models
    assert [row for row in (line.replace(" ", "") for line in page) if row in rows] == rows
