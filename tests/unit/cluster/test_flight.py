"""When a frame is overdue, and that a node that slept or stood still is told so and blames no other."""

import asyncio

import pytest

from coordinator.cluster import step_timeouts as flight
from coordinator.cluster.step_timeouts import ArrivedResult, Flight, SuspendWatch
from coordinator.planning.costs import ChainCosts
from protos.brigade_pb2 import Frame, Result, Timing, Window
from worker.errors import StageLost

SILENCE_S, FIRST_S = 6.0, 60.0


class Clock:
    """The monotonic clock, and for how long the machine has slept; both moved by hand."""

    def __init__(self) -> None:
        self.now, self.asleep = 1000.0, 5_000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)

    def pass_s(self, seconds: float, *, asleep: bool = False) -> None:
        """The monotonic clock stands still while the machine sleeps."""
        self.now += 0 if asleep else seconds
        self.asleep += seconds if asleep else 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(flight, "time", made)
    monkeypatch.setattr(flight, "asleep_s", lambda: made.asleep)
    return made


@pytest.fixture
def flying(clock: Clock) -> Flight:
    return Flight(ChainCosts(2), SuspendWatch())


def chunk(step: int) -> Frame:
    return Frame(step=step, windows=[Window(tokens=[0] * 64)])


def pass_one(flying: Flight, clock: Clock, step: int, took_s: float) -> None:
    """On two stages; the first has half of it."""
    began = clock.monotonic_ns()
    flying.send(chunk(step))
    clock.now += took_s
    middle, end = began + int(took_s * 5e8), clock.monotonic_ns()
    timings = [Timing(stage=0, started=began, sampled=middle), Timing(stage=1, started=middle, sampled=end)]
    flying.learn(ArrivedResult(Result(step=step, timings=timings), clock.monotonic_ns(), flying.take(step)))


def test_the_second_chunk_of_a_slow_chain_has_the_time_of_the_first(flying: Flight, clock: Clock) -> None:
    pass_one(flying, clock, 1, 20.0)
    flying.send(chunk(2))
    allowed_s = pytest.approx(SILENCE_S + 30)
    assert flying.left_s == allowed_s
    clock.now += 25
    assert flying.overdue() is None
    clock.now += 12
    assert flying.overdue() == (37, allowed_s)


def test_an_engine_that_began_late_has_its_own_time(flying: Flight, clock: Clock) -> None:
    pass_one(flying, clock, 1, 0.0)
    flying.send(chunk(2))
    clock.now += 6.5
    assert flying.overdue() == (6.5, SILENCE_S)
    flying.began(2.5)
    assert flying.overdue() is None and flying.left_s == 3.5
    clock.now += 3.5
    assert flying.overdue() == (SILENCE_S, SILENCE_S), "it is not given more time for having been asked"


def test_what_began_before_a_frame_says_nothing_of_it(flying: Flight, clock: Clock) -> None:
    flying.send(chunk(1))
    flying.began(100.0)
    assert flying.left_s == 2.0, "then it is said to compile"
    clock.now += FIRST_S
    assert flying.overdue() == (FIRST_S, FIRST_S)


def test_a_long_step_is_not_said_to_compile_before_its_usual_time_is_over(clock: Clock) -> None:
    flying = Flight(ChainCosts(1, {64: [4.0]}), SuspendWatch())
    flying.send(chunk(1))
    clock.now += 7.9
    assert not flying.begins_to_compile() and flying.left_s == pytest.approx(0.1)
    clock.now += 0.2
    assert flying.begins_to_compile() and not flying.begins_to_compile()
    pass_one(Flight(ChainCosts(2), SuspendWatch()), clock, 2, 0.0)
    assert flying.left_s > 30, "it may take a minute"


@pytest.mark.parametrize("asleep", [False, True])
def test_a_process_that_stood_still_says_so_and_only_for_a_while(clock: Clock, asleep: bool) -> None:
    """One that is only busy blames the node that is at fault."""
    watched = SuspendWatch()
    for _ in range(20):
        clock.pass_s(3)
        assert watched.blame() is None and watched.woke_at == 0
    clock.pass_s(12, asleep=asleep)
    error = watched.blame()
    assert error is not None and "stood still for 12 s" in str(error) and error.node == ""
    assert watched.woke_at == clock.now
    blamed = []
    for _ in range(11):
        clock.pass_s(3)
        blamed.append(watched.blame() is not None)
    assert blamed == [True] * 10 + [False]


@pytest.mark.parametrize(
    ("still_s", "asleep", "is_lost"),
    [(4, True, False), (5, True, False), (6, True, True), (9000, True, True), (12, False, False)],
)
def test_only_a_machine_that_slept_drops_its_peers(clock: Clock, still_s: float, asleep: bool, is_lost: bool) -> None:
    watched = SuspendWatch()

    async def watch() -> None:
        async with asyncio.timeout(0.01):
            await watched.watch()

    clock.pass_s(still_s, asleep=asleep)
    with pytest.raises(StageLost if is_lost else TimeoutError, match=f"for {still_s} s" if is_lost else None):
        asyncio.run(watch())
    assert is_lost or asleep or watched.woke_at == clock.now


def test_a_first_stage_that_drafts_beside_a_prompt_makes_no_hop_slow(clock: Clock) -> None:
    """Both stages compute for 10 ms, and the first one reads for its drafter for 40 ms in between."""
    costs = ChainCosts(2)
    flying = Flight(costs, SuspendWatch())
    flying.send(chunk(1))
    clock.now += 0.06
    began, ms = clock.monotonic_ns() - 60_000_000, 1_000_000
    timings = [
        Timing(stage=0, started=began, sampled=began + 10 * ms, drafted=began + 50 * ms),
        Timing(stage=1, started=began + 50 * ms, sampled=began + 60 * ms, drafted=began + 60 * ms),
    ]
    flying.learn(ArrivedResult(Result(step=1, timings=timings), clock.monotonic_ns(), flying.take(1)))
    assert costs.hops_s(64) == pytest.approx(0, abs=1e-6)


def test_what_a_frame_loses_that_begins_to_draft_is_learned_apart_from_its_rows_and_drafts(clock: Clock) -> None:
    """A step of one row takes 10 ms, the drafts 4 ms; 25 ms more go to steps that were computed ahead for nothing."""
    costs = ChainCosts(1)
    flying = Flight(costs, SuspendWatch())

    def pass_one_row(
        step: int, took_s: float, drafting_s: float = 0.0, *, num_tokens: int = 1, drafts: int = 0
    ) -> None:
        flying.send(Frame(step=step, windows=[Window(tokens=[0] * num_tokens, wanted=num_tokens, to_draft=drafts)]))
        began = clock.monotonic_ns()
        clock.now += took_s
        sampled = clock.monotonic_ns() - int(drafting_s * 1e9)
        timing = Timing(started=began, sampled=sampled, drafted=clock.monotonic_ns())
        flying.learn(ArrivedResult(Result(step=step, timings=[timing]), clock.monotonic_ns(), flying.take(step)))

    for step in range(12):
        pass_one_row(step, 0.010)
    assert costs.drafting.start_s(1) == 0
    for step in range(12, 16):
        pass_one_row(step, 0.039, 0.004, drafts=3)
    assert costs.drafting.start_s(1) == pytest.approx(0.025, abs=1e-3) and costs.drafting.seconds(3, 1) < 0.005
    for step in range(16, 64):
        pass_one_row(step, 0.039, 0.004, drafts=3)
    assert costs.steps.seconds(1) == pytest.approx(0.010, abs=1e-3), "however many frames begin to draft"
    for step in range(64, 96):  # drafting goes on: what such a step costs is known by its rows
        pass_one_row(step, 0.5, 0.004, num_tokens=4, drafts=3)
    assert costs.drafting.start_s(1) == pytest.approx(0.025, abs=1e-3)
