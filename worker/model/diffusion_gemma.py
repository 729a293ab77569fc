"""DiffusionGemma, based on mlx-lm's gemma4_text.

The layers have two roles: they encode token rows and denoise canvas rows. The roles differ in a scalar per layer, and
the embedding of a canvas row depends on the previous step's logits for its place (self-conditioning).
Shapes: L window length, D hidden, V vocabulary, N rows of a canvas, K candidates per row.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_experts",
    "num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window", "top_k_experts",
    "max_position_embeddings",
)  # fmt: skip
_ABSENT = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ENCODER, _DECODER = "model.encoder.", "model.decoder."
_ENCODER_LAYERS = f"{_ENCODER}language_model.layers."


@dataclass
class ModelArgs(gemma4_text.ModelArgs):
    """The text model's part of config.json."""

    image_ids: tuple[int, ...] = ()  # tokens that stand for images

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> "ModelArgs":
        """Read config.json. Raises ValueError for a missing size, or a part of Gemma 4 that this type does not have."""
        text = params["text_config"]
        for key in _REQUIRED:
            if not text.get(key):
                raise ValueError(f"text_config has no {key}")
        for key, value in _ABSENT.items():
            if text.get(key):
                raise ValueError(f"text_config: {key}: expected {value}, found {text[key]!r}")
        layers = text.get("layer_types") or [
            _FULL if number % 6 == 5 or number == text["num_hidden_layers"] - 1 else _SLIDING
            for number in range(text["num_hidden_layers"])
        ]
        fixed = {"model_type": "gemma4_text", "attention_k_eq_v": True, "enable_moe_block": True, "layer_types": layers}
        images = tuple(params[key] for key in ("image_token_id", "video_token_id") if params.get(key) is not None)
        return super().from_dict({**text, **_ABSENT, **fixed, "tie_word_embeddings": True, "image_ids": images})


class Router(gemma4_text.Router):
    """The router with the reference's order of scaling: mlx-lm's order resolves near ties differently."""

    config: Any

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        scores = self.proj(mx.fast.rms_norm(x, None, self.eps) * self.scale * self._root_size)
        num_chosen = self.config.top_k_experts
        chosen = mx.argpartition(scores, kth=-num_chosen, axis=-1)[..., -num_chosen:]
        weights = mx.softmax(mx.take_along_axis(scores, chosen, axis=-1), axis=-1, precise=True)
        return chosen, weights * self.per_expert_scale[chosen]


class Layer(gemma4_text.DecoderLayer):
    """A layer that scales its output by the role of each row."""

    def __init__(self, config: ModelArgs, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.router = Router(config)
        self.role_scalars = mx.ones((2,))  # of token rows, of canvas rows
        self.layer_scalar = None  # type: ignore[assignment]

    def __call__(self, x: mx.array, *args: Any, canvas: mx.array | None = None, **more: Any) -> Any:
        """Run the layer; `canvas` [1, L] marks canvas rows, None: no row is one."""
        h, *others = super().__call__(x, *args, **more)
        roles = mx.array([[0]]) if canvas is None else canvas.astype(mx.int32)
        return h * self.role_scalars[roles][..., None], *others


class SelfConditioning(nn.Module):
    """Adds to a canvas row's embedding an expected embedding from the previous step."""

    def __init__(self, config: ModelArgs) -> None:
        super().__init__()
        D, F = config.hidden_size, config.intermediate_size
        self.pre_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)
        self.post_norm = gemma4_text.RMSNormNoScale(D, eps=config.rms_norm_eps)
        self.gate_proj, self.up_proj = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down_proj = nn.Linear(F, D, bias=False)

    def __call__(self, embedded: mx.array, soft: mx.array) -> mx.array:
        x = self.pre_norm(soft)
        return self.post_norm(embedded + self.down_proj(gemma4_text.geglu(self.gate_proj(x), self.up_proj(x))))


class Embedding(nn.Module):
    """The embedding table, which is also the head, and self-conditioning: one module, so that no cut separates them."""

    def __init__(self, config: ModelArgs) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.conditioning = SelfConditioning(config)
        self._scale = config.hidden_size**0.5
        self._image_ids, self._pad = config.image_ids, config.pad_token_id

    def __call__(self, ids: mx.array, canvas: mx.array | None, soft: mx.array | None) -> mx.array:
        for image in self._image_ids:  # token rows that stand for an image are embedded as padding
            is_image = ids == image if canvas is None else (ids == image) & ~canvas
            ids = mx.where(is_image, self._pad, ids)
        h = self.table(ids) * self._scale
        if canvas is None:
            return h
        return mx.where(canvas[..., None], self.conditioning(h, mx.zeros_like(h) if soft is None else soft), h)

    def as_linear(self, h: mx.array) -> mx.array:
        return self.table.as_linear(h)

    def soften(self, logits: mx.array) -> mx.array:
        """Return the expected embedding [N, D] under logits [N, V] float32."""
        table = self.table
        if isinstance(table, nn.QuantizedEmbedding):
            p = mx.softmax(logits, axis=-1, precise=True).astype(table.scales.dtype)
            packed = table.weight, table.scales, table.get("biases")
            how = {"group_size": table.group_size, "bits": table.bits, "mode": table.mode}
            return mx.quantized_matmul(p, *packed, transpose=False, **how) * self._scale
        dtype = table.weight.dtype
        return mx.softmax(logits.astype(dtype), axis=-1, precise=True) @ table.weight * self._scale

    def mix(self, ids: mx.array, shares: mx.array) -> mx.array:
        """Return the sum [N, D] of the embeddings of candidates [N, K], weighted by their shares."""
        found = self.table(ids)
        return (shares.astype(found.dtype)[:, None] @ found)[:, 0] * self._scale


class TextModel(gemma4_text.Gemma4TextModel):
    """The layers, with the embedding above."""

    embed_tokens: Any
    layers: list[Any]

    def __init__(self, config: ModelArgs) -> None:
        super().__init__(config)
        self.embed_tokens = Embedding(config)
        self.layers = [Layer(config, number) for number in range(config.num_hidden_layers)]

    def __call__(  # type: ignore[override]
        self, inputs: mx.array, cache: Any = None, canvas: mx.array | None = None, soft: mx.array | None = None
    ) -> mx.array:
        h = self.embed_tokens(inputs, canvas, soft)
        cache = cache or [None] * len(self.layers)
        for layer, each, mask in zip(self.layers, cache, self._make_masks(h, cache), strict=True):
            h, *_ = layer(h, mask, each, canvas=canvas)
        return self.norm(h)


class Model(gemma4_text.Model):
    """The whole model: ids in, logits out, like mlx-lm's models."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.model = TextModel(args)

    def __call__(
        self, inputs: mx.array, cache: Any = None, canvas: mx.array | None = None, soft: mx.array | None = None
    ) -> mx.array:
        """Return logits [1, L, V] float32.

        Args:
            inputs: token ids [1, L].
            canvas: marks canvas rows [1, L]; None: no row is one.
            soft: for canvas rows the previous step's `Embedding.soften` or `.mix` [1, L, D], zeros for other rows.
        """
        h = self.model(inputs, cache, canvas, soft)
        logits = self.model.embed_tokens.as_linear(h).astype(mx.float32)
        return gemma4_text.logit_softcap(self.final_logit_softcapping, logits)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Rename the tensors of both published layouts. The encoder shares the decoder's, except for layer scalars."""
        renamed: dict[str, mx.array] = {}
        for name, array in weights.items():
            if not name.startswith(_DECODER) or name.endswith(".layer_scalar"):
                continue
            name = name.replace(f"{_DECODER}self_conditioning.", "model.embed_tokens.conditioning.")
            name = name.replace(f"{_DECODER}embed_tokens.", "model.embed_tokens.table.")
            renamed |= _experts(name.replace(_DECODER, "model."), array)
        for number in range(self.args.num_hidden_layers):
            pair = [weights[f"{where}{number}.layer_scalar"] for where in (_ENCODER_LAYERS, f"{_DECODER}layers.")]
            renamed[f"model.layers.{number}.role_scalars"] = mx.concatenate(pair)
        return renamed


def _experts(name: str, array: mx.array) -> dict[str, mx.array]:
    """Return a tensor, quantised or not, under mlx-lm's names for experts if it holds experts."""
    at, is_expert, part = name.partition(".experts.")
    if not is_expert:
        return {name: array}
    part, _, suffix = part.partition(".")
    at, suffix = f"{at}.experts.switch_glu", suffix or "weight"
    if part != "gate_up_proj":
        return {f"{at}.{part}.{suffix}": array}
    gate, up = map(mx.contiguous, array.split(2, axis=-2))
    return {f"{at}.gate_proj.{suffix}": gate, f"{at}.up_proj.{suffix}": up}
