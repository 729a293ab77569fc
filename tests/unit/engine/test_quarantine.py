"""Which request ends chains: tried alone, it fails alone."""

import random

import pytest

from coordinator.engine.quarantine import MOST_LOSSES, Quarantine


def test_a_request_outlives_two_losses_without_a_token_and_any_number_with_one() -> None:
    quarantine: Quarantine[str] = Quarantine()
    assert [quarantine.survives("poison", 7) for _ in range(MOST_LOSSES + 1)] == [True, True, False]
    assert all(quarantine.survives("other", known) for known in range(20))


@pytest.mark.parametrize("seed", range(20))
def test_one_poison_request_among_others_fails_and_no_other(seed: int) -> None:
    """Every chain is lost before anybody has a token, while the poison request is on it."""
    names = [*"abcdef"]
    random.Random(seed).shuffle(names)
    poison, left = names[seed % 6], list(names)
    quarantine: Quarantine[str] = Quarantine()
    running: list[str] = list(names)
    failed = []
    for _ in range(20):
        if poison not in running:
            for name in list(running):  # each gets its tokens
                following = quarantine.next_on_trial(name)
                running = [*running, following] if following else running
                running.remove(name)
                left.remove(name)
            if not running:
                break
            if poison not in running:
                continue
        for name in list(running):
            if not quarantine.survives(name, 0):
                failed.append(name)
                left.remove(name)
                quarantine.next_on_trial(name)
        running = [name for name in left if quarantine.may_run(name)]
    assert failed == [poison] and not left
