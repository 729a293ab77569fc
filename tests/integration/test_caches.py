"""`--kv full|rotating|int8` on every node, with every decoder: the same tokens, in the memory that was reserved."""

from functools import lru_cache
from itertools import groupby, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from coordinator.decoding.decode_options import make_cache_choice
from protos.brigade_pb2 import Cache, Sampling
from tests.integration.conftest import CHUNK, Layers, Models, Whole, running
from tests.integration.windows import BIASED, MASKED, PROMPT, SPLITS, Recompute, answer, logprobs
from tests.tiny import VOCAB

LONG = tuple((5 * i + i * i) % 89 for i in range(45))
N = 14
KEEP = 4
SMALL = make_cache_choice("rotating", 14)  # 4 and 10
INT8, INT4 = make_cache_choice("int8"), make_cache_choice("int4")
FULL = make_cache_choice("full")
WIDE: dict[str, Any] = {"config": {"mask_token_id": 90, "head_dim": 32}, "sharpen": 4.0}  # int8 needs groups of 32

VERIFIED = [("ar", None), ("ngram", None), ("diffusion", 4), ("diffusion", None)]

splits = pytest.mark.parametrize(
    "layers",
    [pytest.param(each, marks=() if each == SPLITS[-1] else pytest.mark.matrix) for each in SPLITS],
    ids=lambda layers: "+".join(map(str, layers)),
)


@lru_cache
def sliding(folder: Any, size: int, keep: int = KEEP) -> Recompute:
    """Everything recomputed with an explicit mask: no cache that could let go of the wrong rows."""
    return Recompute(folder, keep, size - keep)


async def test_a_cache_that_a_session_does_not_choose_or_that_never_slides_is_a_full_one(models: Models) -> None:
    whole = models("qwen3", **MASKED)
    async with running(whole.folder, (1, 3)) as chain:
        for kind, window in [*VERIFIED, ("diffusion-fast", 8)]:
            full, unsaid, rotating = [
                await answer(chain, kind, window, cache=cache, num_tokens=8)
                for cache in (FULL, Cache(), make_cache_choice("rotating", 64))
            ]
            assert full.tokens == unsaid.tokens == rotating.tokens
            assert [s.cache_bytes for s in full.statuses] == [s.cache_bytes for s in unsaid.statuses]
            assert kind == "diffusion-fast" or full.tokens == whole.tokens(PROMPT, 8)


# --- rotating -------------------------------------------------------------------------------------------------------


ROTATED = [  # size, decoder, window, rows per chunk
    *((14, kind, window, 8) for kind, window in VERIFIED),
    (14, "ar", None, 3),
    (14, "ar", None, 64),
    (10, "diffusion", 4, 8),
    (32, "ngram", None, 8),
]
FORGOTTEN = [(4, 0.8, 8), (8, 2.0, 64), (8, 0.0, 8)]  # window, threshold, rows per chunk


@splits
async def test_a_rotating_cache_sees_the_first_tokens_and_the_latest_whatever_the_decoder_and_chunks(
    models: Models, layers: Layers
) -> None:
    whole, is_covering = models("qwen3", **MASKED), layers == SPLITS[-1]
    greedy = {size: sliding(whole.folder, size).greedy(LONG, N) for size in (10, 14, 32)}
    async with running(whole.folder, layers) as chain:
        for size, kind, window, chunk in ROTATED if is_covering else ROTATED[:3]:
            cache = make_cache_choice("rotating", size)
            found = await answer(chain, kind, window, prompt=LONG, cache=cache, chunk=chunk)
            assert found.tokens == greedy[size], (size, kind, window, chunk)
        for keep in (0, 9):
            found = await answer(chain, "ngram", prompt=LONG, cache=make_cache_choice("rotating", 14, keep), chunk=8)
            assert found.tokens == sliding(whole.folder, 14, keep).greedy(LONG, N) != greedy[14]
        for window, threshold, chunk in FORGOTTEN if is_covering else FORGOTTEN[:1]:
            expected = sliding(whole.folder, 14).wedlm(LONG, N, window, threshold, 0.02, len(LONG) + N)
            more: dict[str, Any] = {"prompt": LONG, "threshold": threshold, "cache": SMALL, "chunk": chunk}
            assert (await answer(chain, "diffusion-fast", window, **more)).tokens == expected, (window, threshold)
    assert expected != whole.tokens(LONG, N), "forgetting must matter"


@pytest.mark.parametrize("kind", ["full", "rotating", "int8", "int4"])
async def test_verified_drafts_leave_every_cache_as_one_token_decoding_does(models: Models, kind: str) -> None:
    """Long enough for the rotating buffers, which end at 256 rows, to slide under rejected drafts."""
    cache = make_cache_choice(kind, 40 if kind == "rotating" else None)
    num_prompt, num_tokens = (230, 40) if kind == "rotating" else (45, 24)
    prompt = tuple((5 * i + i * i) % 89 for i in range(num_prompt))
    sampling = Sampling(seed=1, temperature=1.5, logit_bias=dict(BIASED.logit_bias))
    async with running(models("qwen3", **WIDE).folder, (1, 2, 1)) as chain:
        more: dict[str, Any] = {
            "prompt": prompt, "num_tokens": num_tokens, "sampling": sampling, "cache": cache, "chunk": 32,
        }  # fmt: skip
        expected = await answer(chain, "ar", **more)
        for decoder, window in (("ngram", None), ("diffusion", 16)):
            found = await answer(chain, decoder, window, **more)
            assert found.tokens == expected.tokens, f"{decoder} {window}"
            assert found.usage.num_steps < expected.usage.num_steps == num_tokens


async def test_a_rotating_cache_with_sliding_layers_forgets_by_the_shorter_of_both(models: Models) -> None:
    """Layers with a window of 8 of their own keep it; those without get the cache's 4 and 28."""
    whole = models("gemma3_text", sharpen=4.0)
    cache = make_cache_choice("rotating", 32)
    async with running(whole.folder, (1, 3)) as chain:
        texts = [
            (await answer(chain, kind, None, prompt=LONG, num_tokens=20, cache=cache, chunk=chunk)).tokens
            for kind, chunk in (("ar", 1), ("ar", 8), ("ar", 64), ("ngram", 8))
        ]
        full = await answer(chain, "ar", prompt=LONG, num_tokens=20)
    assert all(text == texts[0] for text in texts)
    assert full.tokens == whole.tokens(LONG, 20) != texts[0]


# --- int8 and int4 ----------------------------------------------------------------------------------------------------


def quantised(whole: Whole, prompt: tuple[int, ...], num_tokens: int, group_size: int, bits: int) -> list[int]:
    """mlx-lm's own model with mlx-lm's own quantised cache, fed as the chain is fed."""
    caches: list[object] = [QuantizedKVCache(group_size=group_size, bits=bits) for _ in range(4)]
    for begin in range(0, len(prompt), CHUNK):
        logits = whole.reference.rows(prompt[begin : begin + CHUNK], caches)[-1:]
    tokens = [int(mx.argmax(logits))]
    while len(tokens) < num_tokens:
        tokens.append(int(mx.argmax(whole.reference.rows(tokens[-1:], caches))))
    return tokens


@splits
async def test_quantised_caches_give_mlx_lms_tokens_with_every_decoder(models: Models, layers: Layers) -> None:
    """Rows are quantised one by one, so what they are fed with does not matter."""
    for head_dim, group_size in ((32, 32), (64, 64)) if layers == SPLITS[-1] else ((32, 32),):
        whole = models("qwen3", config={"mask_token_id": 90, "head_dim": head_dim}, sharpen=4.0)
        prompt = LONG[: 5 * CHUNK]
        expected = [(cache, quantised(whole, prompt, N, group_size, bits)) for cache, bits in ((INT8, 8), (INT4, 4))]
        assert expected[0][1] != expected[1][1]
        async with running(whole.folder, layers) as chain:
            for kind, window in VERIFIED if head_dim == 32 and layers == SPLITS[-1] else VERIFIED[:2]:
                for cache, tokens in expected:
                    assert (await answer(chain, kind, window, prompt=prompt, cache=cache)).tokens == tokens


async def test_the_logprobs_of_an_8_bit_cache_are_within_a_tenth_of_those_of_a_full_one(models: Models) -> None:
    """In nats, of tiny random models with sharpened heads; their logits spread over tens of nats."""
    sampling = Sampling(logprobs=1 + VOCAB)
    async with running(models("qwen3", **{**WIDE, "sharpen": 1.0}).folder, (1, 3)) as chain:
        differences = []
        for length in (9, 20, 33, 45):
            rows = []
            for cache in (FULL, INT8):
                found = await answer(chain, "ar", prompt=LONG[:length], num_tokens=1, sampling=sampling, cache=cache)
                rows.append(np.nan_to_num(logprobs(found.samples)[0], neginf=0.0))
            differences.append(np.abs(rows[0] - rows[1]).max())
            assert np.ptp(rows[0]) > 3
    assert 1e-5 < max(differences) < 0.1, differences


async def test_wedlms_decoder_runs_in_an_8_bit_cache_the_same_on_every_split(models: Models) -> None:
    texts = set()
    for layers in (*SPLITS, (3, 1)):
        async with running(models("qwen3", **WIDE).folder, layers) as chain:
            found = await answer(chain, "diffusion-fast", 8, prompt=LONG, threshold=1.5, cache=INT8)
            texts.add(tuple(found.tokens))
    assert len(texts) == 1


# --- memory ---------------------------------------------------------------------------------------------------------

KV_HEADS = 2


def expected_bytes(num_layers: int, num_rows: int, head_dim: int, bytes_per_value: float) -> int:
    """2 x layers x heads x width x rows x bytes: keys and values."""
    return round(2 * num_layers * KV_HEADS * head_dim * num_rows * bytes_per_value)


@pytest.mark.parametrize("kind", ["ar", "ngram", "diffusion", "diffusion-fast"])
async def test_every_stage_holds_the_bytes_that_its_layers_need(models: Models, kind: str) -> None:
    """Room is made 256 rows at a time. Quantised groups have a scale and a bias in the model's dtype."""
    layers = (1, 2, 1)
    cases = [
        (mx.float32, 64, FULL, 4.0),
        (mx.float32, 64, INT8, 1 + 2 * 4 / 64),
        (mx.float32, 64, INT4, 1 / 2 + 2 * 4 / 64),
        (mx.bfloat16, 64, FULL, 2.0),
        (mx.bfloat16, 64, INT8, 1 + 2 * 2 / 64),
        (mx.float32, 32, INT8, 1 + 2 * 4 / 32),
    ]
    if kind != "ar":  # what a decoder feeds beside the text does not depend on the width of a value
        cases = cases[:2]
    window = 8 if kind.startswith("diffusion") else None
    for (dtype, head_dim), caches in groupby(cases, lambda case: case[:2]):
        whole = models("qwen3", dtype=dtype, config={"mask_token_id": 90, "head_dim": head_dim})
        async with running(whole.folder, layers) as chain:
            for _, _, cache, value in caches:
                for num_prompt, num_rows in ((20, 256), (250, 512))[kind != "ar" or value != 4.0 :]:
                    prompt = [i % 89 for i in range(num_prompt)]
                    found = await answer(chain, kind, window, prompt=prompt, num_tokens=8, cache=cache, chunk=64)
                    expected = [expected_bytes(num, num_rows, head_dim, value) for num in layers]
                    assert [status.cache_bytes for status in found.statuses] == expected
                assert [status.cache_bytes for status in await chain.statuses()] == [0, 0, 0], "the slot was freed"


async def test_a_rotating_cache_stays_as_small_as_it_is(models: Models) -> None:
    """However long the text: two blocks of 256 rows hold 32 tokens, a window, and room to slide in."""
    whole = models("qwen3", config={"mask_token_id": 90, "max_position_embeddings": 4096, "num_hidden_layers": 2})
    cache = make_cache_choice("rotating", 32)
    most = (expected_bytes(1, 512, 16, 4.0),) * 2
    async with running(whole.folder, (1, 1)) as chain:
        for kind, num_prompt in [("ar", 20), *product(("ar", "ngram", "diffusion", "diffusion-fast"), (600,))]:
            window, prompt = 8 if kind.startswith("diffusion") else None, [i * i % 89 for i in range(num_prompt)]
            found = await answer(chain, kind, window, prompt=prompt, num_tokens=6, cache=cache, chunk=64)
            held = [status.cache_bytes for status in found.statuses]
            assert all(bytes_ <= limit for bytes_, limit in zip(held, most, strict=True)), (kind, num_prompt)
        prompt = [i * i % 89 for i in range(1500)]
        found, full = [
            await answer(chain, "ar", None, prompt=prompt, num_tokens=6, cache=each, chunk=64) for each in (cache, FULL)
        ]
    assert all(status.cache_bytes <= limit for status, limit in zip(found.statuses, most, strict=True))
    assert full.statuses[1].cache_bytes >= 3 * most[1]
