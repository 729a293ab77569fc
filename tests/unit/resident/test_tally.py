"""The tally: what it makes of requests and frames, without any chain."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.planning.plan import Assignment
from coordinator.resident.tally import Histogram, Rates, Tally
from coordinator.resident.tally_flow import Flow
from coordinator.resident.watch import Watch
from coordinator.resident.watch_log import StatusLine
from coordinator.sessions.answer import Piece, Token, Usage
from coordinator.sessions.waterfall import Moments, Passage, Route
from worker.errors import QueueFull, StageLost

TASK: Any = SimpleNamespace(request=SimpleNamespace(prompt=(1, 2, 3), decode=SimpleNamespace(kind="ngram")))
SECOND = 1_000_000_000


def piece(count: int, at: int, reason: str | None = None) -> Piece:
    usage = Usage(3, 0, 0, num_steps=4, num_rows=9, num_generated=count) if reason else None
    return Piece("x" * count, [Token(7)] * count, at, reason, usage)


def test_a_finished_answer_is_counted_by_token_and_step() -> None:
    tally = Tally()
    with tally.watch(TASK) as watched:
        watched.take(piece(2, SECOND))
        watched.take(piece(0, SECOND))
        watched.take(piece(3, 2 * SECOND, "stop"))
    assert (tally.prompt_tokens, tally.generation_tokens, dict(tally.finished)) == (3, 5, {"stop": 1})
    assert (tally.decoder_tokens["ngram"], tally.decoder_steps["ngram"]) == (5, 4)
    gaps = tally.histograms["inter_token_latency_seconds"]
    assert sum(gaps.counts) == 4 and gaps.total == pytest.approx(1.0)
    assert not tally.under_way and tally.recent[0].num_generated == 5


@pytest.mark.parametrize(
    ("error", "finished", "refused"),
    [
        (GeneratorExit(), {"abort": 1}, {}),
        (asyncio.CancelledError(), {"abort": 1}, {}),
        (StageLost("gone"), {"error": 1}, {}),
        (QueueFull("too many"), {}, {"QueueFull": 1}),
    ],
)
def test_an_answer_that_did_not_end_well_is_counted_by_reason(
    error: BaseException, finished: dict[str, int], refused: dict[str, int]
) -> None:
    tally = Tally()
    with pytest.raises(type(error)), tally.watch(TASK):
        raise error
    assert (dict(tally.finished), dict(tally.refused)) == (finished, refused)


def test_a_reader_who_leaves_after_the_last_piece_leaves_a_finished_answer() -> None:
    tally = Tally()
    with pytest.raises(GeneratorExit), tally.watch(TASK) as watched:
        watched.take(piece(1, SECOND, "length"))
        raise GeneratorExit
    assert dict(tally.finished) == {"length": 1}


def test_rates_are_of_whole_seconds_and_forget_after_two_minutes() -> None:
    rates = Rates()
    for second, count in ((10, 4), (10, 2), (12, 1), (500, 9)):
        rates.add(second, count)
    assert rates.until(13)[-3:] == [(6, 2), (0, 0), (1, 1)]
    assert rates.until(501) == [(0, 0)] * 119 + [(9, 1)]


def test_rates_count_what_is_told_after_a_later_second() -> None:
    rates = Rates()
    for second, count in ((10, 4), (11, 1), (10, 2), (11, 5)):
        rates.add(second, count)
    assert rates.until(12)[-2:] == [(6, 2), (6, 2)]
    for second in range(12, 500):
        rates.add(second, 1)
        rates.add(11, 1)
    assert rates.until(499) == [(1, 1)] * 120 and len(rates._seconds) == 121


def test_a_histogram_counts_a_bound_as_within() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([1, 1, 1], 11.5)


def frame(began: int) -> Passage:
    """Two stages that compute 10 and 20, with hops of 5; the other node's clock is 1000 ahead."""
    first = Moments(began, began, began, began + 10, began + 10, began + 10)
    second = Moments(*(1000 + began + at for at in (15, 15, 15, 30, 35, 35)))
    return Passage((first, second), returned=began + 40)


def route(*names: str) -> Route:
    return Route([Assignment(name, 0, 1, 0, 0, 0) for name in names], [0, 1000])


def test_every_moment_of_a_flow_is_in_one_part() -> None:
    flow, chain = Flow(), route("here", "there")
    flow.rest(100)
    for began in (100, 145):
        flow.take(chain, frame(began))
    assert sum(flow.parts.values()) == 185 - 100
    assert flow.parts["scheduling"] == 5 and flow.parts["wire"] == 10 and flow.parts["head + sampling"] == 10
    here, there = flow.stages
    assert (here.compute, here.busy, here.bubble) == (20, 20, 60)
    assert (there.compute, there.wire, there.bubble) == (40, 10, 40)


def test_what_passes_between_two_chains_is_recovery() -> None:
    flow = Flow()
    flow.rest(100)
    flow.take(route("here", "there"), frame(100))
    flow.take(route("here", "other"), frame(240))
    assert flow.parts["recovery"] == 100
    assert [(stage.stage, stage.worker) for stage in flow.stages] == [(0, "here"), (1, "there"), (1, "other")]


def test_a_busy_server_says_so_and_an_idle_one_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()
    line = StatusLine(tally, Watch(tally), lambda: None)
    asyncio.run(line.tell(5.0))
    assert capsys.readouterr().err == ""
    tally.generation_tokens += 10
    asyncio.run(line.tell(5.0))
    assert "answers 2.0 tok/s, running 0, waiting 0" in capsys.readouterr().err
    asyncio.run(line.tell(5.0))
    assert capsys.readouterr().err == ""
