"""Train the bundled model's drafter, a DFlash head: `python -m tools.train_drafter --out DIR --minutes 5`.

The model is frozen. Of each row some answer tokens are anchors; from an anchor the head drafts a block, in one pass, on
the features of the tokens before it. It learns what the model itself says there. Templates of
`Turn.is_new_to_drafter` are left out, to measure it with.
Shapes: B rows, L tokens per row, A anchors per row, W rows of a block, D hidden, V vocabulary, T taps.
"""

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3
from mlx_lm.utils import get_total_parameters
from tokenizers import Tokenizer

from tools.demo_data import rows, tokenizer
from tools.train_demo import CONFIG, NoCache, Step, TableRope, batches, make_parser, save, train
from worker.drafters.dflash import DFlashModule
from worker.model.checkpoint import DEMO
from worker.model.model_spec import DraftHead, HeadKind

TAPS = (1, 4, 7)
BLOCK = 16
BLOCKS = (4, 8, 16, 16)  # rows see each other in both directions, so shorter blocks are learned too
_DECAY = 7.0  # a draft counts exp(-place / _DECAY): what follows a failed one is lost (arXiv 2602.06036)
LENGTH = 512
DRAFTER_CONFIG: dict[str, Any] = {
    key: CONFIG[key]
    for key in (
        "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "rope_theta", "rope_scaling", "max_position_embeddings", "intermediate_size",
    )
} | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": CONFIG["num_hidden_layers"],
    "block_size": BLOCK,
    "dflash_config": {"target_layer_ids": list(TAPS), "mask_token_id": tokenizer.MASK},
    "torch_dtype": "bfloat16",
}  # fmt: skip


def make_head(seed: int) -> DFlashModule:
    mx.random.seed(seed)
    D, heads, size = CONFIG["hidden_size"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    config = DRAFTER_CONFIG | DRAFTER_CONFIG["dflash_config"]
    module = DFlashModule(
        DraftHead(HeadKind.DFLASH, config, 2, D, D, heads, size, windows=(None, None), num_taps=len(TAPS))
    )
    for layer in module.layers:
        layer.self_attn.rope = TableRope(size, CONFIG["rope_theta"])
    mx.eval(module.parameters())
    return module


def features_of(model: qwen3.Model, ids: mx.array) -> tuple[mx.array, mx.array]:
    """Return the tapped layers' outputs [B, L, T * D] side by side, and the logits [B, L, V], of ids [B, L]."""
    B, L = ids.shape
    h, tapped = model.model.embed_tokens(ids), []
    for number, layer in enumerate(model.layers):
        h = layer(h, "causal", NoCache(mx.broadcast_to(mx.arange(L), (B, L))))
        if number in TAPS:
            tapped.append(h)
    return mx.concatenate(tapped, axis=-1), model.model.embed_tokens.as_linear(model.model.norm(h))


def blocks(
    module: DFlashModule, model: qwen3.Model, features: mx.array, tokens: mx.array, anchors: mx.array, W: int
) -> mx.array:
    """Return the logits [B, A, W - 1, V] of the drafts after the anchors [B, A], positions in tokens [B, L]."""
    B, L = tokens.shape
    A = anchors.shape[1]
    bonus = mx.take_along_axis(tokens, anchors, axis=1)[..., None]
    ids = mx.concatenate([bonus, mx.full((B, A, W - 1), tokenizer.MASK, bonus.dtype)], axis=-1).reshape(B, A * W)
    positions = (anchors[..., None] + mx.arange(W)).reshape(B, A * W)
    context = module.hidden_norm(module.fc(features))
    sees_context = mx.arange(L) < mx.repeat(anchors, W, axis=1)[..., None]  # [B, A * W, L]
    number = mx.arange(A * W) // W
    sees_block = mx.broadcast_to(number[:, None] == number[None], (B, A * W, A * W))
    mask = mx.concatenate([sees_context, sees_block], axis=-1)[:, None]
    at = mx.broadcast_to(mx.arange(L), (B, L))
    h = model.model.embed_tokens(ids)
    for layer in module.layers:
        attention, x = layer.self_attn, layer.input_layernorm(h)
        queries = _heads(attention.q_norm, attention.q_proj(x), attention.n_heads)
        keys = [_heads(attention.k_norm, attention.k_proj(part), attention.n_kv_heads) for part in (context, x)]
        values = [_heads(None, attention.v_proj(part), attention.n_kv_heads) for part in (context, x)]
        keys = [attention.rope(part, where) for part, where in zip(keys, (at, positions), strict=True)]
        out = mx.fast.scaled_dot_product_attention(
            attention.rope(queries, positions),
            *(mx.concatenate(parts, axis=2) for parts in (keys, values)),
            scale=attention.scale,
            mask=mask,
        )
        h = h + attention.o_proj(out.transpose(0, 2, 1, 3).reshape(B, A * W, -1))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    drafted = module.norm(h).reshape(B, A, W, -1)[:, :, 1:]
    return model.model.embed_tokens.as_linear(drafted).astype(mx.float32)


def _heads(norm: Any, x: mx.array, num_heads: int) -> mx.array:
    x = x.reshape(*x.shape[:2], num_heads, -1)
    return (norm(x) if norm else x).transpose(0, 2, 1, 3)


def losses(
    module: DFlashModule, model: qwen3.Model, W: int, A: int, tokens: mx.array, is_answer: mx.array, key: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the loss; and beside it the share of drafts that hold before the first that fails, [2]."""
    B, L = tokens.shape
    features, target = map(mx.stop_gradient, features_of(model, tokens))
    noise = mx.random.uniform(shape=(B, L), key=key)
    chosen = mx.where(is_answer & (mx.arange(L) < L - W) & (mx.arange(L) > 0), noise, -1.0)
    anchors = mx.argsort(-chosen, axis=1)[:, :A]
    counts = mx.take_along_axis(chosen, anchors, axis=1) > 0
    logits = blocks(module, model, features, tokens, anchors, W)
    # the model's own distribution of the token after each of the block's rows but the last, given the true text
    rows_of = (anchors[..., None] + mx.arange(1, W)).reshape(B, -1)
    goal = mx.take_along_axis(target, rows_of[..., None] - 1, axis=1).reshape(logits.shape).astype(mx.float32)
    answers = mx.take_along_axis(is_answer, rows_of, axis=1).reshape(B, A, W - 1) & counts[..., None]
    weights = answers * mx.exp(-mx.arange(W - 1) / _DECAY)
    each = -(mx.softmax(goal, axis=-1) * (logits - mx.logsumexp(logits, axis=-1, keepdims=True))).sum(axis=-1)
    held = mx.cumprod((logits.argmax(axis=-1) == goal.argmax(axis=-1)).astype(mx.float32) * answers, axis=-1)
    parts = mx.stack([(each * weights).sum() / weights.sum(), held.sum() / answers.sum()])
    return parts[0], parts


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0], minutes=5, pool=60)
    parser.add_argument("--anchors", type=int, default=12, help="blocks per row")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    text = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    pool = rows.make_rows(text, int(1e6 * args.pool), LENGTH, args.seed + 1, for_drafter=True)
    print(f"made {pool.tokens.size:,} tokens", flush=True)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    model.load_weights(str(DEMO / "model.safetensors"))
    for layer in model.layers:
        layer.self_attn.rope = TableRope(CONFIG["head_dim"], CONFIG["rope_theta"])
    module = make_head(args.seed)
    print(f"{get_total_parameters(module):,} parameters", flush=True)
    sizes, rng, feed = sorted(set(BLOCKS)), np.random.default_rng(args.seed), batches(pool, args.batch, args.seed)
    kinds = [functools.partial(losses, module, model, W, args.anchors) for W in sizes]

    def choose(steps: Sequence[Step]) -> Step:
        return steps[sizes.index(rng.choice(BLOCKS))]

    params = train(module, kinds, choose, lambda progress: next(feed), 0.01, args)
    save(params, args.out, config=DRAFTER_CONFIG)


if __name__ == "__main__":
    main()
