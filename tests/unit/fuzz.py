"""What the fuzz tests share: bytes that are nearly right, how many of them, and what reading them may take."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import settings
from hypothesis import strategies as st

_USUAL = 100  # examples that hypothesis takes by default; `--hypothesis-profile=long` takes more
ODD_INTS = st.sampled_from([-1, 0, 1, 2, 127, 2**31, 2**32 - 1, 2**32, 2**53, 2**63, 2**64, 10**400])
ODD_NUMBERS = ODD_INTS | st.sampled_from([0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")])


def fuzzed(examples: int) -> settings:
    """So many examples, always the same; under the profile `long` many more, and always others."""
    times = settings.default.max_examples // _USUAL  # type: ignore[union-attr]
    return settings(max_examples=times * examples, deadline=None, derandomize=times == 1, database=None)


@st.composite
def nearly(draw: st.DrawFn, sound: bytes) -> bytes:
    """These bytes with some changed, cut out, put in or repeated."""
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 8))
        piece = draw(st.binary(max_size=8) | st.just(bytes(data[at : at + 40])))
        data[at : at + length] = piece
    return bytes(data)


def with_one_bit_flipped(sound: bytes) -> Iterator[bytes]:
    for at in range(len(sound)):
        for bit in range(8):
            yield sound[:at] + bytes([sound[at] ^ 1 << bit]) + sound[at + 1 :]


@contextmanager
def within(num_bytes: int) -> Iterator[None]:
    """Fails if Python objects took more than so many bytes at any moment meanwhile."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= num_bytes
    finally:
        tracemalloc.stop()
