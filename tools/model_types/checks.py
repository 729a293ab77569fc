"""What a chain of stages must share with the whole model: one function per claim, the answer as text.

`=` is equal to the last bit, `≈` equal within rounding.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.bitlinear_layers import BitLinear
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model

from protos.brigade_pb2 import CACHE_INT8, CACHE_ROTATING, Cache
from tools.model_types.chain import Chain, Feed, Session
from tools.model_types.row import CLOSE, EQUAL
from worker.errors import CacheMismatch

PROMPT = [(7 * i + 3) % 96 for i in range(11)]
PASSES = [PROMPT, [5], [91], [40]]
ROUNDING = 1e-3  # of the logits' spread; one layer that is changed by 1 % moves them by more
ROTATING = Cache(kind=CACHE_ROTATING, size=7, keep=2)
INT8_NOISE = 0.3  # of the logits' spread, in half of all rows at least


class Whole:
    """mlx-lm's own model of a folder: its logits, and the kinds of its caches."""

    def __init__(self, folder: Path) -> None:
        self.model, _ = load_model(folder)
        self.passes = self._run(make_prompt_cache(self.model))

    def caches(self) -> str:
        """As `kv, win`: the kinds in the order in which they first come."""
        return ", ".join(dict.fromkeys(map(_kind, make_prompt_cache(self.model)))) or "none"

    def compared(self, found: Sequence[mx.array]) -> str:
        """Whether these are its logits of `PASSES`; to the last bit if keys are summed in the order of their tokens."""
        verdict = compared(found, self.passes)
        if verdict != CLOSE:
            return verdict
        return compared(found, self._run([_in_order(cache) for cache in make_prompt_cache(self.model)]))

    def _run(self, caches: list[Any]) -> list[mx.array]:
        found = []
        for tokens in PASSES:
            logits = self.model(mx.array([tokens]), cache=caches)[0].astype(mx.float32)
            mx.eval(logits)
            found.append(logits)
        return found


class WindowCache(KVCache):
    """A sliding window that keeps every row in its place, where mlx-lm's own writes the newest over the oldest."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return create_causal_mask(N, self.offset, window_size=window_size or self.window)


def _in_order(cache: Any) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*map(_in_order, cache.caches))
    return WindowCache(cache.max_size) if isinstance(cache, RotatingKVCache) else cache


def passes(chain: Chain, cache: Cache | None = None) -> list[mx.array]:
    """The chain's logits of what `Whole` was fed."""
    session = chain.open(cache)
    return [chain.run(Feed(session, tokens))[0] for tokens in PASSES]


def difference(found: Sequence[mx.array], wanted: Sequence[mx.array]) -> float:
    """The largest difference of two logits, in units of their spread; infinite where one is not a number."""
    a, b = mx.concatenate(list(found)), mx.concatenate(list(wanted))
    if a.shape != b.shape:
        return float("inf")
    alike = (a == b) | (mx.isnan(a) & mx.isnan(b))
    apart = _number(mx.max(mx.where(alike, 0, mx.abs(a - b))))
    return apart / _spread(b) if apart == apart else float("inf")


def compared(found: Sequence[mx.array], wanted: Sequence[mx.array]) -> str:
    """`=`, `≈`, or by how much they differ."""
    by = difference(found, wanted)
    if by == 0:
        return EQUAL
    same_tokens = all(mx.all(mx.argmax(a, -1) == mx.argmax(b, -1)).item() for a, b in zip(found, wanted, strict=True))
    return CLOSE if by < ROUNDING and same_tokens else f"off by {by:.2g}"


def cut(chain: Chain) -> str:
    """`any` if rows can be taken back, `last` if only those of the last window, `no` if none; else what is wrong."""
    begun, drafts, others = PROMPT[:6], [9, 8, 7, 6, 5, 4, 3, 2], [30, 31, 32, 33]
    if chain.spec.recurrent_layers:
        return _cut_in_last_window(chain, begun, drafts, others)
    session, fresh, late = chain.open(), chain.open(), chain.open()
    for each in (session, fresh, late):
        chain.run(Feed(each, begun))
    forked = session.fork(len(begun))
    chain.run(Feed(session, drafts))
    part = chain.run(Feed(session, others, base=9))
    again = chain.run(Feed(session, others, base=6))
    chain.run(Feed(late, drafts[:3]))
    results = {
        "cut within a window": compared(part, chain.run(Feed(late, others))),
        "cut": compared(again, wanted := chain.run(Feed(fresh, others))),
        "forked": compared(chain.run(Feed(forked, others)), wanted),
    }
    wrong = {what: how for what, how in results.items() if how != EQUAL and not (how == CLOSE and "within" in what)}
    return "; ".join(f"{what}: {how}" for what, how in wrong.items()) or "any"


def _cut_in_last_window(chain: Chain, begun: Sequence[int], drafts: Sequence[int], others: Sequence[int]) -> str:
    """A state is cut and forked inside its last window only, and starts anew from nothing."""
    session, late = chain.open(), chain.open()
    first = chain.run(Feed(session, begun))
    chain.run(Feed(late, begun))
    chain.run(Feed(session, drafts))
    chain.run(Feed(late, drafts[:3]))
    wanted = chain.run(Feed(late, others))
    try:
        forked = session.fork(9)
    except CacheMismatch:
        return "is refused" if chain.spec.can_take_back else "no"
    results = {
        "a fork": compared(chain.run(Feed(forked, others)), wanted),
        "cut within a window": compared(chain.run(Feed(session, others, base=9)), wanted),
    }
    if wrong := {what: how for what, how in results.items() if how not in (EQUAL, CLOSE)}:
        return "; ".join(f"{what}: {how}" for what, how in wrong.items())
    try:
        chain.run(Feed(session, others, base=len(begun)))
    except CacheMismatch:
        return "last" if compared(chain.run(Feed(session, begun, base=0)), first) == EQUAL else "does not start anew"
    return "is cut without a word"


def lanes(chain: Chain) -> str:
    """Windows of several sessions in one pass, of equal and of different lengths, against each alone."""
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:5], [77, 3, 50, 21, 8, 64]]
    alone, together = [[chain.open() for _ in prompts] for _ in range(2)]
    for sessions in (alone, together):
        for session, prompt in zip(sessions[:3], prompts[:3], strict=True):
            chain.run(Feed(session, prompt))
    found, wanted = [], []
    for step in (
        {0: [5], 1: [6]},
        {0: [7], 1: [8], 2: [9]},
        {0: [1, 2, 3], 1: [4], 2: [10, 11]},
        {3: prompts[3], 1: [13]},
    ):
        found += chain.run(*(Feed(together[number], tokens) for number, tokens in step.items()))
        wanted += [chain.run(Feed(alone[number], tokens))[0] for number, tokens in step.items()]
    return compared(found, wanted)


def calls(chain: Chain) -> int:
    """The most often that a step of eight sessions, a token each, reads a matrix that a step of one reads once."""
    sessions = [chain.open() for _ in range(8)]
    for number, session in enumerate(sessions):
        chain.run(Feed(session, PROMPT[: 3 + number]))
    one, eight = (_reads(chain, count) for count in (sessions[:1], sessions))
    return max(eight[module] // one[module] for module in one)


def _reads(chain: Chain, sessions: Sequence[Session]) -> Counter[int]:
    """How often a step of these sessions reads each matrix, by its module's id."""
    found: Counter[int] = Counter()

    def counted(read: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
            found[id(module)] += 1
            return read(module, *args, **kwargs)

        return call

    with ExitStack() as patches:
        for kind in (nn.Linear, SwitchLinear, BitLinear):
            patches.enter_context(patch.object(kind, "__call__", counted(kind.__call__)))
        chain.run(*(Feed(session, [5]) for session in sessions))
    return found


def int8(chain: Chain) -> str:
    """Whether caches of 8 bits stay near the logits of whole ones, but for rows where another expert was chosen."""
    if chain.spec.quantised_refusal:
        return f"no: int8 caches: {chain.spec.quantised_refusal}"
    whole = passes(chain)
    a, b = mx.concatenate(passes(chain, Cache(kind=CACHE_INT8))), mx.concatenate(whole)
    apart = mx.sqrt(mx.mean(mx.square(_finite(a) - _finite(b)), axis=-1))
    noise = _number(mx.median(apart)) / _spread(b)
    return "y" if 0 < noise < INT8_NOISE else f"off by {noise:.2g}"


def rotating(chain: Chain, unsplit: Chain) -> str:
    """Whether caches that let go of tokens are the same wherever the model is cut, and do let go of some."""
    if chain.spec.rotating_refusal:
        return f"no: rotating caches: {chain.spec.rotating_refusal}"
    if len(chain.spec.recurrent_layers) == chain.spec.num_layers:
        return "no: rotating caches: it has no keys and values"
    found, wanted = (passes(each, ROTATING) for each in (chain, unsplit))
    if (verdict := compared(found, wanted)) != EQUAL:
        return verdict
    return "y" if difference(found, passes(chain)) > 0 else "lets go of nothing"


def _spread(logits: mx.array) -> float:
    return _number(mx.std(_finite(logits)))


def _number(scalar: mx.array) -> float:
    return float(scalar.item())  # type: ignore[arg-type]


def _finite(logits: mx.array) -> mx.array:
    """Tokens that a model never says have a logit of minus infinity."""
    return mx.where(mx.isinf(logits), 0, logits)


def _kind(cache: object) -> str:
    if isinstance(cache, CacheList):
        return "+".join(_kind(part) for part in cache.caches)
    if isinstance(cache, ArraysCache):
        return f"s{len(cache.cache)}"
    name = type(cache).__name__
    return {"KVCache": "kv", "RotatingKVCache": "win", "ChunkedKVCache": "chunk"}.get(name, name)
