"""`brigade bench --failover` as users run it: workers of its own that it kills and stops, and what it then prints."""

from pathlib import Path

import pytest

from coordinator.bench import failover
from coordinator.bench.failover import KILLED, RESTARTED, SPARE, STOPPED, Case
from coordinator.planning.recovery import Limits
from tests.cluster.commands import parse, run_here


@pytest.mark.long
def test_a_restarted_worker_and_a_spare_one_are_measured(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "CASES", [Case(KILLED, RESTARTED), Case(STOPPED, SPARE)])
    monkeypatch.setattr(failover, "USUAL", Limits(rejoin_s=50))  # a process may take long to start
    found = parse(run_here("bench", "--failover", "--model", talker, "-p", "40", "-n", "1", "--json"))
    assert found["layers"] == [2, 2]
    killed, stopped = found["rows"]
    for row in (killed, stopped):
        assert row["context"] == 40 and row["tokens_equal"] and row["prefill_s"] > 0
        assert row["reopen_s"] == pytest.approx(row["find_s"] + row["load_s"] + row["join_s"])
        assert row["gap_s"] > row["reopen_s"] + row["replay_s"]
    # tokens that were under way come while the next process starts already
    assert 0 < killed["start_s"] < killed["gap_s"] + 1.0 and stopped["start_s"] is None
    assert stopped["detect_s"] > 0.9, "a ping a second, and one to be answered"
