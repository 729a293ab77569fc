"""A model as a plan needs it: bytes per layer, cache growth, sizes. Plain numbers from describe.py."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Any

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32, Cache, DType
from worker.model.cache_spec import ROW_BLOCK, CacheSpec, Memory, cache_spec

MOST_DRAFTS = 63  # after one window: with the last token a window of 64 rows
HEAD_BYTES = 1 << 26  # of float32 logits that exist at the same time
_HEAD_ARRAYS = 9  # of their size while a canvas is drawn: measured, 6.5 to 8.5
MOST_PENDING = 512  # rows of windows without drafts that wait until a draft head reads them together
DTYPE_BYTES = {DTYPE_FLOAT32: 4, DTYPE_FLOAT16: 2, DTYPE_BFLOAT16: 2}


class HeadKind(StrEnum):
    """What a draft head computes."""

    MTP = "mtp"  # layers like the model's own, on its last hidden state and the next token's embedding
    DFLASH = "dflash"  # a block of drafts in one pass, on features of several layers (z-lab)
    EAGLE3 = "eagle3"  # one layer, on features of several layers (arXiv 2503.01840)


@dataclass(frozen=True)
class DraftHead:
    """A draft head, as plan and drafter need it."""

    kind: HeadKind
    config: Mapping[str, Any]  # the flat part of its config.json
    num_layers: int
    hidden_size: int  # its own
    target_hidden_size: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = ()  # rows that each of its layers looks back; None: all
    num_taps: int = 0  # layers of the model whose outputs it reads; 0: it reads what the final norm returns
    own_taps: tuple[int, ...] = ()  # those layers, if its configuration names them
    norms_features: bool = False  # EAGLE-3: an RMSNorm over all tapped outputs stands before `fc`
    embeds: bool = False  # has an embedding of its own
    block_size: int | None = None  # DFlash: the most rows of a block, one of which is the last known token
    mask_token: int | None = None  # DFlash

    @property
    def num_features(self) -> int:
        """Numbers that a row between stages carries for it: the sum over taps and, for the norm, one of squares."""
        return self.hidden_size + self.norms_features if self.num_taps else 0

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the tapped layers of a model of so many; by default EAGLE-3's: an early, a middle and a late one."""
        if self.own_taps or not self.num_taps:
            return self.own_taps
        return (1, num_layers // 2 - 1, num_layers - 4)


@dataclass(frozen=True)
class Refinement:
    """How a canvas is sampled whose places may all change at every step, as the reference does it.

    Rows of a canvas begin with what the step before made of their places (self-conditioning).
    """

    num_steps: int = 48  # at most, per canvas
    hottest: float = 0.8  # the temperature of the first step; it falls linearly towards that after the last
    coldest: float = 0.4
    entropy_bound: float = 0.1  # nats
    stop_entropy: float = 0.005  # nats on average, below which a canvas that stays as it is ends
    stop_steps: int = 1  # for which its likeliest tokens must have stayed
    not_text: frozenset[int] = frozenset()  # token ids that stand for parts of images

    def temperature(self, step: int, num_steps: int) -> float:
        """Return the temperature of a step, from 1."""
        return self.coldest + (self.hottest - self.coldest) * ((num_steps - step + 1) / num_steps)


@dataclass(frozen=True)
class CanvasTraining:
    """How a checkpoint was trained to denoise the places of a canvas together."""

    noise: int | None  # the token id of a place that is not decided: MASK; None: a random token, drawn at each step
    length: int  # places of a canvas
    grid: int = 1  # a token row sees to the end of its block of so many rows, counted from the text's start; 1: causal
    is_shifted: bool = False  # a row predicts the next place, as in one-token decoding, instead of its own
    part: int | None = None  # places that are decided before the ones after them; None: all of the canvas
    refinement: Refinement | None = None  # None: a place that is decided stays so

    @property
    def is_causal(self) -> bool:
        """Whether known tokens are committed as in one-token decoding."""
        return self.grid == 1


@dataclass(frozen=True)
class LayerSpec:
    """One layer's weights, and what its caches remember: it has one, none, or several."""

    weight_bytes: int
    memories: tuple[Memory, ...] = ()
    idle_bytes: int = 0  # weights that one token does not read: experts that it is not sent to
    num_products: int = 0  # multiplications per row by weights
    num_attended: int = 0  # multiplications per row and token that attention looks back to without a window

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
    canvas: CanvasTraining | None = None  # None: not trained for block diffusion
    quantised_refusal: str = ""  # why caches cannot be kept in 8 or 4 bits
    rotating_refusal: str = ""  # why caches cannot drop tokens
    cache: Cache = field(default_factory=Cache)  # the kind that sessions will have
    drafter: "ModelSpec | None" = None  # that drafts where tokens are sampled: a small model, or a draft head
    head: DraftHead | None = None  # if this is a draft head itself

    @property
    def draft_head(self) -> DraftHead | None:
        """The drafter, if it is a draft head."""
        return self.drafter.head if self.drafter else None

    @property
    def drafts(self) -> bool:
        """Whether the drafter drafts, and is not only a part that reads layers for one on another node."""
        return self.drafter is not None and self.drafter.num_layers > 0

    def drafting_elsewhere(self) -> "ModelSpec":
        """Return the model for nodes that compute prompts for another one, which drafts."""
        drafter = self.drafter and replace(self.drafter, layers=(), head_bytes=0)
        return replace(self, drafter=drafter)

    @property
    def most_drafts(self) -> int:
        """The most drafts after one window; 0 without a drafter."""
        if not self.drafter:
            return 0
        head = self.drafter.head
        return min(MOST_DRAFTS, head.block_size - 1) if head and head.block_size else MOST_DRAFTS

    @property
    def num_features(self) -> int:
        """Numbers that a row between two stages carries beside the hidden state, for a draft head."""
        return self.draft_head.num_features if self.draft_head else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row between two stages."""
        return (self.hidden_size + self.num_features) * DTYPE_BYTES[self.dtype]

    @property
    def soft_row_bytes(self) -> int:
        """Bytes that the expected embedding of a canvas row takes on its way back; 0 if decided places stay."""
        return self.hidden_size * DTYPE_BYTES[self.dtype] if self.refines else 0

    @property
    def refines(self) -> bool:
        """Whether all places of a canvas may change at every step."""
        return self.canvas is not None and self.canvas.refinement is not None

    def is_text(self, token: int) -> bool:
        """Return whether a prompt may have this token id, which stands for no part of an image."""
        refinement = self.canvas and self.canvas.refinement
        return not refinement or token not in refinement.not_text

    @property
    def needs_canvas(self) -> bool:
        """Whether it was trained for block diffusion only, as far as is known."""
        return self.canvas is not None and (not self.canvas.is_causal or self.refines)

    @property
    def step_rows(self) -> int:
        """Rows of one step of an answer: one token, or all of a canvas if it can decode nothing less."""
        return self.canvas.length if self.canvas and self.needs_canvas else 1

    @property
    def serves_head(self) -> bool:
        """Whether the drafter is a draft head that uses the model's embedding, and mostly its head."""
        head = self.draft_head
        return self.drafts and head is not None and not (head.kind is HeadKind.EAGLE3 and head.embeds)

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
        total += self.embed_bytes if self.has_embedding(start, end, serves_head=self.serves_head) else 0
        if self.drafter and self.has_drafting(start, end):
            total += self.drafter.shard_bytes(0, self.drafter.num_layers if is_last else 0)
        return total + (self.head_bytes if is_last else 0)

    def token_bytes(self, start: int, end: int) -> int:
        """Return the bytes of the shard [start, end) that a token reads: of an embedding that is no head, one row."""
        is_head = self.tied and end == self.num_layers
        is_idle = self.has_embedding(start, end, serves_head=self.serves_head) and not is_head
        return self.shard_bytes(start, end) - (self.embed_bytes if is_idle else 0)

    def has_embedding(self, start: int, end: int, *, serves_head: bool) -> bool:
        """Return whether the shard [start, end) holds the embedding; a draft head on the last stage needs it there."""
        return start == 0 or (end == self.num_layers and (self.tied or serves_head))

    def has_drafting(self, start: int, end: int) -> bool:
        """Return whether the shard [start, end) needs a part of the drafter: all of it, or what reads its layers."""
        taps = self.draft_head.taps(self.num_layers) if self.draft_head else ()
        return (self.drafts and end == self.num_layers) or any(start <= tap < end for tap in taps)

    @cached_property
    def _weight_bytes_up_to(self) -> list[int]:
        return list(accumulate((layer.weight_bytes for layer in self.layers), initial=0))

    def reserved_bytes(self, start: int, end: int, num_rows: int) -> int:
        """Return the most bytes that one session's cache of `num_rows` takes in layers [start, end)."""
        drafting = 0
        if end == self.num_layers and self.drafts and (drafter := self.drafter):
            drafting = drafter.reserved_bytes(0, drafter.num_layers, num_rows + MOST_DRAFTS)
            if head := drafter.head:
                row_bytes = (head.num_features or head.hidden_size) * DTYPE_BYTES[self.dtype]
                drafting += (MOST_PENDING + ROW_BLOCK) * row_bytes
        return drafting + sum(cache.nbytes(memory, num_rows) for cache, memory in self._caches(start, end))

    def segment_row_bytes(self, start: int, end: int) -> int:
        """Return the bytes of one token in those caches of layers [start, end) that are sent token by token.

        Of others a snapshot is sent at the end of a prompt. For a draft head the last node sends its rows, too.
        """
        output_bytes = self.row_bytes if self.draft_head and end == self.num_layers else 0
        return self._segment_bytes_up_to[end] - self._segment_bytes_up_to[start] + output_bytes

    @cached_property
    def _segment_bytes_up_to(self) -> list[int]:
        layers = [[(cache_spec(each, self.cache), each) for each in layer.memories] for layer in self.layers]
        sent = (sum(cache.row_bytes(m) for cache, m in each if cache.rows_that_can_be_cut is None) for each in layers)
        return list(accumulate(sent, initial=0))

    @property
    def largest_snapshot_bytes(self) -> int:
        """The most bytes of one cache's snapshot."""
        return max((cache.snapshot_bytes(memory) for cache, memory in self._caches()), default=0)

    def snapshot_bytes(self, start: int, end: int) -> int:
        """Return the most bytes that one snapshot of a session takes in layers [start, end)."""
        return sum(cache.snapshot_bytes(memory) for cache, memory in self._caches(start, end))

    def scratch_bytes(self, end: int) -> int:
        """Return the bytes that drawing the rows of a canvas takes on a stage that ends with layer `end`.

        Other windows have few rows: the headroom of a node's budget is enough for them.
        """
        if self.canvas is None or end < self.num_layers:
            return 0
        return _HEAD_ARRAYS * 4 * self.vocab_size * min(self.canvas.length, most_head_rows(self.vocab_size))

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
        return not any(memory.state_arrays and memory.of_embedding for _, memory in self._caches())

    @property
    def longest_chunk(self) -> int | None:
        """The most rows of a prompt chunk; None for any."""
        return min((cache.longest_chunk for cache, _ in self._caches() if cache.longest_chunk), default=None)

    @property
    def rows_that_can_be_cut(self) -> int:
        """The length up to which all caches can be cut anywhere; longer ones can only grow."""
        lengths = [cache.rows_that_can_be_cut for cache, _ in self._caches()]
        return min((length for length in lengths if length is not None), default=self.context)

    def _caches(self, start: int = 0, end: int | None = None) -> Iterator[tuple[CacheSpec, Memory]]:
        """Yield the caches of layers [start, end), each with what it remembers."""
        memories = (memory for layer in self.layers[start:end] for memory in layer.memories)
        return ((cache_spec(memory, self.cache), memory) for memory in memories)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model's part of a configuration that has one, as those of models with images do; else {}."""
    found = config.get("text_config")
    return found if isinstance(found, dict) else {}


def most_head_rows(vocab_size: int) -> int:
    """Return how many rows go through the head at once."""
    return max(1, HEAD_BYTES // (4 * vocab_size))
