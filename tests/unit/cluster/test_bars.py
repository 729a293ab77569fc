"""Progress where standard error is no terminal."""

import pytest

from coordinator.cluster import progress


def test_long_work_writes_a_line_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.show_tokens("scored", 60, done=10) as report:
        for _ in range(50):
            now += 1.0
            report(1, 20)
    assert capsys.readouterr().err.splitlines() == [
        "scored 15 of 60, 20 tok/s ...", "scored 20 of 60, 20 tok/s ...", "scored 30 of 60, 20 tok/s ...",
        "scored 50 of 60, 20 tok/s ...",
    ]  # fmt: skip


def test_short_work_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show_tokens("scored", 5) as report:
        report(5, 5)
    assert capsys.readouterr().err == ""
