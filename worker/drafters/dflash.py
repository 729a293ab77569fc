"""DFlash (z-lab's layout): a block of drafts in one pass. Its rows are the last known token and MASK tokens.

The caches hold keys and values of the model's features, row by row; the block's own are not kept.
Shapes: B slots, L block length, D hidden, C features, N rows, H heads, K head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.compute.batching import LaneWindow
from worker.compute.drafting import DraftRequest, draft_in_turn
from worker.compute.shard import run_windows
from worker.drafters.draft_head import HeadDrafter, HeadModule, ReadRows, project
from worker.memory.kv_cache import KVCache
from worker.model.model_spec import DraftHead


class DFlashModule(HeadModule):
    """Layers of Qwen3's form; their attention looks at the features and, in both directions, at the block."""

    def __init__(self, head: DraftHead) -> None:
        from mlx_lm.models.qwen3 import ModelArgs, TransformerBlock

        super().__init__()
        sizes = {"head_dim": head.head_dim, "num_hidden_layers": head.num_layers, "model_type": "qwen3"}
        args = ModelArgs.from_dict({"tie_word_embeddings": True, "rope_theta": 1e7, **head.config, **sizes})
        D, eps = head.hidden_size, args.rms_norm_eps
        self.fc = nn.Linear(head.num_taps * head.target_hidden_size, D, bias=False)
        self.hidden_norm = nn.RMSNorm(D, eps)
        self.layers = [TransformerBlock(args) for _ in range(head.num_layers)]
        self.norm = nn.RMSNorm(D, eps)
        if head.embeds:
            self.embed_tokens = nn.Embedding(args.vocab_size, D)
        self._is_causal = bool(head.config.get("causal", head.config.get("dflash_query_causal")))
        self._windows = head.windows

    def read(self, context: mx.array, caches: Sequence[KVCache]) -> None:
        """Append the keys and values of one slot's context rows [1, N, D]."""
        for layer, cache in zip(self.layers, caches, strict=True):
            cache.append(*self._keys_and_values(layer.self_attn, context, cache.length))

    def __call__(self, h: mx.array, lengths: Sequence[int], caches: Sequence[Sequence[KVCache]]) -> mx.array:
        """Return the normed output [1, sum L, D] for the embedded blocks [1, sum L, D] of several slots."""
        splits = tuple(accumulate(lengths[:-1]))
        for number, layer in enumerate(self.layers):
            x = layer.input_layernorm(h)
            blocks = x.split(splits, axis=1) if splits else [x]
            found = [
                self._attend(layer.self_attn, block, own[number], self._windows[number])
                for block, own in zip(blocks, caches, strict=True)
            ]
            h = h + (found[0] if len(found) == 1 else mx.concatenate(found, axis=1))
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        return self.norm(h)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return {name.removeprefix("model."): array for name, array in weights.items()}

    def dry_run(self, rows: mx.array, tapped: mx.array, caches: Sequence[Any]) -> mx.array:
        if "embed_tokens" in self:
            rows = self.embed_tokens(mx.zeros(rows.shape[:2], mx.int32))
        self.read(self.hidden_norm(self.fc(tapped)), caches)
        return self(rows, [rows.shape[1]], [caches])

    def _keys_and_values(self, attention: Any, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """Return keys, rotated, and values [1, H, N, K] of rows [1, N, D]."""
        shape = (1, x.shape[1], attention.n_kv_heads, -1)
        keys = attention.k_norm(attention.k_proj(x).reshape(shape)).transpose(0, 2, 1, 3)
        values = attention.v_proj(x).reshape(shape).transpose(0, 2, 1, 3)
        return attention.rope(keys, offset=offset), values

    def _attend(self, attention: Any, x: mx.array, cache: KVCache, window: int | None) -> mx.array:
        """Run attention for one slot's block [1, L, D]; every row of it sees the same context."""
        L, offset = x.shape[1], cache.length
        queries = attention.q_norm(attention.q_proj(x).reshape(1, L, attention.n_heads, -1)).transpose(0, 2, 1, 3)
        queries = attention.rope(queries, offset=offset)
        keys, values = self._keys_and_values(attention, x, offset)
        if offset:
            seen = min(offset, window - 1) if window else offset
            held: Any = cache.fetch()
            keys, values = (
                mx.concatenate([old[:, :, old.shape[2] - seen :], new], axis=2)
                for old, new in zip(held, (keys, values), strict=True)
            )
        mask = None
        if self._is_causal:
            distance = (mx.arange(L)[:, None] + keys.shape[2] - L) - mx.arange(keys.shape[2])[None]
            mask = distance >= 0
            mask = mask & (distance < window) if window else mask
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=attention.scale, mask=mask)
        return attention.o_proj(out.transpose(0, 2, 1, 3).reshape(1, L, -1))


class DFlashDrafter(HeadDrafter):
    """Drafts a block in one pass; its logits are the model's own head's."""

    def _read(self, texts: Sequence[ReadRows]) -> None:
        for text in texts:
            if text.pending:
                place = LaneWindow(text.caches, text.end - text.first, text.num_pending)
                text.caches.cut(place.base)
                _, features = text.take(place.num_rows)
                context = self._module.hidden_norm(project(features, self._part.spec))
                run_windows([place], partial(self._module.read, context))

    def _draft(self, requests: Sequence[DraftRequest], texts: Sequence[ReadRows]) -> list[mx.array]:
        self._read(texts)
        mask = self._part.spec.mask_token
        lengths = [1 + request.count for request in requests]
        ids = [token for request in requests for token in (request.tokens[-1], *[mask] * request.count)]
        h = self._module(self._embed(mx.array([ids], mx.int32)), lengths, [text.caches.own for text in texts])
        starts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
        drafted = [start + place for start, length in zip(starts, lengths, strict=True) for place in range(1, length)]
        logits = self._logits(h[:, mx.array(drafted)])
        firsts = [start - at for at, start in enumerate(starts)]  # of each slot's rows of logits

        def feed(number: int, active: Sequence[int], ids: mx.array, h: mx.array) -> mx.array:
            return logits[None, mx.array([firsts[at] + number + 1 for at in active])]  # they do not depend on drafts

        return draft_in_turn(requests, logits[None, mx.array(firsts)], lambda h: h[0], feed)
