"""The few lengths that windows have, so that what they cost is soon known. Pure."""

from functools import cache

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 256)  # rows


def largest_within(num_rows: int) -> int:
    """The largest length that needs no more than `num_rows` rows, which is at least 1."""
    return max(length for length in LENGTHS if length <= num_rows)


def padded(num_rows: int) -> int:
    """The smallest length that holds `num_rows` rows."""
    return next((length for length in LENGTHS if length >= num_rows), num_rows)


def mask_count(num_tokens: int, wanted: int) -> int:
    """How many MASK rows make a full window with `num_tokens` token rows: about `wanted`, more than half of it.

    With half of it windows would never grow: as many tokens as the masks yield make the next window.
    """
    rows = largest_within(num_tokens + wanted)
    return (rows if rows - num_tokens > wanted // 2 else padded(num_tokens + wanted)) - num_tokens


@cache
def most_masks(wanted: int) -> int:
    """The most MASK rows that a window about `wanted` gets, with as many token rows at most."""
    return max(mask_count(num_tokens, wanted) for num_tokens in range(1, wanted + 1))


@cache
def most_padding(num_rows: int) -> int:
    """The most rows that are added to so many, or to fewer, to make one of the lengths."""
    return max(padded(rows) - rows for rows in range(1, num_rows + 1))
