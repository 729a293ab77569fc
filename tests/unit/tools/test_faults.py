"""The report of `tools.faults`: groups that run again replace their own cases only."""

from pathlib import Path

from tools.faults.case import Row, ending
from tools.faults.report import Report
from tools.faults.trial import Seen
from tools.figures import load, save


def row(group: str, done: str, *, is_kept: bool = True) -> Row:
    return Row(group, done, "every stream equal", Seen("lost once", is_kept))


def last(group: str) -> Row:
    end = ending(group)
    return Row(group, end.done, end.promised, Seen("exit codes [0, 0]", is_kept=True))


def test_a_part_that_is_run_again_replaces_the_cases_of_its_groups_and_no_others(tmp_path: Path) -> None:
    before = [
        row("kill-ar-1", "a"),
        last("kill-ar-1"),
        row("kill-ngram-1", "b"),
        last("kill-ngram-1"),
        row("stop", "c"),
    ]
    again = [row("kill-ar-1", "a", is_kept=False), last("kill-ar-1")]
    found = Report(before, 2.0, 1).with_part(Report(again, 1.0, 1))
    assert found.rows == [*again, *before[2:]] and found.repeated == ["kill"]
    save(found, tmp_path / "faults.json")
    assert load(Report, tmp_path / "faults.json") == found
    assert found.summary == "4 of 5 promises kept in 2 minutes" and "3 times" not in found.markdown()
    assert (
        "SIGTERM to the workers: exit code 0, no process, no port, no traceback left, 2 of 2 times" in found.markdown()
    )
