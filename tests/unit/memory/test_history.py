"""The hash of a prefix: that of exactly its tokens, whatever was cut before."""

import random

import pytest

from worker.memory.history import History


def fnv_1a(tokens: list[int]) -> int:
    """As its authors write it, over token ids instead of bytes."""
    value = 14695981039346656037
    for token in tokens:
        value = (value ^ token) * 1099511628211 % 2**64
    return value


def test_a_prefix_hash_is_fnv_1a_over_its_token_ids_and_there_is_none_of_more_than_it_holds() -> None:
    for tokens in ([], [0], [97], [1, 2, 3], [151935, 0, 0, 2**32 - 1]):
        history, num_tokens = History(tokens), len(tokens)
        expected = [fnv_1a(tokens[:n]) for n in range(num_tokens + 1)]
        tokens.append(3)  # it has a copy
        assert [history.prefix_hash(n) for n in range(num_tokens + 1)] == expected
        assert history.tokens == tokens[:-1]
    history = History([1, 2, 3, 4])
    history.cut(3)
    for length in (4, 5, 100):
        with pytest.raises(IndexError):
            history.prefix_hash(length)


@pytest.mark.parametrize("seed", range(5))
def test_after_any_cuts_and_extensions_it_equals_a_fresh_history_of_its_tokens(seed: int) -> None:
    numbers = random.Random(seed)
    history, model = History(), []
    for _ in range(100):
        if model and numbers.random() < 0.4:
            length = numbers.randrange(len(model) + 1)
            history.cut(length)
            model = model[:length]
        else:
            tokens = [numbers.randrange(1000) for _ in range(numbers.randrange(5))]
            history.extend(tokens)
            model = model + tokens
        fresh = History(model)
        assert history.tokens == model
        assert len(history) == len(model)
        assert all(history.prefix_hash(n) == fresh.prefix_hash(n) for n in range(len(model) + 1))
