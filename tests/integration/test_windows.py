"""Windows across real chains: WeDLM's decoder, verified drafts, and what a row of a window sees."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.utils import load_model

from coordinator.chain import Chain
from coordinator.decode import Decode
from coordinator.generate import Answer, generate
from coordinator.request import Request
from coordinator.session import Session
from coordinator.text import StopText, TextStream
from coordinator.window import WindowChooser
from protos.brigade_pb2 import Cache, Frame, Result, Sample, Sampling, Window
from protos.brigade_pb2 import Session as Opening
from tests.integration.conftest import CHUNK, Models, Whole, running
from tests.tiny import VOCAB
from worker.cache import KVCache, LayerCache
from worker.history import History
from worker.sampling import Sampler
from worker.shard import Shard, WindowRope

MASK = 90
MASKED = {"config": {"mask_token_id": MASK}, "sharpen": 4.0}  # sure enough that thresholds matter
PROMPT = tuple((7 * i + i * i) % 89 for i in range(CHUNK + 3))
WINDOWS = [*product((1, 2, 4, 8, 16), (0.0, 0.2, 0.4, 0.8, 3.0))]  # MASK rows, threshold
SPLITS = [(4,), (1, 3), (2, 1, 1)]
N = 14

splits = pytest.mark.parametrize("layers", SPLITS, ids=lambda layers: "+".join(map(str, layers)))
families = pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])

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
    threshold: float = 0.4, penalty: float = 0.02, sampling: Sampling | None = None, chunk: int = CHUNK, **more: Any,
) -> Answer:  # fmt: skip
    """What the chain makes of the prompt with this decoder."""
    decode = Decode(kind, window, threshold, penalty)
    return await generate(
        chain, Request(tuple(prompt), num_tokens, sampling or Sampling(), decode, **more), chunk=chunk
    )


class Bench:
    """Hand-made windows through a real chain, a frame at a time."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._step = 1000

    async def send(self, windows: Sequence[Window], opened: Sequence[Opening] = ()) -> Result:
        self._step += 1
        await self._chain.send(Frame(epoch=1, step=self._step, windows=windows, opened=opened))
        return (await self._chain.receive()).result

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


def distance(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """How far each row [N, V] is from the other at most; the MASK's minus infinity aside."""
    return np.abs(rows[:, :MASK] - others[:, :MASK]).max(axis=1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


# --- WeDLM's decoder ------------------------------------------------------------------------------------------------


@splits
@families
async def test_diffusion_fast_is_wedlm_recomputed_from_nothing_at_every_step(
    models: Models, family: str, layers: tuple[int, ...]
) -> None:
    whole = models(family, **MASKED)
    alone = recompute(whole.folder)
    several = 0
    async with running(whole.folder, layers) as chain:
        for window, threshold in WINDOWS if family == "qwen3" else WINDOWS[::3]:
            expected = expected_wedlm(alone, window, threshold, len(PROMPT) + N)
            found = await answer(chain, "diffusion-fast", window, threshold=threshold)
            assert found.tokens == expected, f"W={window}, tau={threshold}"
            assert found.num_steps <= N + window + 1
            several += found.num_steps < N
    assert several >= 2, "thresholds that never fill two at once prove little"


@lru_cache
def expected_wedlm(
    alone: Recompute, window: int, threshold: float, limit: int | None, num_tokens: int = N
) -> list[int]:
    return alone.wedlm(PROMPT, num_tokens, window, threshold, 0.02, limit)


async def test_until_the_answer_ends_nothing_differs_from_wedlms_own_engine(models: Models) -> None:
    """It fuses no prompt, emits a step later and never shortens the window: only the last window can tell."""
    whole = models("qwen3", **MASKED)
    async with running(whole.folder, (1, 3)) as chain:
        for window, threshold in ((2, 0.8), (4, 0.0), (4, 2.0), (8, 0.8)):
            expected = expected_wedlm(recompute(whole.folder), window, threshold, None, 24)
            found = await answer(chain, "diffusion-fast", window, threshold=threshold, num_tokens=24)
            assert found.tokens[: 24 - window] == expected[: 24 - window]


async def test_window_threshold_and_penalty_all_matter_to_the_text(models: Models) -> None:
    """Else equality under all of them would prove little."""
    async with running(models("qwen3", **MASKED).folder, (4,)) as chain:
        texts = [
            tuple((await answer(chain, "diffusion-fast", window, threshold=threshold, penalty=penalty)).tokens)
            for window, threshold, penalty in [(1, 0.4, 0.02), (8, 0.4, 0.02), (8, 2.0, 0.02), (8, 0.4, 0.5)]
        ]
    assert len(set(texts)) == 4


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[LayerCache]]]:
    """First layer and caches of every slot that any stage opens."""
    opened: list[tuple[int, list[LayerCache]]] = []
    make = Shard.make_caches

    def note(shard: Shard, cache: Cache) -> list[LayerCache]:
        opened.append((shard.start, make(shard, cache)))
        return opened[-1][1]

    monkeypatch.setattr(Shard, "make_caches", note)
    return opened


@splits
@pytest.mark.parametrize("kind", ["diffusion-fast", "diffusion", "ngram"])
async def test_what_is_committed_is_what_a_plain_prefill_of_the_text_leaves(
    models: Models, held: list[tuple[int, list[LayerCache]]], kind: str, layers: tuple[int, ...]
) -> None:
    """Keys and values of every layer, whatever windows they came in and whatever was cut again meanwhile."""
    whole = models("qwen3", **MASKED)
    async with running(whole.folder, layers) as chain:
        held.clear()
        tokens = (await answer(chain, kind, 8, threshold=1.5, sampling=BIASED, num_tokens=24)).tokens
    text = [*PROMPT, *tokens]
    plain = make_prompt_cache(whole.reference.model)
    whole.reference.model(mx.array([text]), cache=plain)
    caches = [cache for _, caches in sorted(held, key=lambda opened: opened[0]) for cache in caches]
    assert len(caches) == len(plain) == 4
    committed = len(text) - 17  # the last windows may still hold guesses
    for layer, expected in zip(caches, plain, strict=True):
        assert isinstance(layer, KVCache)
        for rows, array in ((layer._keys, expected.keys), (layer._values, expected.values)):
            found = np.array(rows.read(committed)[0])
            np.testing.assert_allclose(found, np.array(array[:, :, :committed]), rtol=1e-4, atol=1e-5)


# --- what a row sees ------------------------------------------------------------------------------------------------

TEXT = PROMPT[:6]
AHEAD = [(8, 40), (9, 33)]  # filled tokens at positions behind the masks at 6 and 7


def reordered(ahead: Sequence[tuple[int, int]], masks: Sequence[int], num_padding: int = 0) -> Window:
    """Two known tokens, tokens filled ahead, and MASK rows, behind TEXT[:4]."""
    at = [4, 5, *(position for position, _ in ahead), *masks, *range(90, 90 + num_padding)]
    tokens = [*TEXT[4:], *(token for _, token in ahead)]
    return window_of(
        tokens, 4, TEXT, wanted=len(tokens), masks=len(masks) + num_padding, guessed=len(masks), positions=at
    )


@splits
@families
async def test_each_row_of_a_reordered_window_is_what_the_whole_model_makes_of_it(
    models: Models, family: str, layers: tuple[int, ...]
) -> None:
    whole = models(family, **MASKED)
    window = reordered(AHEAD, [6, 7, 10])
    rows = [*TEXT[:4], *window.tokens, *[MASK] * 3]
    expected = log_softmax(recompute(whole.folder).logits(rows, [*range(4), *window.positions]))
    async with running(whole.folder, layers) as chain:
        samples, guesses = await Bench(chain).rows(window, TEXT[:4])
    assert np.isneginf(samples[:, MASK]).all() and np.isneginf(guesses[:, MASK]).all()
    np.testing.assert_allclose(np.concatenate([samples, guesses]), expected[4:], rtol=1e-4, atol=1e-4)


@splits
async def test_mask_rows_behind_a_row_change_nothing_about_it(models: Models, layers: tuple[int, ...]) -> None:
    """Padding is neutral, and so is every further MASK for the tokens and masks before it."""
    async with running(models("qwen3", **MASKED).folder, layers) as chain:
        bench = Bench(chain)
        few = await bench.rows(reordered(AHEAD, [6, 7]), TEXT[:4])
        for window in (reordered(AHEAD, [6, 7], num_padding=26), reordered(AHEAD, [6, 7, 10, 11, 12])):
            more = await bench.rows(window, TEXT[:4])
            np.testing.assert_allclose(more[0], few[0], atol=2e-5)
            np.testing.assert_allclose(more[1][:2], few[1], atol=2e-5)


async def test_a_token_filled_ahead_changes_what_is_guessed_before_it(models: Models) -> None:
    """The point of the reordering: a MASK sees what stands behind it, a filled row sees no MASK."""
    async with running(models("qwen3", **MASKED).folder, (1, 3)) as chain:
        bench = Bench(chain)
        samples, guesses = await bench.rows(reordered(AHEAD, [6, 7]), TEXT[:4])
        other_samples, other_guesses = await bench.rows(reordered([(8, 40), (9, 34)], [6, 7]), TEXT[:4])
        assert (distance(other_guesses, guesses) > 1e-2).all()
        np.testing.assert_allclose(other_samples[:3], samples[:3], atol=2e-5)  # rows before the changed one
        swapped_samples, swapped = await bench.rows(reordered(AHEAD, [7, 6]), TEXT[:4])
        np.testing.assert_allclose(swapped_samples, samples, atol=2e-5)
        assert distance(swapped[::-1], guesses).max() > 1e-2, "the order of MASK rows matters"
        _, moved = await bench.rows(reordered([(8, 40), (20, 33)], [6, 7]), TEXT[:4])
        assert distance(moved, guesses).max() > 1e-3, "positions matter"


@splits
async def test_a_prompt_fused_with_its_first_window_is_the_prompt_and_then_the_window(
    models: Models, layers: tuple[int, ...]
) -> None:
    async with running(models("qwen3", **MASKED).folder, layers) as chain:
        bench = Bench(chain)
        fused = await bench.rows(window_of(TEXT, 0, wanted=1, masks=8, guessed=8))
        split_ = await bench.rows(window_of(TEXT[5:], 5, TEXT, wanted=1, masks=8, guessed=8), TEXT[:5])
    np.testing.assert_allclose(fused[0], split_[0], atol=5e-5)
    np.testing.assert_allclose(fused[1], split_[1], atol=5e-5)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}])  # fmt: skip
def test_a_position_per_row_rotates_each_row_as_it_would_be_rotated_there(scaling: dict[str, Any] | None) -> None:
    own = initialize_rope(16, 10000.0, False, scaling, 512)
    rope = WindowRope(own)
    mx.random.seed(0)
    x = mx.random.normal((1, 3, 5, 16))
    positions = [9, 10, 6, 250, 8]
    found = rope(x, mx.array(positions))
    assert found.shape == x.shape
    for row, position in enumerate(positions):
        np.testing.assert_allclose(found[:, :, row : row + 1], own(x[:, :, row : row + 1], offset=position), atol=1e-5)
    np.testing.assert_allclose(rope(x, mx.arange(7, 12)), rope(x, 7), atol=1e-5)
    np.testing.assert_allclose(rope(x, mx.arange(5)), own(x), atol=1e-5)
    if scaling is None:
        np.testing.assert_allclose(found, rotated(x, mx.array(positions), 10000.0), atol=2e-5)


# --- verified drafts ------------------------------------------------------------------------------------------------


def assert_same_samples(found: Answer, expected: Answer, what: str) -> None:
    assert found.tokens == expected.tokens, what
    assert found.finish_reason == expected.finish_reason, what
    for one, other in zip(found.samples, expected.samples, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4), what
        assert [a.token for a in one.alternatives] == [a.token for a in other.alternatives], what
        assert [a.logprob for a in one.alternatives] == pytest.approx([a.logprob for a in other.alternatives], abs=1e-4)


@splits
@families
async def test_verified_windows_give_the_tokens_and_logprobs_of_one_token_decoding(
    models: Models, family: str, layers: tuple[int, ...]
) -> None:
    """Greedy and sampled, whatever the weights, which nobody trained; and in fewer steps where guesses hold."""
    whole = models(family, **MASKED)
    async with running(whole.folder, layers) as chain:
        for name, sampling in SAMPLINGS.items():
            if family != "qwen3" and name not in ("greedy", "biased"):
                continue
            expected = await answer(chain, "ar", sampling=sampling)
            if name == "greedy":
                assert expected.tokens == whole.tokens(PROMPT, N) == recompute(whole.folder).greedy(PROMPT, N)
            for kind, window in [("ngram", None), *(("diffusion", W) for W in (1, 2, 4, 16, None))]:
                found = await answer(chain, kind, window, sampling=sampling)
                assert_same_samples(found, expected, f"{name} {kind} {window}")
                assert found.num_steps <= expected.num_steps == N
                if name == "biased" and window in (4, 16):
                    assert found.num_steps < N, "no draft ever held"


@splits
async def test_drafts_from_the_text_work_with_sliding_windows(models: Models, layers: tuple[int, ...]) -> None:
    whole = models("gemma3_text", sharpen=4.0)
    prompt = PROMPT * 3
    async with running(whole.folder, layers) as chain:
        for sampling in (Sampling(), BIASED, SAMPLINGS["penalties"]):
            expected = await answer(chain, "ar", prompt=prompt, num_tokens=40, sampling=sampling)
            found = await answer(chain, "ngram", prompt=prompt, num_tokens=40, sampling=sampling)
            assert_same_samples(found, expected, "ngram")
        assert expected.tokens == whole.tokens(prompt, 40, SAMPLINGS["penalties"])


@splits
async def test_diffusion_works_with_sliding_windows(models: Models, layers: tuple[int, ...]) -> None:
    """Long beyond the window of 8, and longer than it in one step."""
    whole = models("gemma3_text", **MASKED)
    prompt = PROMPT * 3
    async with running(whole.folder, layers) as chain:
        for sampling in (Sampling(), BIASED):
            expected = whole.tokens(prompt, 30, sampling)
            for window in (4, 16, None):
                found = await answer(chain, "diffusion", window, prompt=prompt, num_tokens=30, sampling=sampling)
                assert found.tokens == expected
    assert found.num_steps < 30


async def test_the_same_seed_gives_the_same_text_of_diffusion_fast_on_every_split(models: Models) -> None:
    """Drawn by (seed, position): the split, the chunk and a second time change nothing."""
    folder = models("qwen3", **MASKED).folder
    sampling = Sampling(seed=9, temperature=1.0, top_p=0.95)
    texts = set()
    for layers, chunk in [((4,), 8), ((4,), 64), ((1, 3), 8), ((2, 1, 1), 16)]:
        async with running(folder, layers) as chain:
            found = await answer(chain, "diffusion-fast", 8, threshold=1.0, sampling=sampling, chunk=chunk)
            texts.add(tuple(found.tokens))
    assert len(texts) == 1
    async with running(folder, (4,)) as chain:
        sampling.seed = 10
        other = await answer(chain, "diffusion-fast", 8, threshold=1.0, sampling=sampling)
    assert tuple(other.tokens) not in texts


async def test_a_row_draws_with_the_key_of_the_place_that_its_token_would_take(models: Models) -> None:
    """A token row draws for the next place and a MASK row for its own: where both agree they draw the same token."""
    sampling = Sampling(seed=11, temperature=5.0, logprobs=1 + VOCAB)
    window = reordered(AHEAD, [6, 7, 10])
    drawn_for = [at + (row < len(window.tokens)) for row, at in enumerate(window.positions)]
    async with running(models("qwen3", **MASKED).folder, (1, 3)) as chain:
        bench = Bench(chain)
        await bench.send([window_of(TEXT[:4], 0)], [Opening(slot=0, sampling=sampling)])
        result = await bench.send([window])
    samples = [*result.samples, *result.guesses]
    drawn = Sampler(sampling)(mx.array(logprobs(samples), mx.float32), drawn_for, [], [0] * len(samples))
    assert [sample.token for sample in samples] == drawn.tokens.tolist()
    assert len({sample.token for sample in samples}) > 3


async def test_sampled_drafts_leave_the_distribution_as_it_is(models: Models) -> None:
    """Pearson's chi-squared after an accepted draft and after a rejected one, over many seeds of a small vocabulary."""
    whole = models("qwen3", config={"vocab_size": 6, "mask_token_id": 5}, sharpen=1.5)
    prompts, temperature = [[1, 4, 0, 2], [3], [0, 0, 1], [2, 3, 4, 1]], 1.0
    after: dict[str, list[tuple[list[int], int]]] = {"acceptance": [], "rejection": []}
    async with running(whole.folder, (2, 2)) as chain:
        bench = Bench(chain)
        for number, prompt in enumerate(prompts):
            await sample_many(bench, prompt, range(number, number + 70), temperature, after)

    @lru_cache
    def distribution(text: tuple[int, ...], temperature: float) -> np.ndarray:
        logits = np.array(whole.reference.logits(text, make_prompt_cache(whole.reference.model))[0], np.float64)
        return np.exp(log_softmax(logits[:5] / temperature))

    def chi_squared(drawn: list[tuple[list[int], int]], temperature: float) -> float:
        expected = sum(distribution(tuple(text), temperature) for text, _ in drawn)
        found = np.bincount([token for _, token in drawn], minlength=5)
        return float(((found - expected) ** 2 / expected).sum())

    for name, drawn in after.items():
        assert len(drawn) > 80, f"too few cases of {name}"
        assert chi_squared(drawn, temperature) < 18.47, f"after {name}"  # p = 0.001 for 4 degrees of freedom
        assert chi_squared(drawn, 0.4) > 18.47, "the test could not tell"


async def sample_many(
    bench: Bench, prompt: list[int], seeds: range, temperature: float, after: dict[str, list[tuple[list[int], int]]]
) -> None:
    """Sessions side by side in one frame; notes for each the first token after an acceptance and after a rejection."""
    sessions = {slot: Session(prompt, 8, decoder=lossless(4)) for slot in range(len(seeds))}
    for slot, session in sessions.items():
        session.slot = slot
    opened = [
        Opening(slot=slot, sampling=Sampling(seed=seed, temperature=temperature)) for slot, seed in enumerate(seeds)
    ]
    rejected: set[int] = set()
    noted: set[tuple[int, str]] = set()

    def note(slot: int, kind: str, text: list[int], token: int) -> None:
        if (slot, kind) not in noted:
            noted.add((slot, kind))
            after[kind].append((text, token))

    while active := {slot: session for slot, session in sessions.items() if session.finish_reason is None}:
        windows = {slot: session.next_window(CHUNK) for slot, session in active.items()}
        before = {slot: [*prompt, *session.generated] for slot, session in active.items()}
        answers = by_slot(await bench.send(list(windows.values()), opened))
        opened = []
        for slot, session in active.items():
            new = [sample.token for sample in session.commit(*answers[slot])]
            drafts = windows[slot].wanted - 1
            if slot in rejected:
                note(slot, "rejection", before[slot], new[0])
                rejected.discard(slot)
            if drafts and len(new) == 1:
                rejected.add(slot)
            elif len(new) > 1:
                note(slot, "acceptance", [*before[slot], new[0]], new[1])


def lossless(window: int) -> Any:
    return Decode("diffusion", window).make_decoder(frozenset(), WindowChooser())


def by_slot(result: Result) -> dict[int, tuple[list[Sample], list[Sample]]]:
    answers: dict[int, tuple[list[Sample], list[Sample]]] = {}
    for kind, samples in enumerate((result.samples, result.guesses)):
        for sample in samples:
            answers.setdefault(sample.slot, ([], []))[kind].append(sample)
    return answers


@splits
async def test_different_decoders_windows_and_bases_in_one_frame_each_get_what_they_get_alone(
    models: Models, layers: tuple[int, ...]
) -> None:
    whole = models("qwen3", **MASKED)
    plans = [
        (Decode("ar"), PROMPT, Sampling()),
        (Decode("diffusion", 8), PROMPT[:3], BIASED),
        (Decode("diffusion-fast", 4, 1.0), PROMPT, Sampling()),
        (Decode("diffusion-fast", 16, 2.0), PROMPT[2:9], Sampling(seed=2, temperature=0.7)),
        (Decode("ngram"), PROMPT[:6] * 3, BIASED),
        (Decode("diffusion", 16), PROMPT * 2, Sampling(seed=1, temperature=1.0)),
    ]
    async with running(whole.folder, layers) as chain:
        alone = [
            (await generate(chain, Request(tuple(prompt), N, sampling, decode), chunk=CHUNK)).tokens
            for decode, prompt, sampling in plans
        ]
        sessions = {}
        for slot, (decode, prompt, _) in enumerate(plans):
            sessions[slot] = Session(prompt, N, decoder=decode.make_decoder(frozenset(), WindowChooser()))
            sessions[slot].slot = slot
        opened = [Opening(slot=slot, sampling=sampling) for slot, (_, _, sampling) in enumerate(plans)]
        bench, lengths = Bench(chain), set()
        while active := [session for session in sessions.values() if session.finish_reason is None]:
            windows = [session.next_window(CHUNK) for session in active]
            lengths |= {tuple(len(window.tokens) + window.masks for window in windows)}
            answers = by_slot(await bench.send(windows, opened))
            opened = []
            for session in active:
                session.commit(*answers.get(session.slot, ([], [])))
    assert [session.generated for session in sessions.values()] == alone
    assert any(len(set(frame)) >= 3 for frame in lengths)


# --- the MASK id ----------------------------------------------------------------------------------------------------


@splits
async def test_the_mask_id_in_a_prompt_is_a_token_like_any_other(models: Models, layers: tuple[int, ...]) -> None:
    whole = models("qwen3", **MASKED)
    prompt = (*PROMPT[:4], MASK, PROMPT[5], MASK, MASK)
    alone = recompute(whole.folder)
    expected = alone.greedy(prompt, N)
    async with running(whole.folder, layers) as chain:
        for kind in ("ar", "ngram", "diffusion"):
            assert (await answer(chain, kind, 8 if kind == "diffusion" else None, prompt=prompt)).tokens == expected
        fast = await answer(chain, "diffusion-fast", 8, prompt=prompt, threshold=1.0)
    assert fast.tokens == alone.wedlm(prompt, N, 8, 1.0, 0.02, len(prompt) + N)
    assert expected != alone.greedy([token if token != MASK else 3 for token in prompt], N)


@pytest.mark.parametrize("kind", ["ar", "diffusion", "diffusion-fast"])
async def test_the_mask_id_is_never_said_however_likely(models: Models, kind: str) -> None:
    async with running(models("qwen3", **MASKED).folder, (2, 2)) as chain:
        for temperature in (0.0, 1.0, 100.0):
            sampling = Sampling(seed=1, temperature=temperature, logit_bias={MASK: 1e6}, logprobs=2)
            found = await answer(chain, kind, None if kind == "ar" else 8, num_tokens=40, sampling=sampling)
            assert MASK not in found.tokens
            assert all(a.token != MASK for sample in found.samples for a in sample.alternatives)


# --- ends inside a window -------------------------------------------------------------------------------------------

VERIFIED = [("ngram", None), ("diffusion", 4), ("diffusion", 16)]


@pytest.mark.parametrize(("kind", "window"), VERIFIED)
async def test_an_answer_ends_where_it_would_one_token_at_a_time(models: Models, kind: str, window: int | None) -> None:
    """At the last token allowed and at every end-of-sequence token, wherever in a window they fall."""
    async with running(models("qwen3", **MASKED).folder, (1, 3)) as chain:
        text = (await answer(chain, "ar", sampling=BIASED, num_tokens=20)).tokens
        inside = 0
        for num_tokens in range(1, 14):
            found = await answer(chain, kind, window, sampling=BIASED, num_tokens=num_tokens)
            assert (found.tokens, found.finish_reason) == (text[:num_tokens], "length")
        for token in sorted(set(text)):
            more = {"sampling": BIASED, "num_tokens": 20, "eos": frozenset({token})}
            expected, found = await answer(chain, "ar", **more), await answer(chain, kind, window, **more)
            assert found.tokens == expected.tokens == text[: text.index(token) + 1]
            assert found.finish_reason == expected.finish_reason == "stop"
            inside += found.num_steps < len(found.tokens)
    assert inside or kind == "ngram", "no end ever fell inside a window"


class Words(SimpleNamespace):
    """A detokenizer whose text is the ids."""

    last_segment = ""

    def add_token(self, token: int) -> None:
        self.last_segment = f" {token}"

    def finalize(self) -> None:
        self.last_segment = ""


@pytest.mark.parametrize(("kind", "window"), VERIFIED)
async def test_a_stop_string_ends_an_answer_where_it_would_one_token_at_a_time(
    models: Models, kind: str, window: int | None
) -> None:
    async with running(models("qwen3", **MASKED).folder, (2, 1, 1)) as chain:
        text = (await answer(chain, "ar", sampling=BIASED, num_tokens=20)).tokens
        for at in range(1, 12):
            stop = "".join(f" {token}" for token in text[at : at + 2])
            found = []
            for decode in (Decode("ar"), Decode(kind, window)):
                stream, pieces = TextStream(Words(), StopText([stop])), []
                request = Request(PROMPT, 20, BIASED, decode, stops=(stop,))
                ended = await generate(chain, request, stream=stream, emit=pieces.append, chunk=CHUNK)
                found.append((ended.tokens, ended.finish_reason, "".join(pieces), stream.text))
            assert found[0] == found[1]
            assert found[0][1] == "stop" and stop not in found[0][2]


# --- what windows cost ----------------------------------------------------------------------------------------------


async def test_the_chain_learns_what_its_steps_cost(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number of rows, of steps that had the chain to themselves: `--window auto` chooses by it."""
    seen: list[tuple[int, float]] = []
    observe = WindowChooser.observe_step

    def note(chooser: WindowChooser, num_rows: int, seconds: float) -> None:
        seen.append((num_rows, seconds))
        observe(chooser, num_rows, seconds)

    monkeypatch.setattr(WindowChooser, "observe_step", note)
    async with running(models("qwen3", **MASKED).folder, (2, 1, 1)) as chain:
        found = await answer(chain, "diffusion", num_tokens=30, sampling=BIASED)
        assert len(seen) >= found.num_steps - 1
        assert all(seconds > 0 for _, seconds in seen)
        assert {num_rows for num_rows, _ in seen} <= {1, 2, 4, 8, 16, 32, 64}
        seen.clear()
        long = await answer(chain, "ar", prompt=PROMPT * 6, num_tokens=2)
        assert len(long.passages) - len(seen) >= 5, "chunks that queue behind each other tell nothing of what one costs"


async def test_rows_that_only_pad_are_counted_as_rows(models: Models) -> None:
    async with running(models("qwen3", **MASKED).folder, (4,)) as chain:
        found = await answer(chain, "diffusion-fast", 5, prompt=PROMPT[:1], num_tokens=1, threshold=0.0)
    assert found.num_steps == 1 and found.num_rows == 2


def test_the_answers_of_these_tests_vary(models: Models) -> None:
    """Else equality would prove little."""
    whole: Whole = models("qwen3", **MASKED)
    assert len(set(whole.tokens(PROMPT, N))) > 3
    assert 2 <= len(set(whole.tokens(PROMPT, 20, BIASED))) <= 3
