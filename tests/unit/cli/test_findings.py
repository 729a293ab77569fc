"""How `brigade doctor` prints its findings."""

import pytest
from rich.console import Console

from coordinator.cli.doctor import print_findings
from coordinator.deploy.findings import Finding, Kind, note, ok, problem


def test_findings_stand_below_one_heading_per_node_and_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*findings: Finding) -> list[str]:
        print_findings(findings, Console(highlight=False))
        return capsys.readouterr().out.splitlines()

    fine, remark = ok(Kind.CLOCK, "mini", "right"), note(Kind.CLOCK, "mini", "wrong")
    lines = printed(
        ok(Kind.CLOCK, "coordinator", "right"), fine, problem(Kind.MODEL, "coordinator", "no folder", "correct it")
    )
    assert [line for line in lines if line and not line.startswith(" ")][:2] == ["coordinator", "mini"]
    assert lines[2] == "  FIX  model         no folder → correct it"
    assert printed(fine)[-1] == "nothing to fix; 0 notes" and printed(remark)[-1] == "nothing to fix; 1 note"
    last = printed(remark, remark, problem(Kind.WIFI, "mini", "slow", "x"))[-1]
    assert last.startswith("1 to fix; 2 notes.")
