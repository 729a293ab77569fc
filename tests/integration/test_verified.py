"""Verified drafts across real chains: the tokens of one-token decoding, wherever an answer ends."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from coordinator.decoding.decode import Decode
from coordinator.engine.engine import generate_once
from coordinator.planning.costs import StepCosts
from coordinator.sessions.request import Request
from coordinator.sessions.text import TextParser
from protos.brigade_pb2 import Opening, Sampling
from tests.integration.conftest import CHUNK, Models, running
from tests.integration.windows import (
    BIASED,
    COVERING,
    MASKED,
    PROMPT,
    SAMPLINGS,
    Bench,
    N,
    Words,
    all_or_some,
    answer,
    assert_same_samples,
    by_slot,
    families_and_splits,
    log_softmax,
    recompute,
)
from tests.unit.fake_chain import make_session


@families_and_splits
@all_or_some
async def test_verified_windows_give_the_tokens_and_logprobs_of_one_token_decoding(
    models: Models, is_all: bool, family: str, layers: tuple[int, ...]
) -> None:
    """Greedy and sampled, whatever the weights, which nobody trained; and in fewer steps where guesses hold."""
    whole = models(family, **MASKED)
    async with running(whole.folder, layers) as chain:
        for name, sampling in SAMPLINGS.items():
            if not is_all and (family, layers) != COVERING and name not in ("greedy", "biased"):
                continue
            expected = await answer(chain, "ar", sampling=sampling)
            if name == "greedy":
                assert expected.tokens == whole.tokens(PROMPT, N) == recompute(whole.folder).greedy(PROMPT, N)
            windows = (1, 2, 4, 16, None) if is_all or name in ("greedy", "biased") else (4,)
            for kind, window in [("ngram", None), *(("diffusion", W) for W in windows)]:
                if not is_all and (family, layers) != COVERING and window not in (None, 4):
                    continue
                found = await answer(chain, kind, window, sampling=sampling)
                assert_same_samples(found, expected, f"{name} {kind} {window}")
                assert found.usage.num_steps <= expected.usage.num_steps == N
                if name == "biased" and window in (4, 16):
                    assert found.usage.num_steps < N, "no draft ever held"


@pytest.mark.parametrize("layers", [(1, 3), (2, 1, 1)], ids=str)
async def test_drafts_from_the_text_and_diffusion_work_with_sliding_windows(
    models: Models, layers: tuple[int, ...]
) -> None:
    """Long beyond the window of 8, and longer than it in one step."""
    whole = models("gemma3_text", **MASKED)
    prompt, num_tokens = PROMPT * 3, 24
    async with running(whole.folder, layers) as chain:
        for sampling in (Sampling(), BIASED, SAMPLINGS["penalties"]):
            more: dict[str, Any] = {"prompt": prompt, "num_tokens": num_tokens, "sampling": sampling}
            expected = await answer(chain, "ar", **more)
            assert expected.tokens == whole.tokens(prompt, num_tokens, sampling)
            assert_same_samples(await answer(chain, "ngram", **more), expected, "ngram")
            if sampling is SAMPLINGS["penalties"]:
                continue
            for window in (4, 16, None):
                found = await answer(chain, "diffusion", window, **more)
                assert found.tokens == expected.tokens
                assert found.usage.num_steps <= num_tokens  # auto makes no MASK rows where none pays
                assert found.usage.num_steps < num_tokens or sampling is not BIASED or window is None


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
    sessions = {slot: make_session(prompt, 8, decoder=lossless(4), chunk=CHUNK) for slot in range(len(seeds))}
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
        windows = {slot: session.next_window() for slot, session in active.items()}
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
    return Decode("diffusion", window).make_decoder(frozenset(), StepCosts())


async def test_different_decoders_windows_and_bases_in_one_frame_each_get_what_they_get_alone(models: Models) -> None:
    whole = models("qwen3", **MASKED)
    plans = [
        (Decode("ar"), PROMPT, Sampling()),
        (Decode("diffusion", 8), PROMPT[:3], BIASED),
        (Decode("diffusion-fast", 4, 1.0), PROMPT, Sampling()),
        (Decode("diffusion-fast", 16, 2.0), PROMPT[2:9], Sampling(seed=2, temperature=0.7)),
        (Decode("ngram"), PROMPT[:6] * 3, BIASED),
        (Decode("diffusion", 16), PROMPT * 2, Sampling(seed=1, temperature=1.0)),
    ]
    async with running(whole.folder, (2, 1, 1)) as chain:
        alone = [
            (await generate_once(chain, Request(tuple(prompt), N, sampling, decode), chunk=CHUNK)).tokens
            for decode, prompt, sampling in plans
        ]
        sessions = {}
        for slot, (decode, prompt, _) in enumerate(plans):
            sessions[slot] = make_session(prompt, N, decoder=decode.make_decoder(frozenset(), StepCosts()), chunk=CHUNK)
            sessions[slot].slot = slot
        opened = [Opening(slot=slot, sampling=sampling) for slot, (_, _, sampling) in enumerate(plans)]
        bench, lengths = Bench(chain), set()
        while active := [session for session in sessions.values() if session.finish_reason is None]:
            windows = [session.next_window() for session in active]
            lengths |= {tuple(len(window.tokens) + window.masks for window in windows)}
            answers = by_slot(await bench.send(windows, opened))
            opened = []
            for session in active:
                session.commit(*answers.get(session.slot, ([], [])))
    assert [session.generated for session in sessions.values()] == alone
    assert any(len(set(frame)) >= 3 for frame in lengths)


# --- ends inside a window -------------------------------------------------------------------------------------------

VERIFIED = [("ngram", None), ("diffusion", 4), ("diffusion", 16)]


async def test_an_answer_ends_where_it_would_one_token_at_a_time(models: Models) -> None:
    """At the last token allowed and at every end-of-sequence token, wherever in a window they fall."""
    async with running(models("qwen3", **MASKED).folder, (1, 3)) as chain:
        text = (await answer(chain, "ar", sampling=BIASED, num_tokens=20)).tokens
        inside = dict.fromkeys(VERIFIED, 0)
        for num_tokens in range(1, 10):
            for kind, window in VERIFIED:
                found = await answer(chain, kind, window, sampling=BIASED, num_tokens=num_tokens)
                assert (found.tokens, found.finish_reason) == (text[:num_tokens], "length")
        for token in sorted(set(text)):
            more: dict[str, Any] = {"sampling": BIASED, "num_tokens": 20, "eos": frozenset({token})}
            expected = await answer(chain, "ar", **more)
            assert (expected.tokens, expected.finish_reason) == (text[: text.index(token) + 1], "stop")
            for kind, window in VERIFIED:
                found = await answer(chain, kind, window, **more)
                assert (found.tokens, found.finish_reason) == (expected.tokens, "stop")
                inside[kind, window] += found.usage.num_steps < len(found.tokens)
    assert all(inside[each] for each in VERIFIED if each[0] != "ngram"), "no end ever fell inside a window"


async def test_a_stop_string_ends_an_answer_where_it_would_one_token_at_a_time(models: Models) -> None:
    async with running(models("qwen3", **MASKED).folder, (2, 1, 1)) as chain:
        text = (await answer(chain, "ar", sampling=BIASED, num_tokens=20)).tokens
        for at in range(1, 12, 2):
            stop = "".join(f" {token}" for token in text[at : at + 2])
            found = []
            for decode in (Decode("ar"), *(Decode(kind, window) for kind, window in VERIFIED)):
                stream, pieces = TextParser(Words(), [stop]), []
                request = Request(PROMPT, 20, BIASED, decode, stops=(stop,))
                ended = await generate_once(
                    chain,
                    request,
                    parser=stream,
                    take=lambda output, pieces=pieces: pieces.append(output.text),
                    chunk=CHUNK,
                )
                found.append((ended.tokens, ended.finish_reason, "".join(pieces), stream.text))
            assert found == [found[0]] * len(found)
            assert found[0][1] == "stop" and stop not in found[0][2]
