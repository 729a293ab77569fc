"""Pack: the keys and values that several slots have in one layer, in one buffer, so that attention runs once for all.

Each slot has a row of the buffer and fills it from the left: its length is its own, and cutting it moves a number. A
pack is made when slots first step together and lasts as long as the same ones do; then each takes its rows back.
"""

from collections.abc import Sequence

import mlx.core as mx

from worker.memory.cache import KVCache


def packed(members: Sequence[KVCache], capacity: int, like: tuple[mx.array, mx.array]) -> "Pack":
    """The pack of just these members; made anew if they have none. `like` are keys and values [B, H, L, K] to come."""
    pack = members[0].pack
    if isinstance(pack, Pack) and pack.capacity == capacity and pack.members == list(members):
        return pack
    return Pack(members, capacity, like)


class Pack:
    """One buffer [B, H, capacity, K] of keys and one of values; row i belongs to `members[i]`."""

    def __init__(self, members: Sequence[KVCache], capacity: int, like: tuple[mx.array, mx.array]) -> None:
        """Take the members' rows in; packs that they come from are dissolved."""
        self.members = list(members)
        self.capacity = capacity
        held = [member.held_rows() for member in members]
        self.keys, self.values = (
            _filled([rows and rows[which] for rows in held], capacity, new) for which, new in enumerate(like)
        )
        self.nbytes = (self.keys.nbytes + self.values.nbytes) // len(members)  # of one; a number: other threads ask
        for member in members:
            if member.pack is not None:
                member.pack.dissolve(besides=members)
        for member in members:
            member.lend(self)

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    def rows_of(self, member: KVCache) -> tuple[mx.array, mx.array]:
        """A member's keys and values [1, H, length, K]."""
        row = self.members.index(member)
        return self.keys[row : row + 1, :, : member.length], self.values[row : row + 1, :, : member.length]

    def update(self, keys: mx.array, values: mx.array, rows: mx.array) -> None:
        """Write [B, H, L, K] at `rows` [B, 1, L, 1] of each member."""
        self.keys = mx.put_along_axis(self.keys, rows, keys, axis=2)
        self.values = mx.put_along_axis(self.values, rows, values, axis=2)
        for member in self.members:
            member.length += keys.shape[2]

    def dissolve(self, besides: Sequence[object] = ()) -> None:
        """Give the members their rows back, at once: whatever still waits for this buffer would keep all of it.

        Those of `besides` have no more use for them.
        """
        owners = [member for member in self.members if not any(member is other for other in besides)]
        for member in owners:
            member.take_back(*self.rows_of(member))
        mx.async_eval([array for member in owners for array in member.arrays()])
        self.members = []  # or the buffer would live until Python finds the cycle


def _filled(rows: Sequence[mx.array | None], capacity: int, like: mx.array) -> mx.array:
    buffer = mx.zeros((len(rows), like.shape[1], capacity, like.shape[3]), like.dtype)
    for row, held in enumerate(rows):
        if held is not None:
            buffer[row : row + 1, :, : held.shape[2]] = held
    return buffer
