"""Prompts on all nodes, answers on the first one: parts of caches move, and tokens are those of that node alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.decoding.decode_options import Decode, make_cache_choice
from coordinator.engine.engine import Engine
from coordinator.planning.costs import ChainCosts
from tests.integration.conftest import CHUNK, Models, running
from tests.integration.many import limit_memory, request, solo, together, tokens_of
from tests.integration.test_draft_heads import make_head
from tests.integration.windows import MASKED
from tools.model_types.make import make_type
from worker.compute.drafting import DraftRequest
from worker.drafters.draft_head import HeadDrafter
from worker.drafters.small_model import SmallModel

KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "full": ("qwen3", MASKED, make_cache_choice("full", None)),
    "int8": (
        "qwen3",
        {"config": {"mask_token_id": 90, "head_dim": 32}, "sharpen": 4.0},
        make_cache_choice("int8", None),
    ),
    "rotating": ("qwen3", MASKED, make_cache_choice("rotating", 40)),
    "sliding": ("gemma3_text", {}, make_cache_choice("full", None)),
    "recurrent": ("qwen3_5", {}, make_cache_choice("full", None)),
    "mixed": ("nemotron_h", {}, make_cache_choice("full", None)),  # as "recurrent", which has attention too
    "without attention": ("nemotron-nas", {}, make_cache_choice("full", None)),  # in some layers
    "without values": ("minimax_m3_vl", {}, make_cache_choice("full", None)),  # in some caches
}


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are shorter than it pays, too."""
    monkeypatch.setattr(ChainCosts, "pays_apart", lambda *args: True)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        pytest.param(kind, layers, marks=() if number % 2 == at and kind != "mixed" else pytest.mark.matrix)
        for number, kind in enumerate(KINDS)
        for at, layers in enumerate([(1, 2, 1), (2, 2)])
    ],
    ids=str,
)
async def test_turns_and_requests_side_by_side_get_the_tokens_of_one_node(
    models: Models, tmp_path: Path, kind: str, layers: tuple[int, ...]
) -> None:
    family, arguments, cache = KINDS[kind]
    is_tiny = family in ("qwen3", "gemma3_text")
    folder = models(family, **arguments).folder if is_tiny else make_type(tmp_path / family, family)
    if not is_tiny:
        layers = (*layers[:-1], layers[-1] + 2)
    first = request(tokens_of(90), 9, cache=cache)
    drawn: dict[str, Any] = {"decode": Decode("ngram"), "cache": cache, "temperature": 1.0}
    asked = [first, *(request(tokens_of(20 + 9 * n, n), 8, seed=n, **drawn) for n in range(3))]
    asked += [request(tokens_of(1), 6, cache=cache), request(tokens_of(2), 6, cache=cache)]
    async with running(folder, (sum(layers),)) as chain:
        alone = await solo(chain, asked, chunk=64)
        text = (*first.prompt, *alone[0].tokens, *tokens_of(7, 5))
        follow_up = request(text, 9, cache=cache)
        again = await solo(chain, [follow_up], chunk=64)
    async with running(folder, layers, goal="prompt", is_measured=True) as chain:
        assert chain.answers_alone
        few, many = map(chain.costs.stages_s, (1, 64))  # both were measured: longer chunks are judged by these
        assert all(one != other for one, other in zip(few, many, strict=True))
        found = await together(chain, asked, chunk=16)
        fewest = len(first.prompt) * replace(chain.spec, cache=cache).segment_row_bytes(*chain.plan.prompt_parts[-1])
        assert (await chain.statuses())[-1].sent_bytes > fewest
        async with Engine(chain) as engine:
            turns = [await engine.answer(each, chunk=16) for each in (first, follow_up, follow_up)]
    assert [each.tokens for each in found] == [each.tokens for each in alone]
    assert [each.tokens for each in turns] == [alone[0].tokens, again[0].tokens, again[0].tokens]
    can_be_cut = kind in ("full", "int8", "without attention", "without values")
    assert [each.usage.num_reused for each in turns] == [0, 89, len(text) - 2 if can_be_cut else 89]


async def test_a_prompt_whose_snapshot_does_not_fit_is_computed_by_the_first_node_alone(models: Models) -> None:
    async with running(models("gemma3_text").folder, (2, 2), goal="prompt") as chain:
        limit_memory(chain, 512)
        async with Engine(chain) as engine:
            found = await engine.answer(request(tokens_of(60), 440), chunk=16)
    assert len(found.tokens) == 440


async def test_a_draft_model_reads_prompts_where_it_drafts(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the model itself: a text that it read otherwise would show in drafts that fail."""
    num_read, draft = list[int](), SmallModel.draft

    def note(drafter: SmallModel, requests: Sequence[DraftRequest]) -> list[list[int]]:
        num_read.extend(each.num_known for each in requests if each.is_chunk)
        return draft(drafter, requests)

    monkeypatch.setattr(SmallModel, "draft", note)
    folder = models("qwen3", **MASKED).folder
    asked = [
        request(tokens_of(90, seed), 12, Decode("draft", num_drafts=3), seed=seed, temperature=0.5 * seed)
        for seed in range(2)
    ]
    async with running(folder, (4,)) as chain:
        alone = await solo(chain, [replace(each, decode=Decode()) for each in asked])
    async with running(folder, (1, 2, 1), drafter=folder, goal="prompt") as chain:
        found = await together(chain, asked, chunk=16)
        loaded = [status.weight_bytes for status in await chain.statuses()]
        bare = replace(chain.spec, drafter=None)
        assert loaded[1:] == [bare.shard_bytes(*part) for part in chain.plan.prompt_parts[1:]]
    assert [each.tokens for each in found] == [each.tokens for each in alone]
    assert {held for each in found for held in each.usage.drafts_held} == {1.0}
    assert max(num_read) == 89, "all but the last token, while the other nodes compute"


@pytest.mark.parametrize("kind", ["small model", "head"])
async def test_a_drafter_that_fails_while_it_reads_a_prompt_is_left_out(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("[broadcast_shapes] Shapes cannot be broadcast")

    monkeypatch.setattr(SmallModel if kind == "small model" else HeadDrafter, "draft", fail)
    folder = models("qwen3", **MASKED).folder
    drafter = folder if kind == "small model" else make_head(tmp_path / "head", "dflash")
    asked = request(tokens_of(90), 6, Decode("draft", num_drafts=3))
    async with running(folder, (2, 2), drafter=drafter, goal="prompt") as chain:
        async with Engine(chain) as engine:
            found = await engine.answer(asked, chunk=CHUNK)
        assert chain.most_drafts == 0
        assert (await chain.statuses())[0].weight_bytes == replace(chain.spec, drafter=None).shard_bytes(0, 4)
    assert not found.usage.num_drafts
    assert found.tokens == models("qwen3", **MASKED).tokens(asked.prompt, 6)
