"""The windows in which a long text is scored."""

from coordinator.engine.scores import TextWindow, windows_of


def test_each_token_but_the_first_is_scored_once_by_half_a_window_at_least() -> None:
    for size in (2, 3, 8, 9):
        for num_tokens in (2, 7, 8, 9, 50):
            windows = windows_of(num_tokens, size)
            assert [at for window in windows for at in range(window.scored, window.end)] == list(range(1, num_tokens))
            assert all(window.end - window.begin <= size for window in windows)
            assert all(window.scored - window.begin >= size / 2 for window in windows[1:])
    assert windows_of(8, 8) == [TextWindow(0, 1, 8)]
