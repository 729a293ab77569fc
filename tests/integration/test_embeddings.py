"""Embeddings: the states behind the final norm are the whole model's, however it is split, beside streams, by HTTP."""

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from coordinator.engine.embeddings import Pooling, embed, read_pooling
from coordinator.engine.engine import Engine
from coordinator.sessions.output import Output
from coordinator.sessions.request import PoolingKind, Request
from tests.cluster.models import make_talker
from tests.integration.conftest import Models, Whole, running
from tests.integration.many import request, tokens_of
from tests.integration.test_epochs import loaded
from tests.integration.test_scores import resident, served
from tests.tiny import change_json
from worker.errors import InputError, StageLost
from worker.model.checkpoint import open_folder

PROMPT = tokens_of(150)
CHUNK = 64  # rows, so that a prompt goes in several chunks
CLOSE = 1e-5
CONTEXT = 256  # tokens
MEAN, LAST = 0, len(PROMPT) - 1
TEXTS = ["the quick brown fox", "Zürich", "one two three four five " * 9]


def states(model: Whole, tokens: Sequence[int]) -> Any:
    """The states [L, D] behind the final norm, by mlx-lm in one pass."""
    return np.array(model.reference.model.model(mx.array([tokens]))[0].astype(mx.float32))


def pooled(outputs: Sequence[Output]) -> Any:
    return np.sum([np.frombuffer(each, "<f4") for output in outputs for each in output.pooled], axis=0)


def pooling(prompt: Sequence[int], begin: int) -> Request:
    return Request(tuple(prompt), 0, pool_from=begin)


async def answered(engine: Engine, each: Request) -> list[Output]:
    return [output async for output in engine.generate(each, chunk=CHUNK)]


@pytest.mark.parametrize(
    ("family", "layers"),
    [("qwen3", (4,)), ("qwen3", (1, 2, 1)), ("gemma3_text", (1, 2, 1)), ("qwen3_5", (1, 3))],
    ids=str,
)
async def test_sums_are_the_whole_models_beside_a_stream(models: Models, family: str, layers: tuple[int, ...]) -> None:
    model, beside = models(family), tokens_of(9, 3)
    async with running(model.folder, layers) as chain, Engine(chain) as engine:
        stream = engine.generate(request(beside, 40))
        told = [token.token for token in (await anext(stream)).tokens]
        found = [await answered(engine, pooling(PROMPT, begin)) for begin in (MEAN, LAST, LAST)]
        told += [token.token async for output in stream for token in output.tokens]
        assert engine.scheduler.slots.num_kept == 1, "only the stream's prefix is kept"
    assert told == model.tokens(beside, 40)
    whole = states(model, PROMPT)
    for outputs, expected in zip(found, (whole.sum(axis=0), whole[-1], whole[-1]), strict=True):
        assert pooled(outputs) == pytest.approx(expected, abs=len(PROMPT) * CLOSE, rel=CLOSE)
        assert not any(output.tokens for output in outputs)


async def test_each_row_counts_once_though_chains_are_lost_and_prefixes_reused(models: Models) -> None:
    model, outputs = models("qwen3"), list[Output]()
    async with (
        loaded(model.folder, (1, 2, 1)) as cluster,
        Engine(await cluster.open(), when_lost=cluster.open) as engine,
    ):
        async for output in engine.generate(pooling(PROMPT, MEAN), chunk=CHUNK):
            if not outputs:
                engine.chain.end(StageLost("is gone"))
            outputs.append(output)
        await engine.answer(request(PROMPT, 2))
        last = await answered(engine, pooling(PROMPT, LAST))
        again = await answered(engine, pooling(PROMPT, MEAN))
    assert outputs[-1].usage is not None and outputs[-1].usage.num_recoveries == 1
    assert last[-1].usage is not None and last[-1].usage.num_reused == LAST
    whole = states(model, PROMPT)
    assert pooled(last) == pytest.approx(whole[-1], abs=CLOSE)
    for found in (outputs, again):
        assert pooled(found) == pytest.approx(whole.sum(axis=0), abs=len(PROMPT) * CLOSE, rel=CLOSE)


def write_pooling(folder: Path, modes: dict[str, Any] | None, *types: str, **config: Any) -> Path:
    """Say how the model embeds, as sentence-transformers does."""
    if modes is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    if types:
        modules = [{"idx": k, "type": f"sentence_transformers.models.{name}"} for k, name in enumerate(types)]
        (folder / "modules.json").write_text(json.dumps(modules))
    change_json(folder / "config.json", **config)
    return folder


async def test_all_texts_of_a_request_are_embedded_though_the_engine_drains(models: Models) -> None:
    texts = [tokens_of(3 + number % 8, number) for number in range(20)]  # more than go at once
    async with resident(models("qwen3").folder, (4,)) as engine:
        embedding = asyncio.create_task(embed(engine, texts, Pooling("mean")))
        while not engine.sessions:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        assert await engine.drain(60)
        assert [count for _, count in await embedding] == [len(text) for text in texts]


async def test_embeddings_by_http_follow_the_models_own_files(tmp_path: Path) -> None:
    modes = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False, "word_embedding_dimension": 64}
    types = ("Transformer", "Pooling", "Normalize")
    config = {"matryoshka_dimensions": [16, 32], "max_position_embeddings": CONTEXT}
    folder = write_pooling(make_talker(tmp_path / "model"), modes, *types, **config)
    model, words = Whole(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [words.encode(text).ids for text in TEXTS]
    means = [states(model, each).mean(axis=0) for each in ids]
    async with served(folder, (1, 3)) as client:
        bodies: list[dict[str, Any]] = [
            {"input": TEXTS}, {"input": ids}, {"input": TEXTS, "encoding_format": "base64", "dimensions": 16},
        ]  # fmt: skip
        plain, by_id, cut = [(await client.post("/v1/embeddings", json=body)).json() for body in bodies]
        one = (await client.post("/v1/embeddings", json={"input": TEXTS[0], "model": "tiny"})).json()
        full = await client.post("/v1/embeddings", json={"input": CONTEXT * [5]})
        over = await client.post("/v1/embeddings", json={"input": (CONTEXT + 1) * [5]})
        odd = await client.post("/v1/embeddings", json={"input": TEXTS, "dimensions": 17})
        long = await client.post("/v1/embeddings", json={"input": "a b " * 40_000})
        none = await client.post("/v1/embeddings", json={"input": [[]]})
        second = await client.post("/v1/embeddings", json={"input": ["a", []]})
    assert plain["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    for number, same in enumerate([*by_id["data"], one["data"][0]]):  # other frames, and so other roundings
        assert same["embedding"] == pytest.approx(plain["data"][number % len(TEXTS)]["embedding"], abs=CLOSE)
    whole = states(model, CONTEXT * [5]).mean(axis=0)
    assert full.json()["data"][0]["embedding"] == pytest.approx(whole / np.linalg.norm(whole), abs=CLOSE)
    for number, mean in enumerate(means):
        assert plain["data"][number]["index"] == number
        assert plain["data"][number]["embedding"] == pytest.approx(mean / np.linalg.norm(mean), abs=CLOSE)
        short = np.frombuffer(base64.b64decode(cut["data"][number]["embedding"]), "<f4")
        assert short == pytest.approx(mean[:16] / np.linalg.norm(mean[:16]), abs=CLOSE)
    for refused, param in ((odd, "dimensions"), (long, "input"), (over, "input"), (none, "input"), (second, "input.1")):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("modes", "types", "found"),
    [
        ({"pooling_mode_lasttoken": True}, ("Transformer", "Pooling"), ("last", False)),
        ({"pooling_mode": "mean"}, (), ("mean", True)),
        ({"pooling_mode_cls_token": True}, (), None),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, (), None),
        ({"pooling_mode_mean_tokens": True}, ("Transformer", "Pooling", "Dense"), None),
        (None, ("Transformer",), None),
        ([1], (), None),
    ],
)
def test_a_model_that_pools_in_another_way_is_refused(
    tmp_path: Path, modes: Any, types: tuple[str, ...], found: tuple[str, bool] | None
) -> None:
    folder = write_pooling(make_talker(tmp_path / "model"), modes, *types)
    if found is None:
        with pytest.raises(InputError) as refused:
            read_pooling(open_folder(folder), 64)
        assert refused.value.field == "model"
    else:
        read = read_pooling(open_folder(folder), 64)
        assert (read.kind, read.is_normalised) == found
        assert read_pooling(open_folder(folder), 64, "mean").kind == "mean"


@pytest.mark.parametrize(
    ("config", "is_read"),
    [
        ({"is_causal": True, "use_bidirectional_attention": False}, True),
        ({"is_causal": False}, False),
        ({"text_config": {"is_causal": False}}, False),
        ({"use_bidirectional_attention": True}, False),
        ({"text_config": {"use_bidirectional_attention": "all"}}, False),
    ],
    ids=str,
)
def test_a_model_that_was_trained_with_attention_in_both_directions_is_refused(
    tmp_path: Path, config: dict[str, Any], is_read: bool
) -> None:
    folder = write_pooling(make_talker(tmp_path / "model"), {"pooling_mode": "mean"}, **config)
    kinds: tuple[PoolingKind | None, ...] = (None, "mean")
    for chosen in kinds:
        if is_read:
            assert read_pooling(open_folder(folder), 64, chosen).kind == "mean"
        else:
            with pytest.raises(InputError) as refused:
                read_pooling(open_folder(folder), 64, chosen)
            assert refused.value.field == "model"
