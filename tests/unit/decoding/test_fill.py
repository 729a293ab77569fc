"""WeDLM's decoder: which places of a window are filled, and when they become known."""

import math
import random

import mlx.core as mx
import pytest

from coordinator.decoding.decoders import DiffusionFast, Proposal, choose_fills
from coordinator.decoding.window_lengths import LENGTHS
from protos.brigade_pb2 import Sample, Sampling
from tests.unit.decoding.fake_stage import FakeStage, Guess, opened, positions, run, steps
from tests.unit.fake_chain import VOCAB, prompt_of
from worker.compute.header import num_rows
from worker.compute.sampling import Sampler

# W=4, tau=0.4, lambda=0.02, prompt of 5; `t7` is the token chosen for position 7. Each row: the window's tokens and the
# positions of its MASK rows, its base, the entropies by position, what became known by it, what is filled ahead after.
TABLE = [
    ("p4", [5, 6, 7, 8], 4, {5: 0.10, 6: 0.50, 7: 0.37, 8: 0.36}, "t5", ""),
    ("t5", [6, 7, 8, 9], 5, {6: 0.45, 7: 0.60, 8: 0.50, 9: 0.20}, "", "t9"),
    ("t9", [6, 7, 8], 6, {6: 0.30, 7: 1.07, 8: 0.38}, "t6", "t9"),
    ("t6 t9", [7, 8, 10], 6, {7: 1.07, 8: 0.90, 10: 0.39}, "", "t9 t10"),
    ("t9 t10", [7, 8], 7, {7: 1.07, 8: 1.08}, "t7", "t9 t10"),
    ("t7 t9 t10", [8, 11], 7, {8: 1.08, 11: 1.11}, "t8 t9 t10", ""),
    ("t8 t9 t10", [11, 12, 13, 14], 8, {11: 0.0, 12: 9.0, 13: 9.0, 14: 9.0}, "t11", ""),
]


def test_the_windows_and_fills_of_wedlm_are_those_of_the_table() -> None:
    """research/diffusion.md section 7; a filled leading run is known at once, and the prompt's last token is fused."""

    def name(token: int, position: int) -> str:
        return f"p{position}" if position < 5 else f"t{token - 100}"

    decoder = DiffusionFast(4, 0.4, 0.02, frozenset())
    session = opened([0, 1, 2, 3, 4], 50, decoder=decoder)
    entropies: dict[int, float] = {}
    stage = FakeStage(lambda position: (100 + position, entropies[position]))
    chunk = session.next_window()
    assert list(chunk.tokens) == [0, 1, 2, 3] and not (chunk.wanted or chunk.masks)
    session.commit(*stage.answer(chunk))
    for tokens, masks, base, given, known, ahead in TABLE:
        entropies = given
        num_known = 5 + len(session.generated)
        window = session.next_window()
        at, num_tokens = positions(window), len(window.tokens)
        named = [name(token, position) for token, position in zip(window.tokens, at, strict=False)]
        assert " ".join(named) == tokens
        assert at[num_tokens : num_tokens + window.guessed] == masks
        assert window.base == base and not window.wanted
        assert masks[0] == num_known  # what is known reaches to the leftmost MASK
        new = session.commit(*stage.answer(window))
        assert " ".join(f"t{sample.token - 100}" for sample in new) == known
        assert " ".join(f"t{token - 100}" for _, token in decoder.propose([0] * 99, 0, 1).fills) == ahead


@pytest.mark.parametrize(
    ("at", "entropies", "threshold", "penalty", "chosen"),
    [
        ([5, 6, 7, 8], [0.10, 0.50, 0.37, 0.36], 0.4, 0.02, [0]),  # .37 + .04 and .36 + .06 both miss
        ([5, 6, 7, 8], [0.10, 0.50, 0.37, 0.36], 0.43, 0.02, [0, 2, 3]),
        ([5, 6, 7, 8], [0.10, 0.50, 0.37, 0.36], 0.4, 0.0, [0, 2, 3]),
        ([7, 8, 10], [1.07, 0.90, 0.39], 0.4, 0.02, [2]),  # none is below: the best one
        ([7, 8], [1.07, 1.08], 0.4, 0.02, [0]),
        ([7, 9], [0.5, 0.45], 0.0, 0.02, [1]),
        ([7, 9], [0.5, 0.47], 0.0, 0.02, [0]),  # by distance, not by row: .47 + .04
        ([3, 4], [0.7, 0.7], 0.0, 0.0, [0]),  # the leftmost of equals
        ([3, 4], [0.4, 0.4], 0.4, 0.0, [0]),  # below means below
        ([3], [99.0], 0.4, 0.02, [0]),
    ],
)
def test_what_is_filled_is_what_is_sure_and_near_or_else_the_best(
    at: list[int], entropies: list[float], threshold: float, penalty: float, chosen: list[int]
) -> None:
    assert choose_fills(at, entropies, threshold, penalty) == chosen


def test_the_entropy_of_a_guess_is_that_of_the_raw_logits_in_nats() -> None:
    """Before temperature, filters, penalties and bias (WeDLM's engine, sampler.py)."""

    def entropy(logits: list[float], sampling: Sampling | None = None) -> float:
        draws = Sampler(sampling or Sampling())(mx.array([logits]), [0], [2], [1], entropy=True)
        return draws.to_samples(0)[0].entropy

    inf = math.inf
    for logits, expected in (
        ([0.3] * 97, math.log(97)), ([0.0, 200.0, 0.0], 0.0), ([math.log(3), 0.0, -inf], 0.562335),
        ([0.0, 0.0, -inf], math.log(2)),
    ):  # fmt: skip
        assert entropy(logits) == pytest.approx(expected, abs=1e-5)
    changed = Sampling(temperature=0.3, top_k=2, top_p=0.5, repetition_penalty=2.0, logit_bias={1: 9.0})
    assert entropy([0.0, 1.0, 2.0, -1.0], changed) == entropy([0.0, 1.0, 2.0, -1.0])


def random_guess(numbers: random.Random, certainty: float) -> Guess:
    return lambda position: (numbers.randrange(VOCAB), numbers.expovariate(certainty))


@pytest.mark.parametrize("seed", range(60))
def test_what_holds_of_every_run_of_wedlm(seed: int) -> None:
    numbers = random.Random(seed)
    W, N = numbers.choice([1, 2, 3, 4, 7, 8, 16, 32]), numbers.randint(1, 60)
    threshold = numbers.choice([0.0, 0.2, 0.8, 3.0])
    prompt = prompt_of(numbers.randint(1, 90), seed)
    session = opened(prompt, N, decoder=DiffusionFast(W, threshold, 0.02, frozenset()), chunk=numbers.choice([8, 256]))
    base, filled, num_steps = 0, {}, 0
    for step in steps(session, FakeStage(random_guess(numbers, numbers.choice([0.3, 3.0])))):
        window, at = step.window, positions(step.window)
        num_tokens = len(window.tokens)
        assert window.base >= base, "a base went back"
        base = window.base
        if step.is_chunk:
            continue
        assert num_rows(window) in LENGTHS
        num_steps += 1
        known = len(step.before)
        assert at[: step.num_unfed] == list(range(base, known)), "known tokens come first, in order"
        ahead = dict(zip(at[step.num_unfed : num_tokens], window.tokens[step.num_unfed :], strict=True))
        assert list(ahead) == sorted(ahead) and ahead == filled, "what is filled stays as it is"
        masks = at[num_tokens : num_tokens + window.guessed]
        assert masks == sorted(masks) and masks[0] == known, "the leftmost place that is not known is a MASK"
        assert sorted([*ahead, *masks]) == list(range(known, known + min(W, len(prompt) + N - known)))
        assert step.num_asked <= 2 * W
        entropies = [guess.entropy for guess in step.guesses]
        chosen = choose_fills(masks, entropies, threshold, 0.02)
        assert chosen, "at least one is filled"
        filled = ahead | {masks[row]: step.guesses[row].token for row in chosen}
        run_ = []
        while known + len(run_) in filled:
            run_.append(filled.pop(known + len(run_)))
        assert step.new == run_, "committed from the left, as soon as it is whole"
    assert len(session.generated) == N and session.finish_reason == "length"
    assert num_steps <= N + W + 1


def test_a_threshold_that_all_pass_fills_a_window_per_step() -> None:
    session = opened(prompt_of(8), 64, decoder=DiffusionFast(16, 1e9, 0.02, frozenset()))
    found = [len(step.new) for step in run(session, FakeStage(lambda at: (at % VOCAB, 1.0)))]
    assert [n for n in found if n] == [16] * 4
    assert session.generated == [at % VOCAB for at in range(8, 72)]


def test_a_filled_end_of_sequence_ends_the_window_there_and_one_further_left_wins() -> None:
    """Nothing behind it is worth a row (tail-drop), and the session does not end before all ahead of it is filled."""
    eos = 7
    entropy = {5: 0.5, 6: 0.6, 7: 0.0, 8: 0.7}
    session = opened([1], 40, frozenset({eos}), DiffusionFast(8, 0.1, 0.0, frozenset({eos})))
    stage = FakeStage(lambda at: (eos if at == 7 else 20, entropy.get(at, 0.9)))
    found = run(session, stage)
    masks = [positions(s.window)[len(s.window.tokens) :][: s.window.guessed] for s in found]
    assert masks[0] == list(range(1, 9))
    assert masks[1] == [1, 2, 3, 4, 5, 6]
    assert all(max(at) < 7 for at in masks[1:])
    assert session.generated == [20] * 6 + [eos] and session.finish_reason == "stop"
    session = opened([1], 40, frozenset({eos}), DiffusionFast(4, 0.1, 0.0, frozenset({eos})))
    entropies = iter([{1: 0.9, 2: 0.8, 3: 0.8, 4: 0.0}, {1: 0.9, 2: 0.0, 3: 0.8}, {1: 0.0}])
    now: dict[int, float] = {}
    stage = FakeStage(lambda at: (eos if at in (2, 4) else 20, now[at]))
    while session.finish_reason is None:
        now = next(entropies)
        session.commit(*stage.answer(session.next_window()))
    assert session.generated == [20, eos]


def test_fills_after_the_first_filled_end_of_sequence_are_dropped() -> None:
    decoder, eos = DiffusionFast(8, 0.1, 0.0, frozenset({7})), 7
    guesses = [Sample(token=token, entropy=0.0 if at > 1 else 0.9) for at, token in enumerate([5, 5, 5, eos, 5, eos])]
    decoder.accept(Proposal(masks=tuple(range(1, 7))), [], guesses)
    assert [(at, sample.token) for at, sample in decoder.fills] == [(3, 5), (4, eos)]
