"""What a run of the suite says of itself: how many tests of each folder, and how long they took."""

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: Counter[str] = Counter()
    tests: dict[str, set[str]] = {}
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if isinstance(report, pytest.TestReport):
            folder = "/".join(report.nodeid.split("/")[:2])
            seconds[folder] += report.duration
            tests.setdefault(folder, set()).add(report.nodeid)
    for folder, taken in sorted(seconds.items()):
        terminalreporter.write_line(f"{folder}: {len(tests[folder])} tests, {taken:.0f} s")
