"""What a decoder needs beyond the last token: never less than its windows write, and no more than one of them does."""

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.decoding.decode_options import Decode
from coordinator.decoding.decoders import Decoder, DiffusionFast
from coordinator.decoding.window_lengths import WindowChooser
from coordinator.planning.costs import ChainCosts, StepCosts
from coordinator.sessions.scheduler import Scheduler
from tests.unit.fake_chain import FakeChain, Rig, costs_per_row, from_text, make_session, masked, prompt_of

WINDOWS = (1, 2, 3, 4, 5, 8, 13, 16, 21, 32, 48)
LARGE = (64, 100, 128)


def rows_beyond(num_prompt: int, max_tokens: int, decoder: Decoder, chunk: int = 256) -> int:
    """How many rows a session wrote beyond the last token that it could have known."""
    session = make_session(prompt_of(num_prompt), max_tokens, decoder=decoder, chunk=chunk)
    scheduler, chain = Scheduler(1, costs_per_row(num_stages=1)), FakeChain()
    scheduler.slots.add(session)
    while session.finish_reason is None:
        frame = scheduler.schedule()
        assert frame is not None
        chain.send(frame)
        scheduler.commit(chain.receive())
    assert session.rows_written <= session.most_rows
    return session.rows_written - num_prompt - max_tokens


@pytest.mark.parametrize("window", [*WINDOWS, *(pytest.param(window, marks=pytest.mark.matrix) for window in LARGE)])
@pytest.mark.parametrize("kind", ["diffusion", "diffusion-fast"])
def test_what_a_fixed_window_reserves_is_what_the_worst_prompt_needs(kind: str, window: int) -> None:
    """Of all prompts that share their window with a proposal, at the last token that may be said and before it."""
    make: Callable[[], Decoder] = lambda: Decode(kind, window).make_decoder(frozenset(), ChainCosts(1))  # noqa: E731
    lengths = sorted({*range(1, window + 2, max(1, window // 24)), *(64 - window // 2, 65 - window, 16, 17)} - {0})
    most = [
        rows_beyond(num_prompt, max_tokens, make())
        for num_prompt in lengths
        if num_prompt > 0
        for max_tokens in (1, window)
    ]
    assert max(most) <= make().num_ahead
    assert max(most) >= make().num_ahead - max(1, window // 24)


def test_auto_reserves_less_than_64_rows_and_a_draft_from_the_text_none() -> None:
    assert masked(WindowChooser(StepCosts()), frozenset()).num_ahead == 47
    assert from_text().num_ahead == 0
    assert [DiffusionFast(window, 0.4, 0.02, frozenset()).num_ahead for window in (4, 16, 64)] == [3, 15, 191]


@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=True))
def test_however_costs_and_company_change_auto_writes_no_row_that_was_not_reserved(numbers: random.Random) -> None:
    """Costs that jump make windows of every size, and none, from one step to the next; sessions share the frames."""
    rig, costs = Rig(num_stages=2, chunk=numbers.choice([4, 64, 256])), StepCosts()
    sessions = [
        rig.submit(
            prompt_of(numbers.choice([1, 5, 16, 17, 33, 70]), seed=seed),
            numbers.randint(1, 40),
            decoder=masked(WindowChooser(costs), frozenset()),
        )
        for seed in range(numbers.randint(1, 4))
    ]
    while any(session.finish_reason is None for session in sessions):
        for _ in range(2):
            costs.observe(numbers.choice([1, 2, 8, 32, 64, 256]), numbers.choice([0.001, 0.01, 0.1]))
        rig.step()
        assert all(session.rows_written <= session.most_rows for session in sessions)


def test_a_window_that_pays_only_in_company_is_not_added_to_a_prompt_that_came_whole() -> None:
    """Alone no window pays, so the whole prompt goes with the proposal; two of them share the frame, where one would.

    MASK rows beside 70 tokens would make windows of 256 rows.
    """
    rig, costs = Rig(num_stages=1, chunk=256), StepCosts()
    for num_rows, seconds in ((1, 0.001), (2, 0.1), (512, 0.1)):
        costs.observe(num_rows, seconds)
        costs.observe(num_rows, seconds)
    assert WindowChooser(costs).choose(1) == 0 < WindowChooser(costs).choose(2)
    decoders = [masked(WindowChooser(costs), frozenset()) for _ in range(2)]
    sessions = [rig.submit(prompt_of(70, seed=seed), 5, decoder=decoder) for seed, decoder in enumerate(decoders)]
    rig.run(*sessions)
    assert len(rig.chain.frames[0].windows) == 2
    assert all(session.rows_written <= session.most_rows for session in sessions)


def test_a_window_is_chosen_once_per_session_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is asked for: 64 sessions that decode on two stages, and then beside a long prompt."""
    num_choices = 0
    choose = WindowChooser.choose

    def count(chooser: WindowChooser, num_together: int = 1) -> int:
        nonlocal num_choices
        num_choices += 1
        return choose(chooser, num_together)

    monkeypatch.setattr(WindowChooser, "choose", count)
    rig, costs = Rig(num_stages=2, chunk=8), StepCosts()
    sessions = [
        rig.submit(prompt_of(3, seed=seed), 1000, decoder=masked(WindowChooser(costs), frozenset()))
        for seed in range(64)
    ]
    while not all(session.num_generated for session in sessions):
        rig.step()
    rig.submit(prompt_of(900), 5, decoder=masked(WindowChooser(costs), frozenset()))
    num_choices = num_windows = 0
    for _ in range(12):
        frames = rig.send_all()
        num_windows += sum(bool(window.wanted) for frame in frames for window in frame.windows)
        rig.take_one()
    assert num_windows >= 64
    assert num_choices <= num_windows + 1  # once more for the prompt, however many chunks it has sent
