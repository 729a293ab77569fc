"""Drafts of a small model on the last stage: the tokens and logprobs of `ar`, in fewer steps where drafts hold."""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment, OwnNode
from coordinator.cluster.open import check_drafter
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine, generate_once
from coordinator.planning.plan import Node
from coordinator.planning.planner import Objective, plan
from coordinator.planning.speeds import NO_SPEEDS
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Frame, Opening, Result, Sampling, Window
from tests.integration.conftest import CHUNK, Layers, Models, Pass, opened, opened_folder, running, serving
from tests.integration.many import Live, request, together, tokens_of, until
from tests.integration.many import frames as frames
from tests.integration.many import two_lanes as two_lanes
from tests.integration.test_epochs import answer_over_a_loss
from tests.integration.windows import BIASED, SAMPLINGS, Bench, assert_same_samples
from worker.compute.executor import Executor
from worker.compute.shard import Shard
from worker.drafters import small_model
from worker.drafters.small_model import ReadText, SmallModel
from worker.errors import FrameError, InputError
from worker.memory.history import History
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.node import lifecycle
from worker.node.model_sources import ModelSources
from worker.node.weights_cache import WeightsCache

FAMILIES = ("qwen3", "llama", "gemma3_text", "qwen3_moe", "qwen3_5")
SPLITS = ((4,), (1, 3), (2, 1, 1))
COUNTS = (1, 3, 7, 15)
FEWER = ("greedy", "of the field")  # of `SAMPLINGS`; all of them in the matrix
N = 20
cases = pytest.mark.parametrize(
    ("family", "layers", "names"),
    [
        ("qwen3_5", (2, 1, 1), FEWER),
        *(
            pytest.param(family, layers, tuple(SAMPLINGS), marks=pytest.mark.matrix)
            for family in FAMILIES
            for layers in SPLITS
        ),
    ],
)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[ReadText]:
    """All that drafters begin to read anew."""
    found, make = list[ReadText](), ReadText.__init__

    def note(text: ReadText, *arguments: Any, **more: Any) -> None:
        found.append(text)
        make(text, *arguments, **more)

    monkeypatch.setattr(ReadText, "__init__", note)
    return found


def model_of(models: Models, family: str) -> Path:
    return models(family, **({} if family == "qwen3_5" else {"sharpen": 4.0})).folder


def foreign(models: Models) -> Path:
    """A small model whose drafts hold now and then at most."""
    return models("llama", seed=5, sharpen=4.0).folder


async def answer(chain: Chain, decode: Decode, sampling: Sampling, num_tokens: int = N) -> Answer:
    return await generate_once(chain, Request(tokens_of(CHUNK + 3), num_tokens, sampling, decode), chunk=CHUNK)


async def plain(chain: Chain, each: Request) -> Answer:
    """The answer one token at a time."""
    return await generate_once(chain, replace(each, decode=Decode("ar")), chunk=CHUNK)


def least_steps(num_tokens: int, count: int) -> int:
    return 1 + -(-(num_tokens - 1) // (count + 1))


@cases
async def test_a_drafter_that_is_the_model_has_every_draft_accepted(
    models: Models, family: str, layers: Layers, names: Sequence[str]
) -> None:
    folder = model_of(models, family)
    async with running(folder, layers, drafter=folder) as chain:
        for name in names:
            sampling = SAMPLINGS[name]
            expected = await answer(chain, Decode("ar"), sampling)
            for count in COUNTS if len(names) > len(FEWER) or name == "greedy" else (7,):
                found = await answer(chain, Decode("draft", num_drafts=count), sampling)
                assert_same_samples(found, expected, f"{name} {count}")
                assert found.usage.num_steps == least_steps(len(expected.tokens), count), (name, count)
                assert set(found.usage.drafts_held) == {1.0} and len(found.usage.drafts_held) <= count


@cases
async def test_a_foreign_drafter_changes_no_token(
    models: Models, family: str, layers: Layers, names: Sequence[str]
) -> None:
    async with running(model_of(models, family), layers, drafter=foreign(models)) as chain:
        for name in names:
            sampling = SAMPLINGS[name]
            expected = await answer(chain, Decode("ar"), sampling)
            found = await answer(chain, Decode("draft", num_drafts=3), sampling)
            assert_same_samples(found, expected, name)
        found = await answer(chain, Decode("draft", num_drafts=COUNTS[-1]), SAMPLINGS["greedy"])
        assert found.tokens == (await answer(chain, Decode("ar"), SAMPLINGS["greedy"])).tokens
        held = found.usage.drafts_held
        assert len(held) == COUNTS[-1] and all(0 <= share < 0.9 for share in held)


async def test_a_recurrent_drafter_returns_to_the_state_before_its_drafts(models: Models) -> None:
    small, sampling = models("qwen3_5", seed=3).folder, SAMPLINGS["biased"]
    async with running(model_of(models, "qwen3"), (2, 2), drafter=small) as chain:
        expected = await answer(chain, Decode("ar"), sampling)
        for count in (1, 7):
            found = await answer(chain, Decode("draft", num_drafts=count), sampling)
            assert_same_samples(found, expected, str(count))
            assert found.usage.num_steps < N, "some drafts hold"


async def test_auto_drafts_and_stops_where_that_does_not_pay(models: Models) -> None:
    """Both with drafts that hold and with drafts that never do, and from the text where its match is long."""
    folder = model_of(models, "qwen3")
    for drafter in (folder, foreign(models)):
        async with running(folder, (1, 3), drafter=drafter) as chain:
            for name in ("biased", "penalties"):
                expected = await answer(chain, Decode("ar"), SAMPLINGS[name])
                assert_same_samples(await answer(chain, Decode("draft"), SAMPLINGS[name]), expected, name)


BIAS = dict(BIASED.logit_bias)
SIDE_BY_SIDE = [
    request(tokens_of(11, 1), 12),
    request(tokens_of(6, 4) * 5, 18, Decode("draft", num_drafts=3), logit_bias=BIAS),
    request(tokens_of(25, 7), 12, Decode("draft", num_drafts=7), seed=3, temperature=1.0, repetition_penalty=1.2),
    request(tokens_of(9, 2) * 3, 12, Decode("ngram")),
    request(tokens_of(19, 6), 12, Decode("draft", num_drafts=1), seed=2, temperature=0.7, logprobs=3),
]


async def assert_equal_side_by_side(chain: Chain, requests: Sequence[Request] = SIDE_BY_SIDE) -> None:
    alone = [await plain(chain, each) for each in requests]
    assert [each.tokens for each in await together(chain, requests)] == [each.tokens for each in alone]


@pytest.mark.usefixtures("two_lanes")
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("qwen3", "foreign"),
        pytest.param("qwen3", "itself", marks=pytest.mark.matrix),
        *(pytest.param("qwen3_5", each, marks=pytest.mark.matrix) for each in ("itself", "foreign")),
    ],
)
async def test_unequal_drafts_share_a_lane(models: Models, passes: list[Pass], family: str, drafter: str) -> None:
    folder = model_of(models, family)
    async with running(folder, (1, 2, 1), drafter=folder if drafter == "itself" else foreign(models)) as chain:
        await assert_equal_side_by_side(chain)
    assert any(len(each.rows) > 1 and max(each.rows) > 1 for each in passes), "no drafts in a lane"


async def test_a_conversation_goes_on_with_what_its_drafter_has_read(models: Models) -> None:
    """The next turn is a copy of the last one's slot, or takes it over; a request without drafts may be its source."""
    folder = model_of(models, "qwen3")
    async with running(folder, (2, 2), drafter=folder) as chain:
        for first_decode in (Decode("draft", num_drafts=7), Decode("ar")):
            async with Engine(chain) as engine:
                first = request(tokens_of(24), 12, first_decode)
                text = (*first.prompt, *(await engine.answer(first)).tokens)
                turns = [request((*text, *extra), 10, Decode("draft", num_drafts=7)) for extra in ((7, 8), (7, 9), ())]
                found = [await engine.answer(each) for each in turns]
            for turn, each in zip(turns, found, strict=True):
                assert each.tokens == (await plain(chain, turn)).tokens
                assert each.usage.num_reused >= len(text) - 8
                assert each.usage.num_steps == least_steps(10, 7)


async def test_a_drafter_is_sent_kept_on_disk_and_released_by_a_chain_without(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a node was lost and took its drafter along: the chain goes on without, step by step."""
    limited = list[int]()
    monkeypatch.setattr(lifecycle, "keep_within", lambda memory_bytes, weight_bytes: limited.append(weight_bytes))
    folder, small = model_of(models, "qwen3"), foreign(models)
    store, draft, weights = WeightsCache(tmp_path), Decode("draft", num_drafts=3), list[int]()
    async with serving(1, ModelSources(str(folder)), store_of=lambda name: store) as nodes:
        for drafter in (small, small, None):
            async with opened(folder, (1, 3), nodes, drafter=drafter) as chain:
                found, expected = [await answer(chain, decode, Sampling(), 9) for decode in (draft, Decode("ar"))]
                assert found.tokens == expected.tokens and bool(found.usage.drafts_held) is bool(drafter)
                weights.append((await chain.statuses())[1].weight_bytes)
                assert weights[-1] == chain.plan.assignments[1].weight_bytes
                assert not drafter or limited[-1] == weights[-1], "MLX's limits leave room for all of them"
        assert nodes[0].service.worker.status().weight_bytes == weights[2] < weights[1]


async def test_the_last_stage_holds_no_more_than_is_planned_and_reserved(models: Models) -> None:
    """Nor for short forks of a long text, of which a drafter copies the whole."""
    folder = models("qwen3", config={"max_position_embeddings": 4000}, sharpen=4.0).folder
    async with running(folder, (1, 3), drafter=folder) as chain, Engine(chain) as engine:

        async def require_kept() -> None:
            assert 0 < (await chain.statuses())[1].cache_bytes <= engine.scheduler.slots.reserved[1]

        live = [Live(engine, request(tokens_of(200 + at, at), 24, Decode("draft", num_drafts=15))) for at in range(3)]
        for each in live:
            await each.answer()
        await require_kept()
        await engine.answer(request(tokens_of(900, 3), 4, Decode("draft", num_drafts=7)), chunk=256)
        for number in (1, 2, 3):
            fork = (*tokens_of(900, 3)[:30], *tokens_of(5, number))
            found = await engine.answer(request(fork, 9, Decode("draft", num_drafts=7)))
            assert found.usage.num_reused >= 30 and found.usage.num_steps == least_steps(9, 7)
            await require_kept()


@pytest.mark.parametrize("drafter", ["itself", "foreign"])
async def test_a_lost_chain_goes_on_with_drafts_and_the_same_tokens(models: Models, drafter: str) -> None:
    folder = model_of(models, "qwen3")
    each = request(tokens_of(20), 32, Decode("draft", num_drafts=3), seed=4, temperature=0.8)
    async with running(folder, (2, 2)) as chain:
        expected = await plain(chain, each)
    found = await answer_over_a_loss(folder, (2, 2), each, 10, folder if drafter == "itself" else foreign(models))
    assert found.tokens == expected.tokens
    assert drafter == "foreign" or set(found.usage.drafts_held) == {1.0}


async def test_windows_that_ask_for_impossible_drafts_are_refused(models: Models) -> None:
    folder = model_of(models, "qwen3")
    prefix_hash = History().prefix_hash(0)
    for wrong in ({"wanted": 0}, {"masks": 1, "guessed": 1}, {"to_draft": 300}):
        async with running(folder, (1, 3)) as chain:
            window = Window(**{"prefix_hash": prefix_hash, "tokens": [1], "wanted": 1, "to_draft": 2, **wrong})
            with pytest.raises(FrameError, match="drafts, after sampled rows and without MASK or canvas rows"):
                await Bench(chain).send([window], [Opening(slot=0)])


def test_a_drafter_of_another_tokenizer_is_refused_by_the_first_difference(models: Models, tmp_path: Path) -> None:
    folder = model_of(models, "qwen3")

    def with_vocabulary(*tokens: str) -> Path:
        """A copy of the model with a tokenizer of these tokens."""
        copy = Path(shutil.copytree(folder, tmp_path / "-".join(tokens)))
        vocab = {token: number for number, token in enumerate(tokens)}
        (copy / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}, "added_tokens": []}))
        return copy

    own = with_vocabulary("a", "b", "c")
    check_drafter(opened_folder(own, with_vocabulary("a", "b", "c", "and one more")))
    for other, message in (
        (with_vocabulary("a", "x", "c"), "first difference: token 1, 'b' and 'x'"),
        (folder, "has another one$"),
    ):
        with pytest.raises(InputError, match=message) as refusal:
            check_drafter(opened_folder(own, other))
        assert refusal.value.field == "draft_model"


async def test_a_sliding_drafter_goes_on_after_rejected_drafts(models: Models, texts: list[ReadText]) -> None:
    """It keeps its caches when rows slide out, which they do at 256."""
    small = models("gemma3_text", seed=4).folder
    each = request(tokens_of(225), 60, Decode("draft", num_drafts=7), logit_bias=BIAS, seed=2, temperature=3.0)
    async with running(model_of(models, "qwen3"), (2, 2), drafter=small) as chain:
        ar = replace(each, decode=Decode("ar"))
        expected, found = [await generate_once(chain, asked, chunk=64) for asked in (ar, each)]
    assert found.tokens == expected.tokens and found.usage.drafts_held[0] < 1
    assert len(texts) == 1


async def test_a_text_that_the_drafter_lacks_is_read_in_steps(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source had no drafts: until all of it is read none are made."""
    monkeypatch.setattr(small_model, "CHUNK", 16)
    monkeypatch.setattr(small_model, "MOST_READ", 64)
    folder, text = model_of(models, "qwen3"), tokens_of(100)
    async with running(folder, (2, 2), drafter=folder) as chain, Engine(chain) as engine:
        await engine.answer(request(text, 2))
        found = await engine.answer(request((*text, 5), 40, Decode("draft", num_drafts=7)))
        expected = await engine.answer(request((*text, 5), 40))
    assert found.tokens == expected.tokens and found.usage.num_reused >= len(text)
    assert least_steps(40, 7) < found.usage.num_steps <= least_steps(40, 7) + 2


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_drafts_after_any_rejection_are_those_of_a_drafter_that_reads_the_known_tokens_anew(
    models: Models, family: str, texts: list[ReadText]
) -> None:
    sharp = {} if family == "qwen3_5" else {"sharpen": 4.0}
    checkpoint, small = open_folder(model_of(models, "qwen3")), open_folder(models(family, seed=5, **sharp).folder)
    spec = describe(checkpoint)
    shard, own = Shard(checkpoint, 0, spec.num_layers), Shard(small, 0, describe(small).num_layers)
    sampling = Sampling(seed=2, temperature=0.5, logit_bias=dict.fromkeys(range(8), 40.0))

    def opened_executor() -> Executor:
        drafter = SmallModel(own, spec.vocab_size, spec.mask_token)
        executor = Executor(shard, 0, spec.dtype, drafter=drafter)
        executor.step(Frame(opened=[Opening(slot=0, sampling=sampling, drafted=True)]), received=0)
        return executor

    def run(executor: Executor, known: History, tokens: Sequence[int], num_drafts: int, count: int) -> list[list[int]]:
        """Feed these tokens after the known ones, the last of which are drafts; return samples and new drafts."""
        base = len(known)
        window = Window(base=base, prefix_hash=known.prefix_hash(base), tokens=tokens, wanted=1 + num_drafts)
        window.to_draft = count
        result = executor.step(Frame(windows=[window]), received=0)
        assert isinstance(result, Result) and not result.failures
        return [[sample.token for sample in of] for of in (result.samples, result.guesses)]

    numbers, executor, history, drafts = random.Random(1), opened_executor(), History(), list[int]()
    unfed = list(tokens_of(20))
    num_held = 0
    for _ in range(15):
        count = numbers.choice([1, 3, 7])
        samples, guesses = run(executor, history, [*unfed, *drafts], len(drafts), count)
        held = next((at for at, token in enumerate(drafts) if token != samples[at]), len(drafts))
        history.extend([*unfed, *drafts[:held]])
        fresh = opened_executor()
        assert run(fresh, History(), history.tokens, 0, count) == [[samples[held]], guesses]
        fresh.close()
        unfed, drafts, num_held = [samples[held]], guesses, num_held + held
    executor.close()
    assert 0 < num_held < 15 * 5, "some drafts hold, some do not"
    assert len(texts) == 1 + 15, "no text began anew but those to compare with"


DRAFT = Decode("draft", num_drafts=3)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def fail(*_: Any) -> None:
        raise ValueError("[broadcast_shapes] Shapes cannot be broadcast")

    monkeypatch.setattr(SmallModel, "draft", fail)
    return monkeypatch


async def tokens_by(chain: Chain, decode: Decode) -> list[int]:
    return (await generate_once(chain, request(tokens_of(9), 20, decode))).tokens


async def test_its_worker_frees_its_weights_and_the_next_chain_drafts_again(
    models: Models, failing: pytest.MonkeyPatch, frames: list[Frame]
) -> None:
    folder = models("qwen3", sharpen=4.0).folder
    async with serving(1) as nodes:
        async with opened(folder, (1, 3), nodes, drafter=folder) as chain:
            expected, layers = await tokens_by(chain, Decode("ar")), chain.plan.assignments[1].weight_bytes
            drafter = (await chain.statuses())[1].weight_bytes - nodes[0].service.worker.shard.nbytes  # type: ignore[union-attr]
            assert await tokens_by(chain, DRAFT) == expected
            frames.clear()
            assert await tokens_by(chain, DRAFT) == expected
            assert chain.most_drafts == 0
            assert not any(window.to_draft for frame in frames for window in frame.windows)
            assert (await chain.statuses())[1].weight_bytes == layers - drafter
        await until(lambda: not nodes[0].service.worker.attachment)
        assert nodes[0].service.worker.status().weight_bytes == layers - drafter
        failing.undo()
        async with opened(folder, (1, 3), nodes, drafter=folder) as chain:
            assert (await generate_once(chain, request(tokens_of(9), 20, DRAFT))).usage.num_steps < 10


async def test_the_coordinator_frees_it_too_and_says_why_it_failed(models: Models, failing: pytest.MonkeyPatch) -> None:
    folder, lines = models("qwen3", sharpen=4.0).folder, list[str]()
    checkpoint = opened_folder(folder, Path(folder))
    spec = describe(checkpoint)
    whole = plan(spec, [Node("coordinator", 1 << 40)], NO_SPEEDS, Objective(128))
    deployment = Deployment(checkpoint, whole, [])
    async with OwnNode() as own, Chain(own, deployment, say=lines.append) as chain:
        await own.load(deployment)
        await chain.open()
        assert own.part is not None
        for _ in range(2):
            await tokens_by(chain, DRAFT)
        assert own.part is None and own.shard is not None and chain.most_drafts == 0
        assert chain.own_status is not None and chain.own_status.weight_bytes == own.shard.nbytes
    assert lines == [
        "the drafter failed; the chain goes on without drafts: ValueError: "
        "[broadcast_shapes] Shapes cannot be broadcast"
    ]
