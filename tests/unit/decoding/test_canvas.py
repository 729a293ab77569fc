"""The pure decoder of block diffusion: which places are decided when, and when a canvas becomes known."""

from collections.abc import Sequence
from functools import partial
from math import log

import pytest

from coordinator.decoding.decoders import (
    Canvas,
    CanvasSampler,
    Proposal,
    RefinedCanvas,
    choose_certain,
    choose_confident,
    random_token,
)
from protos.brigade_pb2 import CONDITIONING_EXACT, CONDITIONING_NONE, Sample, Soft, Window
from tests.unit.decoding.fake_stage import opened
from worker.model.model_spec import CanvasTraining, Refinement

MASK = 90
EOS = frozenset({1})
TWO_STAGES = partial(choose_confident, early=0.95, late=0.8, turn=8)
CAUSAL = CanvasTraining(MASK, 4)
BLOCKS = CanvasTraining(MASK, 4, grid=4)
SHIFTED = CanvasTraining(MASK, 4, grid=4, is_shifted=True, part=2)


def guesses(*chances: float, entropies: Sequence[float] = ()) -> list[Sample]:
    """A guess per place, of this probability: place p says 10 + p, and 50 + p is likeliest."""
    return [
        Sample(token=10 + at, likeliest=50 + at, logprob=log(chance), entropy=entropies[at] if entropies else 0.0)
        for at, chance in enumerate(chances)
    ]


def canvas(training: CanvasTraining = CAUSAL, steps: int = 99, eos: frozenset[int] = EOS) -> Canvas:
    return Canvas(training, training.length, TWO_STAGES, steps, eos)


def answer(decoder: Canvas, proposal: Proposal, *chances: float) -> list[int]:
    """The tokens that become known once the rows that it asks for guess so."""
    asked = slice(proposal.guessed.start, proposal.guessed.stop)
    return [sample.token for sample in decoder.accept(proposal, [], guesses(*chances)[asked]).samples]


@pytest.mark.parametrize(
    ("step", "chances", "chosen"),
    [
        (1, (0.96, 0.85, 0.951), [0, 2]),
        (7, (0.94, 0.85), [0]),  # none is sure: the likeliest
        (8, (0.94, 0.85, 0.7), [0, 1]),
        (8, (0.1, 0.2, 0.2), [1]),
        (8, (0.1, 1e300, 0.2), [1]),  # that no distribution has, but a peer may send
    ],
)
def test_likely_places_are_chosen_and_at_least_one(step: int, chances: tuple[float, ...], chosen: list[int]) -> None:
    assert TWO_STAGES(guesses(*chances), step) == chosen


def test_places_of_least_entropy_are_chosen_while_those_before_them_stay_within_the_bound() -> None:
    found = guesses(0.5, 0.5, 0.5, 0.5, entropies=(0.5, 0.06, 0.05, 0.2))
    assert choose_certain(found, 1, 0.1, 0.4, 3) == [2, 1]
    assert choose_certain(found, 3, 0.1, 0.4, 3) == [2, 1, 3, 0]
    assert choose_certain(guesses(0.5, entropies=(9.0,)), 1, 0.0, 0.0, 1) == [0]


def test_what_is_decided_stays_and_a_whole_canvas_is_known_at_once() -> None:
    decoder = canvas()
    first = decoder.propose([7, 8], 1, 99)
    assert (first.canvas, first.num_fixed, first.step, first.verifies) == ((MASK,) * 4, 0, 1, False)
    assert answer(decoder, first, 0.5, 0.99, 0.5, 0.97) == []
    second = decoder.propose([7, 8], 0, 99)
    assert (second.canvas, second.step) == ((MASK, 11, MASK, 13), 2)
    assert answer(decoder, second, 0.99, 0.99, 0.96, 0.99) == [10, 11, 12, 13]
    assert decoder.propose([7, 8, 10, 11, 12, 13], 4, 99).canvas == (MASK,) * 4


def test_only_the_rows_from_the_first_open_place_to_the_last_candidate_guess() -> None:
    decoder = canvas()
    asked = []
    for chances in ((0.99, 0.5, 0.5, 0.99), (0.99, 0.99, 0.5, 0.99)):
        proposal = decoder.propose([7], 1, 99)
        asked.append(proposal.guessed)
        answer(decoder, proposal, *chances)
    assert asked == [range(4), range(1, 3)] and decoder.propose([7], 1, 99).guessed == range(2, 3)


def test_the_last_step_decides_the_rest_by_what_is_likeliest() -> None:
    decoder = canvas(steps=2)
    answer(decoder, decoder.propose([7], 1, 99), 0.99, 0.5, 0.5, 0.5)
    assert answer(decoder, decoder.propose([7], 0, 99), 0.99, 0.4, 0.99, 0.4) == [10, 51, 12, 53]


def test_places_after_the_first_decided_end_are_dropped_but_not_those_before_it() -> None:
    decoder = canvas(eos=frozenset({12}))
    assert answer(decoder, decoder.propose([7], 1, 99), 0.5, 0.96, 0.99, 0.5) == []
    last = decoder.propose([7], 0, 99)
    assert last.guessed == range(1) and answer(decoder, last, 0.9, 0.1, 0.1, 0.1) == [10, 11, 12]


def test_on_a_grid_the_end_of_the_prompt_is_the_first_places_of_the_canvas() -> None:
    decoder = canvas(BLOCKS)
    first = decoder.propose([5, 6, 7, 8, 9, MASK], 6, 99)
    assert (first.canvas, first.num_fixed) == ((9, MASK, MASK, MASK), 2), "a MASK of the prompt is fixed, too"
    assert answer(decoder, first, 0.99, 0.99, 0.99, 0.99) == [12, 13]


def test_a_shifted_row_says_the_next_place_part_by_part() -> None:
    decoder = canvas(SHIFTED)
    whole = decoder.propose([5, 6, 7, 8], 4, 99)
    assert not whole.canvas and whole.verifies, "the row before the canvas says its first place"
    assert decoder.accept(whole, [Sample(token=9)], []).samples == [Sample(token=9)]
    first = decoder.propose([5, 6, 7, 8, 9], 1, 99)
    assert (first.canvas, first.num_fixed, first.guessed) == ((9, MASK, MASK, MASK), 1, range(1))
    answer(decoder, first, 0.99, 0.99, 0.99, 0.99)
    second = decoder.propose([5, 6, 7, 8, 9], 1, 99)
    assert second.canvas == (9, 10, MASK, MASK), "places 2 and 3 wait for the first part"
    assert second.guessed == range(1, 3) and answer(decoder, second, 0.1, 0.99, 0.96, 0.1) == [10, 11, 12]


def test_after_a_loss_a_canvas_begins_again() -> None:
    decoder = canvas()
    answer(decoder, decoder.propose([7], 1, 99), 0.99, 0.5, 0.5, 0.5)
    decoder.rewind()
    again = decoder.propose([7], 1, 99)
    assert (again.canvas, again.step) == ((MASK,) * 4, 1)


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 21])
@pytest.mark.parametrize("training", [CAUSAL, BLOCKS, SHIFTED], ids=["causal", "blocks", "shifted"])
@pytest.mark.parametrize("chunk", [1, 6, 256])
def test_windows_keep_to_the_grid_with_each_token_once(num_prompt: int, training: CanvasTraining, chunk: int) -> None:
    session = opened(range(2, 2 + num_prompt), 11, EOS, canvas(training), chunk=chunk)
    fed: list[int] = []
    while session.finish_reason is None:
        window: Window = session.next_window()
        assert window.base == len(fed)
        fed += window.tokens
        assert len(fed) % training.grid == 0 and not (window.canvas and window.wanted)
        assert list(fed) == session.history.tokens[: len(fed)]
        assert window.base + len(window.tokens) + len(window.canvas) <= session.most_rows
        found = guesses(*[0.96] * window.guessed)
        session.commit([Sample(token=9)] * window.wanted, found)
    assert session.num_generated == 11 and session.finish_reason == "length"


REFINED = Refinement(num_steps=9, stop_entropy=0.2, stop_steps=2)
V = 40


def refined(sampler: CanvasSampler = TWO_STAGES, *, keeps: bool = True, steps: int = 9, seed: int = 5) -> RefinedCanvas:
    return RefinedCanvas(
        *(REFINED, 4, sampler, steps, EOS, seed, V), keeps=keeps, conditioning=CONDITIONING_EXACT
    )  # fmt: skip


def noise(step: int, seed: int = 5) -> list[int]:
    return [random_token(seed, place, step, V) for place in range(2, 6)]


def test_a_step_keeps_what_its_sampler_accepts_for_good_and_draws_the_rest_again() -> None:
    decoder = refined()
    first = decoder.propose([7, 8], 1, 99)
    assert (list(first.canvas), first.step, first.conditioning) == (noise(0), 1, CONDITIONING_EXACT)
    assert first.temperature == pytest.approx(0.8) and not first.verifies
    assert decoder.accept(first, [], guesses(0.5, 0.99, 0.5, 0.97)).samples == []
    second = decoder.propose([7, 8], 0, 99)
    assert list(second.canvas) == [noise(1)[0], 11, noise(1)[2], 13] and second.temperature < first.temperature
    found = decoder.accept(second, [], guesses(0.99, 0.1, 0.99, 0.1))
    assert [sample.token for sample in found.samples] == [50, 51, 52, 53], "what is likeliest, not what was kept"
    assert list(decoder.propose([7, 8, 50, 51, 52, 53], 4, 99).canvas) != noise(0)


def test_without_keeping_every_place_may_change_again() -> None:
    decoder = refined(partial(choose_certain, early=0.1, late=0.1, turn=1), keeps=False)
    decoder.accept(decoder.propose([7, 8], 1, 99), [], guesses(0.5, 0.5, 0.5, 0.5, entropies=(0.0, 9.0, 0.0, 9.0)))
    second = decoder.propose([7, 8], 0, 99)
    assert list(second.canvas) == [10, 11, 12, noise(1)[3]], "those before it stay within the bound"
    decoder.accept(second, [], guesses(0.5, 0.5, 0.5, 0.5, entropies=(9.0, 0.0, 9.0, 9.0)))
    assert list(decoder.propose([7, 8], 0, 99).canvas) == [10, 11, *noise(2)[2:]]


@pytest.mark.parametrize(("entropy", "steps"), [(0.19, 3), (0.21, 9)])
def test_a_canvas_ends_once_it_stays_and_is_sure_or_with_the_last_step(entropy: float, steps: int) -> None:
    decoder = refined(lambda guesses, step: [0], keeps=False)
    for step in range(1, steps + 1):
        proposal = decoder.propose([7], step == 1, 99)
        assert (proposal.conditioning == CONDITIONING_NONE) == (step == 9)
        found = decoder.accept(proposal, [], guesses(0.5, 0.5, 0.5, 0.5, entropies=(entropy,) * 4)).samples
        assert bool(found) == (step == steps)


def test_random_tokens_depend_on_seed_place_and_step_and_are_uniform() -> None:
    assert noise(0) != noise(1) != noise(1, seed=6)
    counts = [0] * 10
    for place in range(4000):
        counts[random_token(3, place, place % 7, 10)] += 1
    assert sum((count - 400) ** 2 / 400 for count in counts) < 27.9, "one in a thousand by chance"


def test_a_refined_canvas_begins_again_after_a_loss_and_ends_as_it_would_have() -> None:
    decoder = refined()
    decoder.accept(decoder.propose([7, 8], 1, 99), [], guesses(0.5, 0.99, 0.5, 0.97))
    decoder.rewind()
    assert decoder.propose([7, 8], 2, 99) == refined().propose([7, 8], 2, 99)


def test_what_a_step_made_of_a_canvas_goes_into_the_next_step_of_that_canvas_only() -> None:
    session, soft = opened([7, 8], 99, decoder=refined()), Soft(rows=b"soft")
    assert not session.next_window().HasField("soft")
    session.commit([], guesses(0.5, 0.99, 0.5, 0.97), soft=[soft])
    assert session.next_window().soft == soft
    session.rewind()
    session.take_slot(0)
    first = session.next_window()
    assert first.canvas_step == 1 and not first.HasField("soft"), "the canvas begins again"
    session.commit([], guesses(0.5, 0.99, 0.5, 0.97), soft=[soft])
    assert session.next_window().canvas_step == 2
    session.commit([], guesses(0.99, 0.99, 0.99, 0.99), soft=[soft])
    following = session.next_window()
    assert following.canvas_step == 1 and not following.HasField("soft"), "another canvas"
