"""What a lost worker costs, as numbers and as a table: which part is which, and what counts as too much."""

from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.bench.failover import CASES, FailoverReport, FailoverRow, LossTimes, middle, strike, times_of
from coordinator.bench.report import print_failover
from coordinator.cluster.recovery_record import Recovery
from coordinator.planning.plan import Plan
from coordinator.sessions.request import Request
from worker.errors import BrigadeError

REACHED = Recovery(Plan((), 1), lost_at=10.125, found_at=10.5, loaded_at=10.75, opened_at=11.0)
TIMES = LossTimes(
    detect_s=0.025, reopen_s=0.875, find_s=0.375, start_s=0.25, load_s=0.25, join_s=0.25, replay_s=1.0, gap_s=2.0,
    prefill_s=1.0,
)  # fmt: skip
ROW = FailoverRow("killed", "restarted", 128, TIMES, is_equal=True)


def test_each_part_of_a_loss_ends_where_the_next_one_begins() -> None:
    found = times_of(10.1, REACHED, [9.0, 10.0, 12.0, 12.25], start_s=0.25, prefill_s=1.0)
    assert found.__dict__ == pytest.approx(TIMES.__dict__)


def test_what_did_not_happen_is_unknown() -> None:
    """Neither was a process started, nor did a token come."""
    found = times_of(10.1, REACHED, [9.0], start_s=None, prefill_s=1.0)
    assert (found.start_s, found.replay_s, found.gap_s) == (None, None, None)
    row: dict[str, Any] = FailoverRow("stopped", "spare", 128, found, is_equal=True).as_json()
    assert row["start_s"] is None and row["gap_s"] is None


def test_the_gap_that_is_wanted_is_made_of_what_could_not_be_avoided() -> None:
    assert ROW.wanted_gap_s == pytest.approx(0.025 + 0.25 + 0.25 + 1.2)
    assert replace(ROW, times=replace(TIMES, start_s=None)).wanted_gap_s == pytest.approx(0.025 + 0.25 + 1.2)
    trials = [replace(TIMES, gap_s=gap_s, start_s=None) for gap_s in (9.0, 1.0, 2.0)]
    assert middle(trials) == replace(TIMES, gap_s=2.0, start_s=None), "the medians"
    [row] = FailoverReport("a machine", "demo", [4, 4], [ROW]).as_json()["rows"]
    assert (row["gap_s"], row["wanted_gap_s"]) == (2.0, pytest.approx(1.725))


def test_the_table_marks_gaps_that_were_too_long_and_other_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    print_failover(FailoverReport("a machine", "demo", [4, 4], [ROW, replace(ROW, context=256, is_equal=False)]))
    out = capsys.readouterr().out
    assert "128 killed, restarted 25 50 0.25 0.25 0.88 1.00 1.00 !2.00 1.73" in " ".join(out.split())
    legend = out[out.index("tokens: known when") :].splitlines()
    assert len(legend) > 2 and min(map(len, legend[:-1])) > 60, "lines as long as the table, and no others"
    assert "OTHER TOKENS than in the unfailed run: 256 tokens, killed, restarted" in out


class Ended:
    """An engine whose answer ends at once."""

    async def generate(self, request: Request) -> AsyncIterator[Any]:
        for _ in ():
            yield


async def test_an_answer_that_ended_before_the_worker_was_struck_is_an_error() -> None:
    engine: Any = Ended()
    worker: Any = SimpleNamespace(send_signal=pytest.fail)
    with pytest.raises(BrigadeError, match="expected an answer of 16 tokens, it ended after 0"):
        await strike(engine, Request((1,), 16), worker, CASES[0])
