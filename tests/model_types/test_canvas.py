"""Canvas rows, which see each other and all rows before: on every split, in lanes, and as the whole model has them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from tools.model_types.chain import Chain, Feed
from tools.model_types.configs import all_types
from tools.model_types.make import make_type
from worker.errors import BrigadeError, CacheMismatch
from worker.model.checkpoint import open_folder
from worker.model.describe import describe

N = 8  # canvas rows
CUTS = ((), (2,), (1, 2, 3, 4, 5))
PROMPTS = (5, 20)  # tokens: within sliding windows and beyond them
CHUNKED = ("llama4",)  # its layers cut the caches of the whole model themselves: splits are compared only
CAUSAL = ("minimax_m3_vl",)  # its indexer takes no mask for a causal one, so it cannot have a canvas
# dense, sliding, sinks, latent attention, positions in the embedding
FEW = ("qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2")


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return [(7 * i + 3 + seed) % 96 for i in range(count)]


def largest(one: mx.array, other: mx.array) -> float:
    return mx.where(one == other, 0.0, mx.abs(one - other)).max().item()  # type: ignore[return-value]


def whole_model(folder: Path, text: Sequence[int], canvas: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> mx.array:
    """mlx-lm's logits [N, V] of the canvas rows, all rows at once, with no mask but these rows' own."""
    model, _ = load_model(folder)
    first, count = len(text), len(text) + len(canvas)

    def make_mask(h: Any, cache: Any = None, window_size: int | None = None, return_array: bool = False) -> mx.array:
        rows = mx.arange(count)
        in_sight = rows[None] <= mx.where(rows < first, rows, count - 1)[:, None]
        if size := window_size or getattr(cache, "max_size", None):
            in_sight &= rows[None] > mx.minimum(rows, first)[:, None] - size
        return in_sight

    def plain(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(plain, cache.caches))
        own = KVCache()
        if hasattr(cache, "max_size"):
            own.max_size = cache.max_size  # type: ignore[attr-defined]
        return own

    with monkeypatch.context() as patch:
        for code in {sys.modules[type(module).__module__] for _, module in model.named_modules()}:
            if hasattr(code, "create_attention_mask"):
                patch.setattr(code, "create_attention_mask", make_mask)
        logits = model(mx.array([[*text, *canvas]]), cache=[plain(cache) for cache in make_prompt_cache(model)])
        mx.eval(logits)
    return logits[0, first:].astype(mx.float32)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.matrix)
        for name in all_types()
        if name not in CAUSAL and not name.startswith("prism_")  # which cannot be made without its weights
    ],
)
def test_canvas_rows_are_those_of_the_whole_model_on_every_split_and_in_every_lane(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_type(tmp_path / "model", name)
    try:
        num_layers = describe(open_folder(folder)).num_layers
        chains = [Chain(folder, [*(at for at in cuts if at < num_layers), num_layers]) for cuts in CUTS]
    except BrigadeError as error:
        pytest.skip(str(error))
    chain = chains[0]
    if chain.spec.recurrent_layers:
        with pytest.raises(CacheMismatch, match="a recurrent layer"):
            chain.run(Feed(chain.open(), [1], canvas=[2, 3]))
        return
    first, second = tokens_of(N, 11), tokens_of(N, 29)
    for length in PROMPTS:
        prompt = tokens_of(length)
        found = []
        for each in chains:
            session, two_passes = each.open(), each.open()
            each.run(Feed(session, prompt[:3]))
            steps = each.run(Feed(session, prompt[3:], canvas=first))  # the prompt's end and a canvas in one pass
            steps += each.run(Feed(session, [], length, canvas=second))  # the next step has the same base
            steps += each.run(Feed(session, second, length, canvas=first))  # it is known now, and a canvas follows
            found.append(steps)
            each.run(Feed(two_passes, prompt))
            each.run(Feed(two_passes, second))
            assert largest(each.run(Feed(two_passes, [], canvas=first))[0], steps[2][N:]) == 0.0, "one pass or two"
        assert max(largest(a, b) for steps in found[1:] for a, b in zip(found[0], steps, strict=True)) == 0.0
        for canvas, logits in ((first, found[0][0][-N:]), (second, found[0][1])) if name not in CHUNKED else ():
            assert largest(whole_model(folder, prompt, canvas, monkeypatch), logits) == 0.0
        causal = chain.open()
        chain.run(Feed(causal, prompt))
        assert largest(chain.run(Feed(causal, second))[0], found[0][1]) > 0.0, "a causal mask makes a difference"

    def feeds() -> list[Feed]:
        """A lane of canvases, a token and a chunk, after prompts of several lengths."""
        sessions = [chain.open() for _ in range(5)]
        for session, length in zip(sessions, (20, 5, 0, 20, 5), strict=True):
            if length:
                chain.run(Feed(session, tokens_of(length)))
        one, two, three, four, five = sessions
        return [
            Feed(one, [], canvas=first),
            Feed(two, [7]),
            Feed(three, tokens_of(N)),
            Feed(four, [3, 4], canvas=second[: N - 2]),
            Feed(five, [], canvas=tokens_of(N, 5)),
        ]

    alone = [chain.run(feed)[0] for feed in feeds()]
    assert [largest(a, b) for a, b in zip(chain.run(*feeds()), alone, strict=True)] == [0.0] * 5
