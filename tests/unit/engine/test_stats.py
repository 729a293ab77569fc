"""Statistics of requests and frames, without any chain."""

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from coordinator.cluster.log import log_as_json
from coordinator.engine.caller import ARRIVED
from coordinator.engine.stats import StageTimes, Stats, TokenRates
from coordinator.engine.status import ClusterStatus, StatusLog, log_request
from coordinator.planning.plan import Assignment
from coordinator.sessions.output import Output, Token, Usage
from coordinator.sessions.waterfall import Moments, Passage, Route
from protos.brigade_pb2 import StatusReply
from tests.unit.engine.test_status import FakeEngine
from worker.errors import QueueFull, StageLost

TASK: Any = SimpleNamespace(prompt=(1, 2, 3), decode=SimpleNamespace(kind="ngram"))
SECOND = 1_000_000_000


def piece(count: int, at: int, reason: str | None = None, num_steps: int = 1) -> Output:
    usage = Usage(3, 0, 0, num_steps=4, num_rows=9, num_generated=count) if reason else None
    return Output("x" * count, [Token(7)] * count, at, reason, usage, num_steps=num_steps)


def test_a_finished_answer_is_counted_by_token_and_step() -> None:
    stats = Stats()
    request = stats.begin(TASK)
    request.take(piece(2, SECOND, num_steps=3))
    request.take(piece(0, SECOND, num_steps=3))
    request.take(piece(3, 2 * SECOND, "stop", num_steps=4))
    request.end()
    assert (stats.total("prompt_tokens"), stats.total("generation_tokens")) == (3, 5)
    assert stats.counts("request_success") == {"stop": 1}
    assert stats.counts("decoder_tokens") == {"ngram": 5} and stats.counts("decoder_steps") == {"ngram": 4}
    assert stats.registry.get_sample_value("brigade_inter_token_latency_seconds_count") == 4
    assert stats.registry.get_sample_value("brigade_inter_token_latency_seconds_sum") == pytest.approx(1.0)
    assert stats.rates.until(3)[-2:] == [(2, 3), (3, 1)]
    assert not stats.under_way and stats.recent[0].num_generated == 5


def test_drafts_are_counted_by_place_the_far_ones_together() -> None:
    stats = Stats()
    for tried, held in (((4, 4, 3), (4, 2, 0)), ((2,) * 20, (1,) * 18 + (0,) * 2), ((), ())):
        request = stats.begin(TASK)
        usage = Usage(3, 0, 0, num_steps=4, num_rows=9, num_drafts=tried, num_drafts_held=held)
        request.take(Output("x", [Token(7)], SECOND, "stop", usage))
        request.end()
    places = [f"ngram{place}" for place in (*range(1, 16), "16+")]
    assert stats.counts("drafts") == dict(zip(places, [6, 6, 5, *[2] * 12, 10], strict=True))
    assert stats.counts("drafts_held") == dict(zip(places, [5, 3, *[1] * 13, 3], strict=True))


@pytest.mark.parametrize(
    ("error", "finished", "refused"),
    [
        (GeneratorExit(), {"abort": 1}, {}),
        (asyncio.CancelledError(), {"abort": 1}, {}),
        (StageLost("gone"), {"error": 1}, {}),
        (QueueFull("too many"), {}, {"QueueFull": 1}),
    ],
)
def test_failed_answers_have_a_reason(error: BaseException, finished: dict[str, int], refused: dict[str, int]) -> None:
    stats = Stats()
    stats.begin(TASK).end(error)
    assert (stats.counts("request_success"), stats.counts("requests_rejected")) == (finished, refused)
    stats = Stats()
    request = stats.begin(TASK)
    request.take(piece(1, SECOND, "length"))
    request.end(GeneratorExit())  # its reader leaves after the last piece
    assert stats.counts("request_success") == {"length": 1}


def test_the_cost_of_an_answer_that_is_left_counts() -> None:
    stats = Stats()
    request = stats.begin(TASK)
    request.take(piece(1, request.started + SECOND))
    usage = Usage(3, 0, 2, 4, 9, num_recoveries=1, begun=request.started + 5, num_drafts=(3,), num_drafts_held=(1,))
    request.end(GeneratorExit(), usage)
    [left] = stats.recent
    assert (left.num_steps, left.num_reused, left.num_recoveries, left.queue_s) == (4, 2, 1, 5e-9)
    assert stats.counts("drafts") == {"ngram1": 3} and stats.total("prefix_cache_hits") == 2


def test_rates_are_of_whole_seconds_in_any_order_and_forget_after_two_minutes() -> None:
    rates = TokenRates()
    for second, count in ((10, 4), (12, 1), (10, 2), (500, 9)):
        rates.add(second, count)
        if second == 10 and count == 2:
            assert rates.until(13)[-3:] == [(6, 2), (0, 0), (1, 1)]
    assert rates.until(501) == [(0, 0)] * 119 + [(9, 1)]
    for second in range(600, 1100):
        rates.add(second, 1)
        rates.add(second - 121, 1)
    assert rates.until(1100) == [(1, 1)] * 120


def frame(began: int) -> Passage:
    """Two stages that compute 10 and 20, with hops of 5; the other node's clock is 1000 ahead."""
    first = Moments(began, began, began, began + 10, began + 10, began + 10, began + 10)
    second = Moments(*(1000 + began + at for at in (15, 15, 15, 30, 35, 35, 35)))
    return Passage((first, second), returned=began + 40)


def route(*names: str) -> Route:
    return Route([Assignment(name, 0, 1, 0, 0, 0) for name in names], [0, 1000])


def test_every_moment_of_a_flow_is_in_one_part() -> None:
    times, chain = StageTimes(), route("here", "there")
    times.rest(100)
    for began in (100, 145):
        times.take(chain, frame(began))
    assert sum(times.parts.values()) == 185 - 100
    assert times.parts["scheduling"] == 5 and times.parts["wire"] == 10 and times.parts["head + sampling"] == 10
    here, there = times.totals
    assert (here.compute, here.busy, here.bubble) == (20, 20, 60)
    assert (there.compute, there.wire, there.bubble) == (40, 10, 40)
    times.take(chain, frame(150))  # computed from 150 to 160 and from 165 to 185: half of the first beside the last one
    assert [(stage.compute, stage.busy) for stage in times.totals] == [(30, 25), (60, 45)]


def test_utilisation_is_of_the_last_ten_seconds_of_the_present_chain() -> None:
    def frame_of(began: int, took: int) -> Passage:
        """Both stages compute for this time, one after the other, with hops of no time."""
        ends = (began + took, began + 2 * took)
        first, second = (Moments(*[end - took] * 3, *[end] * 4) for end in ends)
        return Passage((first, Moments(*(1000 + at for at in second))), returned=ends[1])

    def busy(at: int) -> list[float]:
        return [round(share, 6) for share in times.utilisation(at).values()]

    times, chain = StageTimes(), route("here", "there")
    assert times.utilisation(SECOND) == {}
    times.take(chain, frame_of(20 * SECOND, SECOND))
    assert busy(22 * SECOND) == [0.1, 0.1], "of ten seconds, of which it was idle for eight"
    assert busy(33 * SECOND) == busy(300 * SECOND) == [0, 0]
    times.take(chain, frame_of(300 * SECOND, 4 * SECOND))
    assert busy(308 * SECOND) == [0.4, 0.4], "one frame after a long rest"
    for number in range(4):
        times.take(chain, frame_of(308 * SECOND + number * SECOND // 10, SECOND // 20))
    assert busy(309 * SECOND) == [0.42, 0.42]
    assert busy(330 * SECOND) == [0, 0], "the last frames are not of the present for ever"
    for number in range(100):
        times.take(chain, frame_of(400 * SECOND + number * SECOND // 5, SECOND // 10))
    assert busy(420 * SECOND) == pytest.approx([0.5, 0.5], abs=0.03)
    times.take(route("here", "other"), frame_of(420 * SECOND, SECOND // 2))
    assert times.utilisation(421 * SECOND) == {"here": 0.05, "other": 0.05}, "another chain begins anew"


def test_a_frame_that_a_busy_node_has_not_read_waits_and_is_not_on_the_wire() -> None:
    times, chain = StageTimes(), route("here", "there")
    times.take(chain, frame(100))  # the second node encodes until 135
    times.take(chain, frame(115))  # sent to it at 125, read at 130
    here, there = times.totals
    assert (there.wire, there.queue, there.hops, there.num_hops) == (5, 5, 5, 1)
    assert (here.wire, here.queue, here.hops, here.num_hops) == (0, 0, 0, 0), (
        "later frames tell what the first node did meanwhile"
    )
    times.take(chain, frame(136))  # the first result left at 135 and was read at 140, the second one from 150 to 155
    times.take(chain, frame(200))
    assert (here.wire, here.queue, here.hops, here.num_hops) == (5 - 4 + 5 + 5, 4, 10, 2)


def test_what_passes_between_two_chains_is_recovery() -> None:
    times = StageTimes()
    times.rest(100)
    times.take(route("here", "there"), frame(100))
    times.take(route("here", "other"), frame(240))
    assert times.parts["recovery"] == 100
    assert [(stage.stage, stage.worker) for stage in times.totals] == [(0, "here"), (1, "there"), (1, "other")]


def test_a_chain_that_ended_on_purpose_is_not_recovered_from() -> None:
    times = StageTimes()
    times.rest(100)
    times.take(route("here", "there"), frame(100))
    times.end_chain()  # the model was unloaded
    times.take(route("here", "there"), frame(240))
    assert (times.parts["recovery"], times.parts["scheduling"]) == (0, 100)


def test_a_request_begins_when_it_arrives() -> None:
    """It may wait for the model to be loaded before the engine gets it."""
    came = time.monotonic_ns() - 9 * SECOND
    token = ARRIVED.set(came)
    try:
        stats = Stats()
        request = stats.begin(TASK)
    finally:
        ARRIVED.reset(token)
    stats.stages.take(route("here", "there"), frame(came + 8 * SECOND))
    usage = Usage(3, 0, 0, num_steps=1, num_rows=3, begun=came + 8 * SECOND)
    request.take(Output("x", [Token(7)], came + 8 * SECOND, "stop", usage))
    request.end()
    [ended] = stats.recent
    assert (ended.queue_s, ended.first_token_s) == (8, 8) and ended.total_s >= 9
    assert ended.parts_ms["scheduling"] == 8000 and sum(ended.parts_ms.values()) <= 1000 * ended.total_s


def test_a_busy_server_says_so_and_an_idle_one_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stats = Stats()
    line = StatusLog(stats, ClusterStatus(stats), lambda: None)
    asyncio.run(line.log(5.0))
    assert capsys.readouterr().err == ""
    stats.counters["generation_tokens"].inc(10)
    asyncio.run(line.log(5.0))
    assert "answers 2.0 tok/s, running 0, waiting 0" in capsys.readouterr().err
    asyncio.run(line.log(5.0))
    assert capsys.readouterr().err == ""


def test_nodes_beside_the_chain_are_idle_or_lost_and_requests_without_a_slot_wait() -> None:
    def peer(reply: Any) -> Any:
        return SimpleNamespace(address="a:1", peer=SimpleNamespace(status=AsyncMock(side_effect=[reply])))

    stats, running, waiting = Stats(), *(SimpleNamespace(**vars(TASK)) for _ in range(2))
    for request in (running, waiting):
        stats.begin(request)
    here, *others = (Assignment(name, 0, 1, 0, 0, 0) for name in ("here", "idle", "silent", "gone"))
    plan = SimpleNamespace(assignments=[here])
    workers = {"idle": peer(StatusReply()), "silent": peer(StageLost("silent"))}
    workers["gone"] = SimpleNamespace(address="", peer=None)
    engine: Any = FakeEngine(
        cluster=SimpleNamespace(
            chain=SimpleNamespace(plan=plan, own_status=StatusReply(), epoch=3),
            nodes=SimpleNamespace(workers=workers),
            outside=others,
            trouble="",
        ),
        scheduler=SimpleNamespace(slots=SimpleNamespace(reserved=[0])),
        sessions=[
            SimpleNamespace(request=running, slot=0, num_prompt_computed=2),
            SimpleNamespace(request=waiting, slot=None, num_prompt_computed=0),
        ],
    )
    found = asyncio.run(ClusterStatus(stats).look(engine))
    assert {node.name: node.state for node in found.nodes} == {
        "here": "active", "idle": "idle", "silent": "lost", "gone": "lost"
    }  # fmt: skip
    assert [(each.state, each.prompt_computed) for each in found.requests] == [("running", 2), ("waiting", 0)]


@pytest.mark.parametrize(
    ("error", "level"),
    [(None, "info"), (GeneratorExit(), "info"), (StageLost("gone"), "warning"), (QueueFull("too many"), "warning")],
)
def test_failures_are_warnings(error: BaseException | None, level: str, capsys: pytest.CaptureFixture[str]) -> None:
    request = Stats(log_request).begin(TASK)
    if error is None:
        request.take(piece(1, SECOND, "stop"))
    with log_as_json(True):
        request.end(error)
    assert json.loads(capsys.readouterr().err)["level"] == level
