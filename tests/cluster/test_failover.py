"""`brigade bench --failover` as users run it: workers of its own that it kills and stops, and what it then says."""

import json
from pathlib import Path

import pytest

from coordinator.bench import failover
from coordinator.bench.failover import KILLED, RESTARTED, SPARE, STOPPED, Case
from tests.cluster.commands import run_here


def test_it_measures_a_worker_that_is_restarted_and_one_whose_place_a_spare_takes(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "CASES", [Case(KILLED, RESTARTED), Case(STOPPED, SPARE)])
    done = run_here("bench", "--failover", "--model", talker, "-p", "40", "-n", "1", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["layers"] == [2, 2]
    killed, stopped = found["rows"]
    for row in (killed, stopped):
        assert row["context"] == 40 and row["tokens_equal"]
        assert row["reopen_s"] == pytest.approx(row["find_s"] + row["load_s"] + row["join_s"])
        assert row["gap_s"] > row["reopen_s"] + row["replay_s"]
        assert row["prefill_s"] > 0
    assert 0 < killed["start_s"] < killed["gap_s"] and stopped["start_s"] is None
    assert stopped["detect_s"] > 0.9, "a ping a second, and one to be answered"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "2,2"], "--layers: not expected with --failover"),
        (["--local", "0"], "--local: expected at least one worker, which is lost, got 0"),
        (["-p", "8"], "--num-prompt: expected 9 to 39992 tokens for"),
    ],
)
def test_what_it_cannot_lose_is_refused_at_once(talker: Path, flags: list[str], message: str) -> None:
    done = run_here("bench", "--failover", "--model", talker, *flags)
    assert done.code == 2 and message in done.err
