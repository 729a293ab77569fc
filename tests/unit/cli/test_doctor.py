"""What `brigade doctor` prints of its findings."""

import pytest
from rich.console import Console

from coordinator.cli.doctor import print_findings
from coordinator.deploy.findings import Finding, Kind, note, ok, problem


def printed(capsys: pytest.CaptureFixture[str], *findings: Finding) -> list[str]:
    print_findings(findings, Console(highlight=False))
    return capsys.readouterr().out.splitlines()


def test_what_is_said_of_a_node_stands_below_one_heading(capsys: pytest.CaptureFixture[str]) -> None:
    model = problem(Kind.MODEL, "coordinator", "no folder", "correct it")
    lines = printed(capsys, ok(Kind.CLOCK, "coordinator", "right"), ok(Kind.CLOCK, "mini", "right"), model)
    assert [line for line in lines if line and not line.startswith(" ")][:2] == ["coordinator", "mini"]
    assert lines[2] == "  FIX  model         no folder → correct it"


def test_where_there_is_nothing_to_fix_no_page_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    fine, remark = ok(Kind.CLOCK, "mini", "right"), note(Kind.CLOCK, "mini", "wrong")
    assert printed(capsys, fine)[-1] == "nothing to fix; 0 notes"
    assert printed(capsys, remark)[-1] == "nothing to fix; 1 note"
    last = printed(capsys, remark, remark, problem(Kind.WIFI, "mini", "slow", "x"))[-1]
    assert last.startswith("1 to fix; 2 notes. Brigade's documentation has a page on doctor") and "/" not in last
