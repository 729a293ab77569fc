"""What commands print on a terminal of 60 columns: no figure and no word is broken."""

import re

import pytest
from rich.console import Console

from coordinator.cli.doctor import print_findings
from coordinator.cli.nodes import node_table
from coordinator.deploy.discovery import AnnouncedNode, found_nodes
from coordinator.deploy.findings import Finding, Kind, note, ok, problem
from tests.unit.deploy.test_discovery import HERE, about, cluster

WIDTH = 60


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COLUMNS", str(WIDTH)), ("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)


def lines(text: str) -> list[str]:
    """Of a terminal, without its colours; all within its width."""
    found = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    assert max(map(len, found)) <= WIDTH
    return found


@pytest.mark.usefixtures("narrow")
def test_findings(capsys: pytest.CaptureFixture[str]) -> None:
    start = "from here: brigade launch mini --config cluster.yaml"
    print_findings(
        [ok(Kind.MACHINE, "air", "fine"), problem(Kind.UNREACHABLE, "mini", "no one is there", start)], Console()
    )
    shown = lines(capsys.readouterr().out)
    assert shown[:4] == ["air", "  ok   machine       fine", "", "mini"]
    filled = [line for line in shown if line.startswith("  FIX") or line.startswith(" " * 21)]
    assert " ".join(line[21:] for line in filled) == f"no one is there → {start}" and len(filled) == 2


def shown_nodes(*heard: AnnouncedNode, configured: tuple[tuple[str, str], ...] = ()) -> list[str]:
    console = Console(width=WIDTH)
    with console.capture() as shown:
        console.print(node_table(found_nodes(list(heard), cluster(*configured), HERE), "cluster.yaml", WIDTH))
    return lines(shown.get())


def test_nodes() -> None:
    address = "[2001:db8:1234:5678:9abc:def0:1234:5678]:50070"  # stays whole beside a long name
    assert address in " ".join(shown_nodes(AnnouncedNode(about("the-macbook-pro-of-the-office"), (address,)))).split()
    mini = AnnouncedNode(about("mini", fingerprint="ab" * 32), ("169.254.10.2:50070", "192.168.100.27:50070"))
    air = AnnouncedNode(about("air"), ("169.254.10.3:50070",))
    shown = shown_nodes(mini, air, configured=(("mini", "169.254.10.2:50070"),))
    assert [line.split() for line in shown] == [
        ["node", "version", "address", "reached", "by"],
        ["mini", "0.1.0", "169.254.10.2:50070", "–"],
        ["192.168.100.27:50070", "–"],
        ["air", "0.1.0", "169.254.10.3:50070", "–"],
        [],
        ["node", "certificate", "in", "cluster.yaml"],
        ["mini", "abababababababab", "yes"],
        ["air", "none", "no"],
    ]


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
    assert last.startswith("1 to fix; 2 notes. Brigade's documentation has a page on doctor") and "/" not in last
