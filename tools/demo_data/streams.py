"""Two streams to train AR and MASK predictions at once: the clean row, then the same row with parts of it masked.

Windows follow WeDLM (arXiv 2512.22737, section 4) with two additions. Half of the blocks lose their tail instead of
random tokens, since that is what a window looks like when it verifies its guesses. And what follows an answer's end in
a block reads as more <|im_end|>, so that a window learns to stop and never sees the next question.

Canvases are blocks whose rows see each other in both directions, behind causal rows (block diffusion, arXiv
2503.09573). They begin with the answer, as in decoding, and not at multiples of their length.

Shapes: B rows, L tokens per row, N blocks per row, K tokens per block.
"""

from typing import NamedTuple

import mlx.core as mx

from tools.demo_data.tokenizer import IM_END, MASK

TAIL_SHARE = 0.5


class Streams(NamedTuple):
    """The masked stream: [B, L] what the model reads and where, what it has to predict, how much that counts.

    `mask` says who sees whom in the clean stream with the masked one behind it: [2L, 2L] or [B, 1, 2L, 2L] bool.
    """

    ids: mx.array
    positions: mx.array
    targets: mx.array
    weights: mx.array
    mask: mx.array


def make_windows(tokens: mx.array, is_answer: mx.array, block: int, key: mx.array) -> Streams:
    """Mask a random share gamma of each block's answer tokens and move them behind the block's other tokens.

    Args:
        tokens: [B, L] int32.
        is_answer: [B, L] bool, the tokens that may be masked.
        block: tokens per block, a divisor of L.
        key: random key.
    Returns:
        Streams whose weights are 1 / gamma at masked rows and 0 elsewhere.
    """
    B, L = tokens.shape
    tokens, is_answer = (x.reshape(B, L // block, block) for x in (tokens, is_answer))
    tokens, is_answer = _end_blocks(tokens, is_answer)
    is_masked, gamma = _choose(is_answer, key)
    order = mx.argsort(is_masked * block + mx.arange(block), axis=-1)
    rows = [
        mx.where(is_masked, MASK, tokens),
        mx.arange(L).reshape(1, -1, block) + mx.zeros_like(tokens),
        tokens,
        is_masked / gamma,
    ]
    noisy, positions, targets, weights = (mx.take_along_axis(x, order, axis=-1).reshape(B, L) for x in rows)
    return Streams(noisy, positions, targets, weights, window_mask(L, block))


def make_canvases(tokens: mx.array, is_answer: mx.array, length: int, key: mx.array) -> Streams:
    """Mask a random share gamma of the tokens of each canvas. Arguments and weights as of `make_windows`.

    Args:
        length: tokens of a canvas; the last one of an answer is filled up with <|im_end|> as far as its row goes.
    """
    B, L = tokens.shape
    row = mx.arange(L)[None]
    follows = mx.concatenate([mx.zeros((B, 1), mx.bool_), is_answer[:, :-1]], axis=1)
    answer = mx.cummax(mx.where(is_answer & ~follows, row, -1), axis=1)  # where the last answer began, or -1
    start = answer + (row - answer) // length * length
    last = mx.cummax(mx.where(is_answer, start, -1), axis=1)  # the last canvas that holds a part of an answer
    in_canvas = (answer >= 0) & (start == last)
    tokens = mx.where(is_answer, tokens, IM_END)
    gamma_key, order_key = mx.random.split(key)
    drawn = mx.maximum(mx.random.uniform(shape=(B, L), key=gamma_key), 1e-2)
    gamma = mx.take_along_axis(drawn, mx.maximum(start, 0), axis=1)
    is_masked = in_canvas & (mx.random.uniform(shape=(B, L), key=order_key) < gamma)
    ids, positions = mx.where(is_masked, MASK, tokens), mx.broadcast_to(row, (B, L))
    own = mx.where(in_canvas, start, -1 - row)  # rows of no canvas see themselves only
    sees_clean = (row[:, None] < mx.where(in_canvas, start, 0)[..., None]).astype(mx.bool_)
    noisy = mx.concatenate([sees_clean, own[..., None] == own[:, None]], axis=-1)
    clean = mx.concatenate([row[0][:, None] >= row, mx.zeros((L, L), mx.bool_)], axis=-1)
    mask = mx.concatenate([mx.broadcast_to(clean, (B, L, 2 * L)), noisy], axis=1)[:, None]
    return Streams(ids, positions, tokens, is_masked / gamma, mask)


def window_mask(length: int, block: int) -> mx.array:
    """Who may see whom, [2L, 2L] bool: clean rows their past, others their block so far and the clean blocks before."""
    row = mx.arange(2 * length)
    is_noisy, number = row >= length, row % length // block
    q_noisy, k_noisy, q_block, k_block = is_noisy[:, None], is_noisy[None], number[:, None], number[None]
    is_past = row[None] <= row[:, None]
    own_stream = (q_noisy == k_noisy) & is_past & (~q_noisy | (q_block == k_block))
    return own_stream | (q_noisy & ~k_noisy & (k_block < q_block))


def _end_blocks(tokens: mx.array, is_answer: mx.array) -> tuple[mx.array, mx.array]:
    """Replace all that follows an answer's <|im_end|> in its block by more of them."""
    is_end = (is_answer & (tokens == IM_END)).astype(mx.int32)
    has_ended = mx.cumsum(is_end, axis=-1) - is_end > 0
    return mx.where(has_ended, IM_END, tokens), is_answer | has_ended


def _choose(is_answer: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
    """Choose the masked tokens [B, N, K] and tell each block's gamma [B, N, 1]."""
    B, N, K = is_answer.shape
    gamma_key, tail_key, order_key = mx.random.split(key, 3)
    gamma = mx.maximum(mx.random.uniform(shape=(B, N, 1), key=gamma_key), 1e-6)
    is_tail = mx.random.uniform(shape=(B, N, 1), key=tail_key) < TAIL_SHARE
    chance = mx.where(is_tail, -mx.arange(K) / K, mx.random.uniform(shape=(B, N, K), key=order_key))
    rank = mx.argsort(mx.argsort(mx.where(is_answer, chance, 2.0), axis=-1), axis=-1)
    return rank < mx.round(gamma * is_answer.sum(-1, keepdims=True)), gamma
