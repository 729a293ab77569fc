"""Heads that draft one token after another: MTP (Qwen3.5, Qwen3-Next) and EAGLE-3.

A row pairs what the model made of a token with the embedding of the next one; it gives the token after that. Drafted
rows take the head's own output instead of the model's.
Shapes: B slots, L window length, D hidden, C features, N rows, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from worker.compute.batching import LaneWindow
from worker.compute.drafting import DraftRequest, draft_in_turn, fit_vocabulary, last_rows
from worker.compute.shard import run_windows
from worker.drafters.draft_head import HeadDrafter, HeadModule, ReadRows, project
from worker.model.model_spec import DraftHead


class NextTokenDrafter(HeadDrafter):
    """Drafts by a head that feeds on its own drafts."""

    def _draft(self, requests: Sequence[DraftRequest], texts: Sequence[ReadRows]) -> list[mx.array]:
        ends = [text.end + text.num_pending for text in texts]
        h = self._read(texts)

        def feed(number: int, active: Sequence[int], ids: mx.array, h: mx.array) -> mx.array:
            some = [texts[at] for at in active]
            return self._step(some, [ends[at] + number for at in active], [1] * len(some), ids, h)

        return draft_in_turn(requests, h, self._logits, feed)

    def _read(self, texts: Sequence[ReadRows]) -> mx.array:
        ids, features, bases, lengths = [], [], [], []
        for text in texts:
            bases.append(text.end)
            lengths.append(min(text.num_pending, len(text.tokens) - 1))
            tokens, rows = text.take(lengths[-1])
            ids += tokens[1 : lengths[-1] + 1]
            features.append(rows)
        some = [at for at, length in enumerate(lengths) if length]
        if not some:
            return mx.zeros((1, len(texts), 1))
        h = self._projected(features[0] if len(features) == 1 else mx.concatenate(features, axis=1))
        kept = [lengths[at] for at in some]
        out = self._step([texts[at] for at in some], [bases[at] for at in some], kept, mx.array([ids], mx.int32), h)
        return last_rows(out, kept)

    def _step(
        self, texts: Sequence[ReadRows], bases: Sequence[int], lengths: Sequence[int], ids: mx.array, h: mx.array
    ) -> mx.array:
        """Run the head over ids [1, sum L], so many after each base, and what comes with them [1, sum L, D].

        Returns:
            Its output [1, sum L, D].
        """
        places = []
        for text, base, length in zip(texts, bases, lengths, strict=True):
            text.caches.cut(base - text.first)
            places.append(LaneWindow(text.caches, base - text.first, length))
        return run_windows(places, partial(self._module, self._joined(ids, h)))

    def _projected(self, features: mx.array) -> mx.array:
        """Return what the head takes beside a token [1, N, D] of the model's features [1, N, C]."""
        return features

    @abstractmethod
    def _joined(self, ids: mx.array, h: mx.array) -> Any:
        """Return the module's input of ids [1, N] and h [1, N, D]."""


class MtpModule(HeadModule):
    """The prediction layers of a Qwen3.5 or Qwen3-Next checkpoint: mlx-lm's own layers behind a projection."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        make_layer, args = _layer_of(head)
        D, eps = head.hidden_size, args.rms_norm_eps
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(D, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(D, eps)
        self.layers = [make_layer(args, 0) for _ in range(head.num_layers)]
        self.norm = nn.RMSNorm(D, eps)

    def __call__(self, x: mx.array, caches: Sequence[Any]) -> mx.array:
        """Run the layers on joined rows [1, N, D] and return what the norm makes of their output."""
        mask = create_attention_mask(x, caches[0])
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, mask=mask, cache=cache)
        return self.norm(x)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the tensors by the names of a sidecar. An original checkpoint stores norms minus one."""
        found = {}
        for name, array in weights.items():
            own = name.removeprefix("mtp.")
            is_norm = own.endswith("norm.weight") or ".pre_fc_norm_" in f".{own}"
            found[own] = array + 1.0 if own != name and is_norm else array
        return _stack_experts(found)

    def dry_run(self, rows: mx.array, tapped: mx.array, caches: Sequence[Any]) -> mx.array:
        parts = [self.pre_fc_norm_embedding(rows), self.pre_fc_norm_hidden(rows)]
        return self(self.fc(mx.concatenate(parts, axis=-1)), caches)


class MtpDrafter(NextTokenDrafter):
    """Drafts by the model's own prediction layers: its embedding and head are the model's."""

    def _features(self, rows: mx.array) -> mx.array:
        return self._shard.normed(rows)

    def _joined(self, ids: mx.array, h: mx.array) -> mx.array:
        module = self._module
        parts = [module.pre_fc_norm_embedding(self._embed(ids)), module.pre_fc_norm_hidden(h)]
        return module.fc(mx.concatenate(parts, axis=-1))


class EagleModule(HeadModule):
    """EAGLE-3's layers (arXiv 2503.01840): the first attends over a token's embedding beside a hidden state."""

    def __init__(self, head: DraftHead) -> None:
        from mlx_lm.models.llama import ModelArgs, TransformerBlock

        super().__init__()
        config = dict(head.config) | {
            "model_type": "llama", "head_dim": head.head_dim, "num_hidden_layers": head.num_layers,
        }  # fmt: skip
        rope = config.get("rope_parameters")
        if isinstance(rope, dict):
            config["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        args = ModelArgs.from_dict(config)
        D, eps = head.hidden_size, args.rms_norm_eps
        if head.norms_features:
            self.input_norm = nn.RMSNorm(head.num_taps * head.target_hidden_size, eps)
        self.fc = nn.Linear(head.num_taps * head.target_hidden_size, D, bias=False)
        self.layers = [TransformerBlock(args) for _ in range(head.num_layers)]
        first, bias = self.layers[0].self_attn, bool(config.get("attention_bias"))
        first.q_proj = nn.Linear(2 * D, args.num_attention_heads * head.head_dim, bias=bias)
        first.k_proj = nn.Linear(2 * D, head.num_kv_heads * head.head_dim, bias=bias)
        first.v_proj = nn.Linear(2 * D, head.num_kv_heads * head.head_dim, bias=bias)
        self.layers[0].hidden_norm = nn.RMSNorm(D, eps)
        self.norm = nn.RMSNorm(D, eps)
        draft_vocab = config.get("draft_vocab_size") or args.vocab_size
        self.lm_head = nn.Linear(D, draft_vocab, bias=False)
        if draft_vocab != args.vocab_size:
            self.d2t = mx.zeros(draft_vocab, mx.int64)
        if head.embeds:
            self.embed_tokens = nn.Embedding(args.vocab_size, D)
        self._norms_residual = bool(config.get("norm_before_residual"))

    def __call__(self, x: tuple[mx.array, mx.array], caches: Sequence[Any]) -> mx.array:
        """Return the residual stream [1, N, D] behind the layers, of embeddings and hidden states [1, N, D] each."""
        embedded, h = x
        first = self.layers[0]
        normed = first.hidden_norm(h)
        joined = mx.concatenate([first.input_layernorm(embedded), normed], axis=-1)
        mask = create_attention_mask(h, caches[0])
        h = (normed if self._norms_residual else h) + first.self_attn(joined, mask, caches[0])
        h = h + first.mlp(first.post_attention_layernorm(h))
        for layer, cache in zip(self.layers[1:], caches[1:], strict=True):
            h = layer(h, mask, cache)
        return h

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        unused = ("t2d", "verifier_")
        found = {
            name.removeprefix("model.").replace("midlayer.", "layers.0."): array
            for name, array in weights.items()
            if not name.startswith(unused) and not name.endswith("rotary_emb.inv_freq")
        }
        if "input_norm" not in self:
            found.pop("input_norm.weight", None)
        if "d2t" not in self:
            found.pop("d2t", None)
        return found

    def dry_run(self, rows: mx.array, tapped: mx.array, caches: Sequence[Any]) -> mx.array:
        embedded = self.embed_tokens(mx.zeros(rows.shape[:2], mx.int32)) if "embed_tokens" in self else rows
        h = self.fc(self.input_norm(tapped) if "input_norm" in self else tapped)
        return self.lm_head(self.norm(self((embedded, h), caches)))


class EagleDrafter(NextTokenDrafter):
    """Drafts by EAGLE-3: features of three layers, a vocabulary of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        draft_ids = mx.arange(self._module.lm_head.weight.shape[0])
        self.ids = draft_ids + self._module.d2t if "d2t" in self._module else None

    def _projected(self, features: mx.array) -> mx.array:
        return project(features, self._part.spec, self._module.norm.eps)

    def _joined(self, ids: mx.array, h: mx.array) -> tuple[mx.array, mx.array]:
        return self._embed(ids), h

    def _logits(self, h: mx.array) -> mx.array:
        logits = self._module.lm_head(self._module.norm(h))[0].astype(mx.float32)
        V = self._shard.info.vocab_size
        if self.ids is not None:
            everywhere = mx.full((logits.shape[0], V), -mx.inf)
            everywhere[:, self.ids] = logits
            logits = everywhere
        return fit_vocabulary(logits, V, self._shard.mask_token)


def _layer_of(head: DraftHead) -> tuple[Any, Any]:
    """Return mlx-lm's class of the model's full-attention layers, and its arguments."""
    from mlx_lm.models import qwen3_5, qwen3_next

    config = {**head.config, "num_hidden_layers": head.num_layers, "full_attention_interval": 1}
    if config["model_type"] == "qwen3_next":
        config = {"decoder_sparse_step": 1, "norm_topk_prob": True, **config, "mlp_only_layers": []}
        return qwen3_next.Qwen3NextDecoderLayer, qwen3_next.ModelArgs.from_dict(config)
    return qwen3_5.DecoderLayer, qwen3_5.TextModelArgs.from_dict(config)


def _stack_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors with all experts of a projection in one, as mlx-lm's layers have them."""
    found: dict[str, mx.array] = {}
    single: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        before, _, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        if number.isdigit():
            single.setdefault(f"{before}.switch_mlp.{rest}", {})[int(number)] = array
        elif after == "gate_up_proj":
            found[f"{before}.switch_mlp.gate_proj.weight"], found[f"{before}.switch_mlp.up_proj.weight"] = array.split(
                2, axis=-2
            )
        elif after == "down_proj":
            found[f"{before}.switch_mlp.down_proj.weight"] = array
        else:
            found[name] = array
    for name, arrays in single.items():
        found[name] = mx.stack([arrays[number] for number in sorted(arrays)])
    return found
