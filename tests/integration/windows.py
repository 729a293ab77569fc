"""What the tests of windows share: a model that recomputes everything, and hand-made windows."""

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from coordinator.cluster.chain import Chain
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import generate_once
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Frame, Opening, Result, Sample, Sampling, Window
from tests.integration.conftest import CHUNK, receive, send
from tests.tiny import VOCAB
from worker.memory.history import History

MASK = 90
MASKED = {"config": {"mask_token_id": MASK}, "sharpen": 4.0}  # sure enough that thresholds matter
PROMPT = tuple((7 * i + i * i) % 89 for i in range(CHUNK + 3))
SPLITS = [(4,), (1, 3), (2, 1, 1)]
N = 14

# three tokens far above all others: guesses hold often, yet not always
BIASED = Sampling(logit_bias={5: 40.0, 17: 40.0, 60: 40.0})
SAMPLINGS = {
    "greedy": Sampling(logprobs=4),
    "biased": Sampling(logprobs=4, **{"logit_bias": dict(BIASED.logit_bias)}),
    "temperature": Sampling(seed=3, temperature=0.9, logprobs=4),
    "filters": Sampling(seed=4, temperature=1.5, top_p=0.8, top_k=20, min_p=0.01, logprobs=4),
    "penalties": Sampling(
        seed=5, temperature=2.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias=dict(BIASED.logit_bias), logprobs=4,
    ),
    "of the field": Sampling(
        seed=7, temperature=1.4, top_n_sigma=2.5, xtc_probability=0.5, xtc_threshold=0.02, xtc_special_tokens=[9],
        repetition_penalty=1.2, repetition_context_size=50, presence_penalty=0.3, presence_context_size=3,
        dry_multiplier=2.0, dry_base=1.75, dry_allowed_length=1, dry_breakers=[7], min_tokens=6, begins=len(PROMPT),
        ends=range(0, VOCAB, 3), logit_bias=dict(BIASED.logit_bias), logprobs=4,
    ),
}  # fmt: skip


class Recompute:
    """mlx-lm's own model without any cache: all rows of a sequence at once, in any order, at any positions.

    With `recent` a row sees the first `keep` positions and as many latest ones, its own included.
    """

    def __init__(self, folder: Any, keep: int = 0, recent: int | None = None) -> None:
        self._keep, self._recent = keep, recent
        self.model, config = load_model(folder)
        self._base = config["rope_theta"]
        self._positions = mx.array([0])
        for layer in self.model.model.layers:
            layer.self_attn.rope = lambda x, offset=0: rotated(x, self._positions, self._base)

    def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """Logits [L, V] of all rows; row r sees rows 0..r."""
        self._positions = mx.array(list(positions))
        mask = np.tril(np.ones((len(tokens), len(tokens)), bool))
        if self._recent:
            at = np.array(positions)
            mask &= (at[None] < self._keep) | (at[None] > at[:, None] - self._recent)
        allowed = mx.array(mask)
        h = self.model.model.embed_tokens(mx.array([list(tokens)]))
        for layer in self.model.model.layers:
            h = layer(h, allowed, None)
        logits = np.array(self.model.lm_head(self.model.model.norm(h))[0].astype(mx.float32), np.float64)
        logits[:, MASK] = -np.inf  # no token to say
        return logits

    def wedlm(
        self, prompt: Sequence[int], num_tokens: int, window: int, threshold: float, penalty: float, limit: int | None
    ) -> list[int]:
        """Algorithm 1 of WeDLM as its engine runs it (research/diffusion.md section 1.3), greedy.

        Args:
            limit: positions from here on get no MASK rows; None: the window is never shortened, as in that engine.
        """
        text = list(prompt)
        slots: list[int | None] = [None] * min(window, (limit or 1 << 30) - len(text))  # None is a MASK
        while True:
            n = next((i for i, token in enumerate(slots) if token is None), len(slots))
            slots += [None] * min(n, max(0, (limit or 1 << 30) - len(text) - len(slots)))
            filled = [i for i, token in enumerate(slots) if token is not None]
            masks = [i for i, token in enumerate(slots) if token is None]
            rows = [*text, *(slots[i] for i in filled), *[MASK] * len(masks)]
            positions = [*range(len(text)), *(len(text) + i for i in filled + masks)]
            logits = self.logits(rows, positions)[len(rows) - len(masks) :]  # type: ignore[arg-type]
            text += slots[:n]  # type: ignore[arg-type]
            if len(text) >= len(prompt) + num_tokens:
                return text[len(prompt) : len(prompt) + num_tokens]
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1)
            adjusted = entropy + penalty * (np.array(masks) - masks[0])
            chosen = np.flatnonzero(adjusted < threshold)
            for row in chosen if len(chosen) else [int(adjusted.argmin())]:
                slots[masks[row]] = int(logits[row].argmax())
            slots = slots[n:]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """One token at a time."""
        text = list(prompt)
        while len(text) < len(prompt) + num_tokens:
            text.append(int(self.logits(text, range(len(text)))[-1].argmax()))
        return text[len(prompt) :]


def rotated(x: mx.array, positions: mx.array, base: float) -> mx.array:
    """Rotary embedding of [1, H, L, K] by hand: cos and sin."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * mx.power(base, -mx.arange(half) / half)
    cos, sin = mx.cos(angles), mx.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


@lru_cache
def recompute(folder: Any) -> Recompute:
    return Recompute(folder)


async def answer(
    chain: Chain, kind: str, window: int | None = None, *, prompt: Sequence[int] = PROMPT, num_tokens: int = N,
    threshold: float = 0.4, penalty: float = 0.02, sampling: Sampling | None = None, chunk: int = CHUNK,
    num_drafts: int | None = None, **more: Any,
) -> Answer:  # fmt: skip
    """What the chain makes of the prompt with this decoder."""
    decode = Decode(kind, window, threshold, penalty, num_drafts)
    return await generate_once(
        chain, Request(tuple(prompt), num_tokens, sampling or Sampling(), decode, **more), chunk=chunk
    )


class Bench:
    """Hand-made windows through a real chain, a frame at a time."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._step = 1000

    async def send(self, windows: Sequence[Window], opened: Sequence[Opening] = ()) -> Result:
        self._step += 1
        await send(self._chain, Frame(epoch=1, step=self._step, windows=windows, opened=opened))
        return (await receive(self._chain)).result

    async def rows(self, window: Window, prefix: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Logprobs of the wanted and of the guessed rows, [N, V] each, of a window behind a freshly fed prefix."""
        await self.send([], [Opening(slot=0, sampling=Sampling(logprobs=1 + VOCAB))])
        if prefix:
            await self.send([window_of(prefix, 0)])
        result = await self.send([window])
        return logprobs(result.samples), logprobs(result.guesses)


def window_of(tokens: Sequence[int], base: int, prefix: Sequence[int] = (), **more: Any) -> Window:
    return Window(slot=0, base=base, prefix_hash=History(prefix).prefix_hash(base), tokens=tokens, **more)


def logprobs(samples: Sequence[Sample]) -> np.ndarray:
    rows = np.full((len(samples), VOCAB), np.nan)
    for row, sample in enumerate(samples):
        for alternative in sample.alternatives:
            rows[row, alternative.token] = alternative.logprob
    return rows


def assert_same_samples(found: Answer, expected: Answer, what: str) -> None:
    assert found.tokens == expected.tokens, what
    assert found.finish_reason == expected.finish_reason, what
    for one, other in zip(found.samples, expected.samples, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4), what
        assert [a.token for a in one.alternatives] == [a.token for a in other.alternatives], what
        assert [a.logprob for a in one.alternatives] == pytest.approx([a.logprob for a in other.alternatives], abs=1e-4)


class Words(SimpleNamespace):
    """A detokenizer whose text is the ids."""

    last_segment = ""

    def add_token(self, token: int) -> None:
        self.last_segment = f" {token}"

    def finalize(self) -> None:
        self.last_segment = ""
