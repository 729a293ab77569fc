"""Which request ends chains: tried alone, it fails alone."""

import random

import pytest

from coordinator.sessions.quarantine import MOST_LOSSES, Suspects


def test_a_request_outlives_two_losses_without_a_token_and_any_number_with_one() -> None:
    suspects: Suspects[str] = Suspects()
    assert [suspects.lost_under("poison", 7) for _ in range(MOST_LOSSES + 1)] == [True, True, False]
    assert all(suspects.lost_under("other", known) for known in range(20))


@pytest.mark.parametrize("seed", range(20))
def test_one_poison_request_among_others_fails_and_no_other(seed: int) -> None:
    """Every chain is lost before anybody has a token, while the poison request is on it."""
    names = [*"abcdef"]
    random.Random(seed).shuffle(names)
    poison, left = names[seed % 6], list(names)
    suspects: Suspects[str] = Suspects()
    running: list[str] = list(names)
    failed = []
    for _ in range(20):
        if poison not in running:
            for name in list(running):  # each gets its tokens
                following = suspects.next_tried(name)
                running = [*running, following] if following else running
                running.remove(name)
                left.remove(name)
            if not running:
                break
            if poison not in running:
                continue
        for name in list(running):
            if not suspects.lost_under(name, 0):
                failed.append(name)
                left.remove(name)
                suspects.next_tried(name)
        running = [name for name in left if suspects.may_run(name)]
    assert failed == [poison] and not left
