"""How much memory one layer's cache of one session takes, and where it can be cut. Plain numbers.

A layer's `Memory` and the session's choice of a `Cache` determine a `CacheSpec`, which the plan, admission and the
caches use. A new kind of cache is a new `Form` and a class in worker/memory/.
"""

from dataclasses import dataclass
from enum import Enum

from protos.brigade_pb2 import CACHE_INT4, CACHE_INT8, CACHE_ROTATING, Cache

QUANTISED_BITS = {CACHE_INT8: 8, CACHE_INT4: 4}
ROW_BLOCK = 256  # rows by which a cache grows
WINDOW_CHUNK = 1024  # most rows of a prompt chunk for a sliding cache: 32 per expert if 4 of 128 are chosen
MOST_SNAPSHOTS = 8  # per slot
MOST_SNAPSHOT_BYTES = 8 << 20  # of one cache that nodes send to each other
MOST_CANVAS = WINDOW_CHUNK // 2  # places: a finished canvas and the next one share one window
_DOUBLING = 4096  # rows up to which a cache's capacity doubles; beyond, so much padding would be expensive


@dataclass(frozen=True)
class Memory:
    """The contents of one cache of a layer: keys and values of all or the last `window` positions, or a constant state.

    Sizes are those of the model's own caches.
    """

    window: int | None = None
    heads: int = 0
    key_size: int = 0  # numbers per head
    value_size: int = 0
    item: int = 2  # bytes per number
    state_arrays: int = 0  # number of arrays of a state, which has no rows
    state_bytes: int = 0
    of_embedding: bool = False  # used by the embedding, so that no layer can replay it

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * (self.key_size + self.value_size) * self.item


class Form(Enum):
    """The form in which a `Memory` is stored."""

    WHOLE = "keys and values in the model's dtype"
    QUANTISED = "keys and values in fewer bits"
    STATE = "a state, which has no rows"


def group_size(key_size: int, value_size: int) -> int:
    """Return how many numbers of a head share a scale when quantised; mlx-lm's attention takes one size for both."""
    return 64 if key_size % 64 == value_size % 64 == 0 else 32


@dataclass(frozen=True)
class CacheSpec:
    """One layer's cache. With a `window` a query sees the first `keep` and the last `window` tokens, with itself."""

    form: Form
    window: int | None = None  # None: unlimited
    keep: int = 0
    bits: int = 0  # per number, if quantised

    @property
    def can_be_packed(self) -> bool:
        """Whether its rows can share a buffer with other slots."""
        return self.form is Form.WHOLE and self.window is None

    @property
    def longest_chunk(self) -> int | None:
        """The most rows of a prompt chunk; None: any. A sliding cache has room for its window and one chunk."""
        return None if self.window is None else WINDOW_CHUNK

    @property
    def rows_that_can_be_cut(self) -> int | None:
        """The length up to which it can be cut anywhere; None: any. A longer cache can only grow."""
        if self.form is Form.STATE:
            return 0
        return None if self.window is None else self.keep + self.window - 1  # after one more no query sees the first

    def snapshot_bytes(self, memory: Memory) -> int:
        """Return the most bytes of a snapshot, which copies whatever a cut cannot restore."""
        if self.form is Form.STATE:
            return memory.state_bytes
        return 0 if self.window is None else (self.keep + self.window) * self.row_bytes(memory)

    def capacity(self, num_rows: int) -> int:
        """Return the largest capacity of its buffer, in rows, after `num_rows` have been written."""
        if self.form is Form.STATE:
            return 0
        if self.can_be_packed:
            return pack_capacity(num_rows)
        if self.window is None:
            return whole_blocks(num_rows)
        return min(whole_blocks(num_rows), whole_blocks(self.keep + self.window - 1 + WINDOW_CHUNK))

    def widths(self, memory: Memory) -> list[tuple[int, ...]]:
        """Return the last dimension of each stored array of keys, and of values: packed words, scales and biases."""
        sizes = (memory.key_size, memory.value_size)
        if self.form is not Form.QUANTISED:
            return [(size,) for size in sizes]
        group = group_size(*sizes)
        return [(size * self.bits // 32, size // group, size // group) for size in sizes]

    def row_bytes(self, memory: Memory) -> int:
        """Return the bytes of one token; quantised groups have a scale and a bias in the model's dtype."""
        if self.form is not Form.QUANTISED:
            return memory.row_bytes
        widths = self.widths(memory)
        return memory.heads * sum(words * 4 + (scales + biases) * memory.item for words, scales, biases in widths)

    def read_bytes(self, memory: Memory, num_rows: int) -> int:
        """Return the bytes that one step reads after `num_rows` have been written: everything that a query sees."""
        seen = num_rows if self.window is None else min(num_rows, self.keep + self.window)
        return memory.state_bytes + seen * self.row_bytes(memory)

    def nbytes(self, memory: Memory, num_rows: int) -> int:
        """Return the most bytes that it takes after `num_rows` have been written."""
        num_states = 1 if memory.of_embedding else 2  # the second one precedes the last window
        return num_states * memory.state_bytes + self.capacity(num_rows) * self.row_bytes(memory)


def cache_spec(memory: Memory, cache: Cache) -> CacheSpec:
    """Return the cache of a layer with this memory, in the kind that the session chose."""
    if memory.state_arrays:
        return CacheSpec(Form.STATE)
    if cache.kind in QUANTISED_BITS:
        return CacheSpec(Form.QUANTISED, memory.window, bits=QUANTISED_BITS[cache.kind])
    if cache.kind == CACHE_ROTATING:
        recent = cache.size - cache.keep
        return CacheSpec(Form.WHOLE, min(recent, memory.window or recent), 0 if memory.window else cache.keep)
    return CacheSpec(Form.WHOLE, memory.window)


def whole_blocks(num_rows: int, block: int = ROW_BLOCK) -> int:
    """Round a number of rows up to whole blocks."""
    return -(-num_rows // block) * block


def pack_capacity(num_rows: int) -> int:
    """Return the capacity in rows of a cache that can be packed, which is equal for caches of similar length.

    It is at most twice the length up to 4,096 rows, and at most a quarter more beyond.
    """
    capacity = ROW_BLOCK
    while capacity < num_rows:
        capacity *= 2
    return capacity if capacity <= _DOUBLING else whole_blocks(num_rows, capacity // 8)
