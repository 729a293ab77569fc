"""A session's token ids with a rolling hash of every prefix. Pure: no I/O, no MLX, no clock.

The coordinator has one per session and every stage one per slot; a window continues a slot only if the hashes agree.
The hash is 64-bit FNV-1a (Fowler, Noll, Vo) over token ids instead of bytes: one multiplication per token.
"""

from collections.abc import Iterable, Sequence

_OFFSET = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_LOW_64 = (1 << 64) - 1


class History:
    """Token ids, which are appended and cut at the end."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._hashes = [_OFFSET]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self._hashes.append(((self._hashes[-1] ^ token) * _PRIME) & _LOW_64)

    def fork(self, length: int) -> "History":
        """Return another history that continues from the first `length` tokens."""
        other = History()
        other.tokens, other._hashes = self.tokens[:length], self._hashes[: length + 1]
        return other

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.tokens[length:]
        del self._hashes[length + 1 :]

    def prefix_hash(self, length: int) -> int:
        """Return the hash of the first `length` tokens. Raises IndexError beyond the end."""
        return self._hashes[length]

    def num_shared(self, other: "History", limit: int) -> int:
        """Return how many leading tokens, at most `limit`, both histories share."""
        found = self.num_alike(other, limit)
        return found if self.tokens[:found] == other.tokens[:found] else 0  # hashes may collide

    def num_alike(self, other: "History", limit: int) -> int:
        """Return how many leading tokens, at most `limit`, both histories share according to their hashes."""
        low, high = 0, min(limit, len(self), len(other))
        while low < high:
            middle = (low + high + 1) // 2
            if self._hashes[middle] == other._hashes[middle]:
                low = middle
            else:
                high = middle - 1
        return low


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:  # ten times faster than one by one
        return shorter
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), shorter)
