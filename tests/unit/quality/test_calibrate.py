"""Thresholds for guesses of known reliability, and files of them that cannot be used."""

import json
import random
from pathlib import Path

import pytest

from coordinator.quality import calibrate
from coordinator.quality.calibrate import Guess, TaughtFill, find_thresholds, read_thresholds
from protos.brigade_pb2 import Sample
from worker.errors import InputError


def guesses(seed: int, num: int, border: float, penalty: float, good: float = 0.999, bad: float = 0.5) -> list[Guess]:
    """Guesses of one step, of which those below the border hold with probability `good`, all others with `bad`."""
    rng, found = random.Random(seed), []
    for place in range(num):
        entropy, distance = rng.random(), rng.randrange(4)
        holds = rng.random() < (good if entropy + penalty * distance < border else bad)
        found.append(Guess(entropy, distance, holds, "a", place, 0))
    return found


@pytest.mark.parametrize(("seed", "border", "penalty"), [(1, 0.4, 0.05), (2, 0.6, 0.0), (3, 0.7, 0.2)])
def test_the_threshold_of_10000_guesses_is_where_they_stop_to_hold(seed: int, border: float, penalty: float) -> None:
    every = guesses(seed, 10_000, border, penalty)
    found = find_thresholds(every[::2], every[1::2], 0.99)
    assert found is not None and found.position_penalty == penalty
    assert abs(found.entropy_threshold / border - 1) < 0.02
    kept = [guess for guess in every[1::2] if guess.entropy + penalty * guess.distance < found.entropy_threshold]
    assert (found.num, found.kept.num) == (5000, len(kept)) and found.kept.num_held == sum(each.holds for each in kept)
    assert found.kept.interval[0] >= 0.99


def test_no_threshold_is_found_where_none_holds_or_too_few_guesses_are_known() -> None:
    for good, num in ((0.97, 10_000), (1.0, 600)):
        every = guesses(4, num, 0.4, 0.0, good)
        assert find_thresholds(every[::2], every[1::2], 0.99) is None
    assert find_thresholds([], [], 0.9) is None


def test_guesses_held_out_refuse_a_threshold_that_holds_by_chance_only() -> None:
    fitted = guesses(5, 5000, 0.8, 0.0)
    assert find_thresholds(fitted, guesses(6, 5000, 0.8, 0.0), 0.99)
    assert find_thresholds(fitted, guesses(7, 5000, 0.8, 0.0, good=0.9), 0.99) is None


def test_a_reliability_below_the_agreement_is_accepted_at_most_as_often_as_the_bound_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100 tries, about 3 may pass at the border with a bound of 97.5 %: 8 would be by chance once in 200 times."""
    monkeypatch.setattr(calibrate, "PENALTIES", (0.0,))  # others only take time
    fitted = (guesses(seed, 700, 0.3, 0.0, good=0.999, bad=0.93) for seed in range(100))
    held_out = (guesses(1000 + seed, 700, 0.4, 0.0, good=0.949, bad=0.949) for seed in range(100))
    found = (find_thresholds(*halves, 0.95) for halves in zip(fitted, held_out, strict=True))
    assert sum(each is not None for each in found) <= 7


def test_guesses_are_compared_with_the_answer_which_they_do_not_change() -> None:
    taught = TaughtFill(question="a", first=4, tokens=(5, 6, 7))
    decoder = taught.make_decoder(frozenset())
    proposal = decoder.propose([0, 1, 2, 3], 1, room=3)
    guesses = [Sample(token=token, entropy=entropy) for token, entropy in ((5, 0.125), (9, 0.25), (7, 8.0))]
    assert [sample.token for sample in decoder.accept(proposal, [], guesses).samples] == [5, 6]
    assert taught.log == [
        Guess(0.125, 0, True, "a", 4, 0), Guess(0.25, 1, False, "a", 5, 0), Guess(8.0, 2, True, "a", 6, 0)
    ]  # fmt: skip
    decoder.accept(decoder.propose([0, 1, 2, 3, 5, 6], 2, room=1), [], guesses[:1])
    assert taught.log[3:] == [Guess(0.125, 0, False, "a", 6, 3)]


def test_the_best_guess_of_a_step_counts_at_every_threshold_since_the_decoder_keeps_it() -> None:
    halves = [guesses(seed, 5000, 0.4, 0.0, good=1.0) for seed in (8, 9)]
    assert find_thresholds(*halves, 0.99)
    for half in halves:
        half += [Guess(2.0, 0, False, "b", place, place) for place in range(200)]
    assert find_thresholds(*halves, 0.99) is None


def test_guesses_for_one_place_count_as_one() -> None:
    every = [Guess(0.1, 0, True, "a", place, 0) for place in range(1000)]
    assert find_thresholds(every, every, 0.99)
    often = [guess._replace(place=guess.place // 10) for guess in every]
    assert find_thresholds(often, often, 0.99) is None


def test_a_file_gives_the_threshold_and_the_penalty_of_its_kinds_only(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    path.write_text(json.dumps({"model": "a", "kinds": {"code": {"entropy_threshold": 0.25, "position_penalty": 0.1}}}))
    assert read_thresholds(path, "code") == ("a", 0.25, 0.1)
    for content, kind in ((None, "facts"), ("", "code"), ("[]", "code"), ('{"kinds": {"code": {}}}', "code")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(InputError) as refused:
            read_thresholds(path, kind)
        assert refused.value.field == "entropy_threshold"
    with pytest.raises(InputError):
        read_thresholds(tmp_path / "absent", "code")
