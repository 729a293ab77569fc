"""Rows of logits, tokens drawn from them, and the noise that draws them, computed by numpy."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from protos.brigade_pb2 import Sampling
from worker.compute.sampling import Sampler, random_key

VOCAB = 97
ALL_FILTERS = {"top_p": 0.9, "top_k": 20, "min_p": 0.02}


def logits_of(seed: int) -> mx.array:
    """[1, V]; spread so that every filter has something to keep and something to drop."""
    return mx.array(np.random.default_rng(seed).normal(scale=1.5, size=(1, VOCAB)).astype(np.float32))


def in_rows(
    sampling: Sampling, logits: mx.array, positions: Sequence[int], allowed: mx.array | None = None
) -> list[int]:
    """The tokens of all rows drawn at once."""
    drawn = Sampler(sampling)(mx.array(logits), positions, [], [0] * len(positions), allowed=allowed)
    return list(map(int, np.array(drawn.tokens)))


def numpy_gumbel(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Gumbel noise from the bits of Threefry-2x32 (Salmon et al., 2011), laid out as MLX does: half by half."""
    half, key = -(-vocab_size // 2), random_key(seed, position)
    ks = [key >> 32, key % 2**32, (key >> 32) ^ (key % 2**32) ^ 0x1BD11BDA]
    counts = np.arange(2 * half, dtype=np.uint64).reshape(2, half)
    if vocab_size % 2:
        counts[1, -1] = 0
    x, y = (counts[0] + ks[0]) % 2**32, (counts[1] + ks[1]) % 2**32
    for i in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = (x + y) % 2**32
            y = x ^ ((y << np.uint64(by) | y >> np.uint64(32 - by)) % 2**32)
        x, y = (x + ks[(i + 1) % 3]) % 2**32, (y + ks[(i + 2) % 3] + i + 1) % 2**32
    uniform = np.concatenate([x, y])[:vocab_size] / 2**32
    return -np.log(-np.log1p(-np.clip(uniform, 2.0**-33, 1 - 2.0**-24)))
