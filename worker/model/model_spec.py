"""A model as a plan needs it: bytes per layer, cache growth, sizes. Plain numbers from describe.py."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32, Cache, DType
from worker.model.cache_spec import CacheSpec, Memory, cache_spec

MOST_DRAFTS = 63  # after one window: with the last token a window of 64 rows
DTYPE_BYTES = {DTYPE_FLOAT32: 4, DTYPE_FLOAT16: 2, DTYPE_BFLOAT16: 2}


@dataclass(frozen=True)
class LayerSpec:
    """One layer's weights, and what its caches remember: it has one, none, or several."""

    weight_bytes: int
    memories: tuple[Memory, ...] = ()
    idle_bytes: int = 0  # weights that one token does not read: experts that it is not sent to

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that one token reads."""
        return self.weight_bytes - self.idle_bytes


@dataclass(frozen=True)
class ModelSpec:
    """One model, as plain numbers."""

    name: str
    family: str
    layers: tuple[LayerSpec, ...]
    embed_bytes: int
    head_bytes: int  # final norm and, unless it is tied to the embedding, lm_head
    tied: bool
    hidden_size: int
    vocab_size: int
    context: int  # tokens
    dtype: DType
    mask_token: int | None = None  # None: no mask-trained weights
    int8_refusal: str = ""  # why caches cannot be kept in 8 bits
    rotating_refusal: str = ""  # why caches cannot drop tokens
    cache: Cache = field(default_factory=Cache)  # the kind that sessions will have
    drafter: "ModelSpec | None" = None  # a small model that drafts on the last stage

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of hidden states between two stages."""
        return self.hidden_size * DTYPE_BYTES[self.dtype]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The different layers, each once, in the order of their first one."""
        return tuple(dict.fromkeys(self.layers))

    def shard_bytes(self, start: int, end: int) -> int:
        """Return the bytes of layers [start, end), with the embedding and the head where they belong."""
        is_last = end == self.num_layers
        total = self._weight_bytes_up_to[end] - self._weight_bytes_up_to[start]
        total += self.embed_bytes if start == 0 or (is_last and self.tied) else 0
        if is_last and self.drafter:
            total += self.drafter.shard_bytes(0, self.drafter.num_layers)
        return total + (self.head_bytes if is_last else 0)

    @cached_property
    def _weight_bytes_up_to(self) -> list[int]:
        return list(accumulate((layer.weight_bytes for layer in self.layers), initial=0))

    def reserved_bytes(self, start: int, end: int, num_rows: int) -> int:
        """Return the most bytes that one session's cache of `num_rows` takes in layers [start, end)."""
        drafting = 0
        if end == self.num_layers and (drafter := self.drafter):
            drafting = drafter.reserved_bytes(0, drafter.num_layers, num_rows + MOST_DRAFTS)
        return drafting + sum(
            cache_spec(memory, self.cache).nbytes(memory, num_rows)
            for layer in self.layers[start:end]
            for memory in layer.memories
        )

    def remembered_bytes(self, layer: LayerSpec, num_rows: int) -> int:
        """Return the bytes of a layer's caches that one step of a session of `num_rows` tokens reads."""
        return sum(cache_spec(memory, self.cache).read_bytes(memory, num_rows) for memory in layer.memories)

    @property
    def recurrent_layers(self) -> list[int]:
        """The layers that have a state, which can be cut inside the last window only."""
        return [n for n, layer in enumerate(self.layers) if any(memory.state_arrays for memory in layer.memories)]

    @property
    def can_take_back(self) -> bool:
        """Whether rows of the last window can be cut, as failed drafts require."""
        memories = (memory for layer in self.layers for memory in layer.memories)
        return not any(memory.state_arrays and memory.of_embedding for memory in memories)

    @property
    def longest_chunk(self) -> int | None:
        """The most rows of a prompt chunk; None for any."""
        return min((cache.longest_chunk for cache in self._caches() if cache.longest_chunk), default=None)

    @property
    def rows_that_can_be_cut(self) -> int:
        """The length up to which all caches can be cut anywhere; longer ones can only grow."""
        lengths = [cache.rows_that_can_be_cut for cache in self._caches()]
        return min((length for length in lengths if length is not None), default=self.context)

    def _caches(self) -> Iterator[CacheSpec]:
        return (cache_spec(memory, self.cache) for layer in self.layers for memory in layer.memories)
