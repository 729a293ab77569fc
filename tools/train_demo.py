"""Train the bundled demo model from nothing: `python -m tools.train_demo --out DIR --minutes 6`.

Shapes: B rows, L tokens per row, D hidden, V vocabulary, H heads, K head size.
"""

import argparse
import functools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3
from mlx_lm.utils import get_total_parameters
from tokenizers import Tokenizer

from tools.demo_data import mix, rows, tokenizer
from tools.demo_data.streams import Streams, make_canvases, make_windows

CONTEXT = 2048
CANVAS = 64
# What a step learns besides the next token, one of these at random
NOISES = (
    *(functools.partial(make_windows, block=block) for block in (8, 16, 32)),
    functools.partial(make_canvases, length=CANVAS),
)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": tokenizer.VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": [tokenizer.IM_END, tokenizer.ENDOFTEXT],
    "pad_token_id": tokenizer.ENDOFTEXT,
    "mask_token_id": tokenizer.MASK,
    "canvas_length": CANVAS,
    "torch_dtype": "bfloat16",
}
GENERATION_CONFIG = {"do_sample": False, "eos_token_id": CONFIG["eos_token_id"], "pad_token_id": CONFIG["pad_token_id"]}
Params = dict[str, Any]
Noise = Callable[..., Streams]
Losses = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]  # see `make_step`
Step = Callable[[Params, mx.array, mx.array, mx.array], tuple[Params, mx.array]]
Batch = tuple[mx.array, mx.array]  # tokens and is_answer [B, L]


class Phase(NamedTuple):
    """A part of the training, up to the share `until` of the whole, on rows of `length` tokens."""

    until: float
    length: int
    batch: int


class TableRope:
    """Rotary embedding that takes the position of every row, [B, L], where a stock one takes an offset."""

    def __init__(self, head_dim: int, base: float) -> None:
        self.frequencies = base ** (-mx.arange(0, head_dim, 2) / head_dim)

    def __call__(self, x: mx.array, offset: mx.array) -> mx.array:
        """Rotate x [B, H, L, K]."""
        angles = (offset[..., None] * self.frequencies)[:, None]
        cos, sin = mx.cos(angles).astype(x.dtype), mx.sin(angles).astype(x.dtype)
        low, high = mx.split(x, 2, axis=-1)
        return mx.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)


class NoCache(NamedTuple):
    """What a stock attention layer asks of its cache, without one: the positions of its rows, [B, L]."""

    offset: mx.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def make_tokenizer(seed: int) -> Tokenizer:
    rng = random.Random(seed)
    turns = [mix.sample(rng) for _ in range(20_000)]
    return tokenizer.train(part for turn in turns for part in ("user", turn.prompt, "assistant", turn.answer, "system"))


def make_model(seed: int) -> qwen3.Model:
    """Make the model with random weights; the layers that write into the residual stream start small."""
    mx.random.seed(seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    shrink = 1 / math.sqrt(2 * CONFIG["num_hidden_layers"])
    for layer in model.layers:
        layer.self_attn.rope = TableRope(CONFIG["head_dim"], CONFIG["rope_theta"])
        layer.self_attn.o_proj.weight *= shrink
        layer.mlp.down_proj.weight *= shrink
    mx.eval(model.parameters())
    return model


def forward(model: qwen3.Model, ids: mx.array, positions: mx.array, mask: mx.array) -> mx.array:
    """Logits [B, L, V] float32 of ids [B, L] that stand at positions [B, L] and see each other as the mask says."""
    h = model.model.embed_tokens(ids)
    for layer in model.layers:
        h = layer(h, mask, NoCache(positions))
    return model.model.embed_tokens.as_linear(model.model.norm(h)).astype(mx.float32)


def losses(
    model: qwen3.Model, noise: Noise, tokens: mx.array, is_answer: mx.array, key: mx.array
) -> tuple[mx.array, mx.array]:
    """The sum of the AR and the MASK loss, and both of them, [2], of tokens [B, L] masked by this noise."""
    B, L = tokens.shape
    noisy = noise(tokens, is_answer, key=key)
    clean_positions = mx.broadcast_to(mx.arange(L), (B, L))
    ids, positions = mx.concatenate([tokens, noisy.ids], 1), mx.concatenate([clean_positions, noisy.positions], 1)
    logits = forward(model, ids, positions, noisy.mask)
    parts = mx.stack(
        [
            _mean_loss(logits[:, : L - 1], tokens[:, 1:], is_answer[:, 1:].astype(mx.float32)),
            _mean_loss(logits[:, L:], noisy.targets, noisy.weights),
        ]
    )
    return parts.sum(), parts


def _mean_loss(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    return (nn.losses.cross_entropy(logits, targets) * weights).sum() / weights.sum()


def make_step(module: nn.Module, optimizer: optim.Optimizer, losses: Losses) -> Step:
    """Compile one training step: (params, tokens, is_answer, key) -> (new params, parts [2]).

    `losses` returns, of tokens, is_answer and a key, what is to become less, and the parts that are reported.
    """
    dtype = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32

    def total(params: Params, *batch: mx.array) -> tuple[mx.array, mx.array]:
        module.update(tree_map(lambda p: p.astype(dtype), params))
        return losses(*batch)

    @functools.partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
    def step(params: Params, tokens: mx.array, is_answer: mx.array, key: mx.array) -> tuple[Params, mx.array]:
        (_, parts), grads = mx.value_and_grad(total)(params, tokens.astype(mx.int32), is_answer, key)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        return optimizer.apply_gradients(grads, params), parts

    return step


def learning_rate(progress: float, steps_done: int, peak: float, warmup: int = 200) -> float:
    """Linear warm-up, then half a cosine from the peak to nothing at progress 1."""
    return peak * min(1.0, (steps_done + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def batches(pool: rows.Rows, batch: int, seed: int) -> Iterator[Batch]:
    """Shuffle the pool's rows for ever and give them in batches, tokens and is_answer [B, L]."""
    tokens, is_answer = mx.array(pool.tokens), mx.array(pool.is_answer)
    shuffler = np.random.default_rng(seed)
    while True:
        order = shuffler.permutation(len(pool.tokens))
        for start in range(0, max(1, len(order) - batch + 1), batch):
            chosen = mx.array(order[start : start + batch])
            yield tokens[chosen], is_answer[chosen]


def train(
    module: nn.Module,
    kinds: Sequence[Losses],
    choose: Callable[[Sequence[Step]], Step],
    next_batch: Callable[[float], Batch],
    weight_decay: float,
    args: argparse.Namespace,
) -> Params:
    """Train until `args.minutes` or `args.steps` are over and return the weights, float32.

    Args:
        choose: returns the step to take, of those for each of `kinds`.
        next_batch: takes the share that is done.
    """
    optimizer = optim.AdamW(learning_rate=0.0, betas=[0.9, 0.98], weight_decay=weight_decay)
    params: Params = tree_map(lambda p: p.astype(mx.float32), module.trainable_parameters())
    optimizer.init(params)
    steps = [make_step(module, optimizer, losses) for losses in kinds]
    report, number, previous, progress = Report(args.print_every), 0, mx.zeros(2), 0.0
    while progress < 1:
        batch = next_batch(progress)
        optimizer.learning_rate = learning_rate(progress, number, args.lr)
        params, parts = choose(steps)(params, *batch, mx.random.key(args.seed + number))
        mx.async_eval(params, optimizer.state, parts)
        mx.eval(previous)  # one step stays in flight
        previous = parts
        report.show(number, progress, parts, batch[0].size)
        number += 1
        progress = number / args.steps if args.steps else report.seconds() / (60 * args.minutes)
    return params


class Report:
    """Prints a line now and then: step, share done, losses, speed since the last line."""

    def __init__(self, every: int) -> None:
        self.every, self.tokens = every, 0
        self.start = self.shown = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def show(self, number: int, progress: float, losses: mx.array, tokens: int) -> None:
        self.tokens += tokens
        if number % self.every:
            return
        ar, masked = losses.tolist()  # type: ignore[misc]
        now = time.perf_counter()
        rate = self.tokens / (now - self.shown)
        print(f"step {number:6d}  {progress:6.1%}  ar {ar:.4f}  mask {masked:.4f}  {rate:,.0f} tokens/s", flush=True)
        self.shown, self.tokens = now, 0


def save(params: Params, folder: Path, **files: dict[str, Any]) -> None:
    """Write the weights in bfloat16 and these JSON files, in Hugging Face layout."""
    weights = dict[str, mx.array](tree_flatten(tree_map(lambda p: p.astype(mx.bfloat16), params)))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def make_parser(description: str, minutes: float, pool: float) -> argparse.ArgumentParser:
    """Return a parser of the flags of a training, with these defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--minutes", type=float, default=minutes, help="training time without the making of the data")
    parser.add_argument(
        "--steps", type=int, help="train this many steps instead; then the same seed gives the same model"
    )
    parser.add_argument("--batch", type=int, default=64, help="rows of 512 tokens per step")
    parser.add_argument("--pool", type=float, default=pool, help="millions of tokens of text to make")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-every", type=int, default=500)
    return parser


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0], minutes=8, pool=200)
    parser.add_argument("--resume", type=Path, help="folder of a model to go on from")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    text = Tokenizer.from_file(str(args.resume / "tokenizer.json")) if args.resume else make_tokenizer(args.seed)
    tokenizer.save(text, args.out)
    phases = [Phase(0.85, 512, args.batch), Phase(1.0, CONTEXT, max(1, args.batch // 8))]
    pools = [
        rows.make_rows(text, int(1e6 * args.pool * share), phase.length, args.seed)
        for phase, share in zip(phases, (0.9, 0.1), strict=True)
    ]
    print(f"made {sum(pool.tokens.size for pool in pools):,} tokens", flush=True)
    model = make_model(args.seed)
    if args.resume:
        model.load_weights(str(args.resume / "model.safetensors"))
    print(f"{get_total_parameters(model):,} parameters", flush=True)
    feeds = [batches(pool, phase.batch, args.seed) for phase, pool in zip(phases, pools, strict=True)]

    def next_batch(progress: float) -> Batch:
        return next(next(feed for phase, feed in zip(phases, feeds, strict=True) if progress < phase.until))

    kinds = [functools.partial(losses, model, noise) for noise in NOISES]
    params = train(model, kinds, random.Random(args.seed).choice, next_batch, 0.05, args)
    save(params, args.out, config=CONFIG, generation_config=GENERATION_CONFIG)


if __name__ == "__main__":
    main()
