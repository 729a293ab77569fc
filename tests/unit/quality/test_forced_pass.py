"""Windows, and who gets which rows of them."""

import mlx.core as mx
import pytest

from coordinator.quality.replay import ForcedPass, full_windows, prompt_chunks


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 20])
def test_windows_hold_all_tokens_and_the_last_is_full(length: int) -> None:
    tokens = list(range(7))
    windows = full_windows(tokens, length)
    assert [token for window in windows for token in window] == tokens
    assert [len(window) for window in windows[1:]] == [length] * (len(windows) - 1)
    assert len(windows[-1]) == min(length, 7)


def test_chunks_hold_a_prompt_and_only_the_last_is_shorter() -> None:
    assert prompt_chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


def test_each_wanted_row_is_handed_over_with_its_own_logits() -> None:
    taken: list[tuple[int, list[list[float]]]] = []
    forced = ForcedPass([[7, 8, 9], [5]], {1, 3}, lambda row, logits: taken.append((row, logits.tolist())))  # type: ignore[arg-type]
    assert [forced.is_wanted(first, count) for first, count in ((0, 1), (0, 2), (2, 1), (2, 2))] == [0, 1, 0, 1]
    forced.hand_over(0, mx.array([[0.0, 1], [2, 3], [4, 5]]))
    forced.hand_over(3, mx.array([[6.0, 7]]))
    assert taken == [(1, [[2, 3]]), (3, [[6, 7]])]
