"""How likely given tokens are: the model's own figures, however it is split, whatever happens to the chain, by HTTP."""

import json
import math
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import mlx.core as mx
import pytest
from tokenizers import Tokenizer, processors

from coordinator.api.app import make_app
from coordinator.api.server import Server
from coordinator.cli.score import figures_of
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.options import cluster_options
from coordinator.engine.engine import Engine
from coordinator.engine.inputs import InputProcessor
from coordinator.engine.scores import score_continuations, score_text, windows_of
from coordinator.sessions.output import MIN_LOGPROB, Answer
from coordinator.sessions.request import Request, check_request
from protos.brigade_pb2 import Sampling
from tests.cluster.commands import parse, run_here
from tests.cluster.models import make_talker
from tests.integration.conftest import Models, Whole, running
from tests.integration.many import request, tokens_of
from tests.integration.test_epochs import loaded
from worker.errors import InputError, StageLost
from worker.model.checkpoint import DEMO, open_folder
from worker.model.describe import describe

PROMPT = tokens_of(150)
CHUNK = 64  # rows, so that a prompt goes in several chunks
CLOSE = 1e-5  # nats
MASK = 3  # of the bundled model


def scored(prompt: Sequence[int], begin: int = 1, num_alternatives: int = 0) -> Request:
    return Request(tuple(prompt), 1, Sampling(logprobs=1 + num_alternatives), score_from=begin)


def all_logprobs(model: Whole, tokens: Sequence[int]) -> mx.array:
    """Log-probabilities [N - 1, V] of what follows each token but the last, by mlx-lm in one pass."""
    logits = model.reference.model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def logprobs_of(model: Whole, tokens: Sequence[int], begin: int = 1) -> list[float]:
    """Of the tokens from the one at `begin` on."""
    found = all_logprobs(model, tokens)
    return [found[at - 1, tokens[at]].item() for at in range(begin, len(tokens))]  # type: ignore[misc]


def require_equal(found: Answer, model: Whole, prompt: Sequence[int], begin: int = 1) -> None:
    assert [score.token.token for score in found.scores] == list(prompt[begin:])
    own = logprobs_of(model, prompt, begin)
    assert [score.token.logprob for score in found.scores] == pytest.approx(own, abs=CLOSE)
    best = mx.argmax(all_logprobs(model, prompt), axis=-1).tolist()
    greedy = [best[at - 1] == prompt[at] for at in range(begin, len(prompt))]  # type: ignore[index]
    assert [score.is_greedy for score in found.scores] == greedy


# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "layers"),
    [("qwen3", (4,)), ("qwen3", (1, 3)), ("qwen3", (1, 2, 1)), ("gemma3_text", (1, 2, 1)), ("qwen3_5", (1, 3))],
    ids=str,
)
async def test_scores_are_those_of_the_whole_model(models: Models, family: str, layers: tuple[int, ...]) -> None:
    model = models(family)
    async with running(model.folder, layers) as chain, Engine(chain) as engine:
        require_equal(await engine.answer(scored(PROMPT), chunk=CHUNK), model, PROMPT)


async def test_greedy_tokens_are_known_as_such_and_come_with_alternatives(models: Models) -> None:
    model = models("qwen3")
    prompt = (*tokens_of(5), *model.tokens(tokens_of(5), 8))
    async with running(model.folder, (2, 2)) as chain, Engine(chain) as engine:
        found = await engine.answer(scored(prompt, 5, num_alternatives=3))
    require_equal(found, model, prompt, 5)
    assert all(score.is_greedy for score in found.scores) and len(found.scores) == 8
    best = mx.argsort(-all_logprobs(model, prompt))[4:, :3].tolist()
    assert [[other.token for other in score.token.alternatives] for score in found.scores] == best
    for score in found.scores:
        assert score.token.alternatives[0].logprob == pytest.approx(score.token.logprob)


async def test_what_is_kept_of_others_is_used_up_to_where_scores_begin(models: Models) -> None:
    model = models("qwen3")
    async with running(model.folder, (2, 2)) as chain, Engine(chain) as engine:
        await engine.answer(request(PROMPT, 2))
        found = await engine.answer(scored(PROMPT, 100))
        assert found.usage.num_reused == 99
        require_equal(found, model, PROMPT, 100)
        assert (await engine.answer(scored(PROMPT))).usage.num_reused == 0


async def test_a_prompt_is_scored_together_with_its_answer_or_without_any(models: Models) -> None:
    model = models("qwen3")
    plain = request(PROMPT, 6)
    async with running(model.folder, (2, 2)) as chain, Engine(chain) as engine:
        alone = await engine.answer(plain)
        both = await engine.answer(replace(plain, score_from=1))
        none = await engine.answer(replace(plain, score_from=1, max_tokens=0, eos=frozenset(alone.tokens)))
    assert both.tokens == alone.tokens and len(alone.tokens) == 6
    for found in (both, none):
        require_equal(found, model, PROMPT)
    assert (none.tokens, none.text, none.finish_reason, none.usage.num_generated) == ([], "", "length", 0)


async def test_scores_stand_beside_streams_in_one_frame(models: Models) -> None:
    model = models("qwen3")
    async with running(model.folder, (1, 2, 1)) as chain, Engine(chain) as engine:
        beside = engine.generate(request(tokens_of(9, 3), 40))
        told = [token.token for token in (await anext(beside)).tokens]
        require_equal(await engine.answer(scored(PROMPT)), model, PROMPT)
        told += [token.token async for piece in beside for token in piece.tokens]
    assert told == model.tokens(tokens_of(9, 3), 40)


async def test_each_score_comes_once_though_chains_are_lost(models: Models) -> None:
    model = models("qwen3")
    answer = Answer()
    async with (
        loaded(model.folder, (1, 2, 1)) as cluster,
        Engine(await cluster.open(), when_lost=cluster.open) as engine,
    ):
        async for piece in engine.generate(scored(PROMPT), chunk=CHUNK):
            answer.add(piece)
            if len(answer.scores) == CHUNK:
                engine.chain.end(StageLost("is gone"))
    assert answer.usage.num_recoveries == 1
    require_equal(answer, model, PROMPT)


@pytest.mark.parametrize(("begin", "prompt"), [(0, (1, 2)), (2, (1, 2)), (1, (1,))])
def test_what_follows_nothing_has_no_score(folder: Path, begin: int, prompt: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="at least two tokens"):
        check_request(scored(prompt, begin), describe(open_folder(folder)))


# --- texts, continuations, HTTP -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("scores") / "model")


@asynccontextmanager
async def resident(folder: Path, layers: Sequence[int]) -> AsyncIterator[Engine]:
    """The model on nodes of this process."""
    inputs = await InputProcessor.read(cluster_options(None, str(folder)), needs_text=False)
    cluster = cast(Cluster, SimpleNamespace(trouble="", missing=[], waiting=""))
    async with running(folder, layers) as chain, Engine(chain, inputs=inputs, cluster=cluster) as engine:
        yield engine


@asynccontextmanager
async def served(folder: Path, layers: Sequence[int]) -> AsyncIterator[httpx2.AsyncClient]:
    """The same behind HTTP."""
    async with resident(folder, layers) as engine:
        server = Server(engine.inputs, ["tiny"])
        server.open(engine)
        transport = httpx2.ASGITransport(make_app(server))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


async def test_a_texts_score_is_mlx_lms_in_one_window_or_several(models: Models) -> None:
    model = models("qwen3")
    async with resident(model.folder, (1, 2, 1)) as engine:
        whole = figures_of(await score_text(engine, PROMPT, 200))
        pieces = await score_text(engine, PROMPT, 40)
    mean = sum(logprobs_of(model, PROMPT)) / (len(PROMPT) - 1)
    assert whole["logprob"] / whole["tokens"] == pytest.approx(mean, abs=CLOSE)
    assert whole["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-4)
    in_windows = [
        logprob
        for window in windows_of(len(PROMPT), 40)
        for logprob in logprobs_of(model, PROMPT[window.begin : window.end], window.scored - window.begin)
    ]
    assert [score.token.logprob for score in pieces] == pytest.approx(in_windows, abs=CLOSE)


async def test_continuations_are_scored_after_their_prompt(models: Models) -> None:
    model, prompt = models("qwen3"), PROMPT[:40]
    continuations = [tuple(model.tokens(prompt, 3)), (5,), (7, 8, 9)]
    async with resident(model.folder, (2, 2)) as engine:
        answers = await score_continuations(engine, prompt, continuations)
    for continuation, scores in zip(continuations, answers, strict=True):
        expected = logprobs_of(model, prompt + continuation, len(prompt))
        assert [score.token.logprob for score in scores] == pytest.approx(expected, abs=CLOSE)
    assert [all(score.is_greedy for score in scores) for scores in answers] == [True, False, False]


async def test_scores_by_http(models: Models) -> None:
    model, prompt, labels = models("qwen3"), PROMPT[:40], [(5, 6), (7,)]
    async with served(model.folder, (2, 2)) as client:
        told = await client.post("/v1/score", json={"prompt_tokens": prompt, "continuations": labels})
        wrong = await client.post("/v1/score", json={"prompt_tokens": [], "continuations": labels})
        unread = await client.post("/v1/classify", json={"prompt_tokens": prompt, "labels": ["x"]})
    assert told.status_code == 200, told.text
    for label, score in zip(labels, told.json()["scores"], strict=True):
        assert score["tokens"] == list(label) and score["is_greedy"] is False
        assert score["logprob"] == pytest.approx(sum(logprobs_of(model, prompt + label, 40)), abs=2 * CLOSE)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
    assert unread.status_code == 400 and "no tokenizer" in unread.json()["error"]["message"]


async def test_a_text_after_token_ids_goes_on_without_a_beginning_of_its_own(talker: Path, tmp_path: Path) -> None:
    shutil.copytree(talker, tmp_path, dirs_exist_ok=True)
    words = Tokenizer.from_file(str(talker / "tokenizer.json"))
    words.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    words.save(str(tmp_path / "tokenizer.json"))
    prompt, fox = words.encode("the quick brown").ids, words.encode(" fox", add_special_tokens=False).ids
    assert prompt[0] == 1 != fox[0]
    async with served(tmp_path, (2, 2)) as client:
        asked: list[dict[str, Any]] = [{"prompt": "the quick brown"}, {"prompt_tokens": prompt}]
        for each in asked:
            told = (await client.post("/v1/score", json={**each, "continuations": [" fox"]})).json()
            assert told["scores"][0]["tokens"] == fox


async def test_classes_are_as_likely_as_the_whole_model_says(talker: Path) -> None:
    model, words = Whole(talker), Tokenizer.from_file(str(talker / "tokenizer.json"))
    begin: list[int] = words.encode("the quick brown").ids
    labels = [" fox", " dog", " fox jumps over", "Zürich"]
    sums = [sum(logprobs_of(model, begin + words.encode(each).ids, len(begin))) for each in labels]
    expected = cast(list[float], mx.softmax(mx.array(sums)).tolist())
    async with served(talker, (1, 3)) as client:
        asked: list[dict[str, Any]] = [{"prompt": "the quick brown"}, {"prompt_tokens": begin}]
        answers = [await client.post("/v1/classify", json={**each, "labels": labels}) for each in asked]
    for answer in answers:
        told = answer.json()
        assert [each["label"] for each in told["labels"]] == labels
        assert [each["probability"] for each in told["labels"]] == pytest.approx(expected, abs=CLOSE)
        assert told["label"] == labels[expected.index(max(expected))]


async def test_an_echoed_prompt_is_scored_as_lm_eval_reads_it(talker: Path) -> None:
    """Its model `local-completions` sends token ids, generates a token, and leaves that and the context out."""
    model, words = Whole(talker), Tokenizer.from_file(str(talker / "tokenizer.json"))
    context, text = "the quick brown", "the quick brown fox jumps"
    ids, num_context = words.encode(text).ids, len(words.encode(context).ids)
    expected = logprobs_of(model, ids)
    asked = {"prompt": [ids, ids[:4]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    async with served(talker, (1, 3)) as client:
        whole = (await client.post("/v1/completions", json=asked)).json()
        plain = (await client.post("/v1/completions", json=asked | {"echo": False})).json()
        only = (await client.post("/v1/completions", json=asked | {"prompt": text, "max_tokens": 0})).json()
        first = (await client.post("/v1/completions", json=asked | {"prompt": ids[:1], "max_tokens": 0})).json()
        stream = await client.post("/v1/completions", json=asked | {"prompt": text, "stream": True})
    for choice, answer, length in zip(whole["choices"], plain["choices"], (len(ids), 4), strict=True):
        told = choice["logprobs"]
        assert [len(told[name]) for name in told] == [length + 1] * 4
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert told["token_logprobs"][1:-1] == pytest.approx(expected[: length - 1], abs=CLOSE)
        assert told["token_logprobs"][-1:] == answer["logprobs"]["token_logprobs"]
        assert choice["text"] == words.decode(ids[:length]) + answer["text"] and choice["finish_reason"] == "length"
    told = whole["choices"][0]["logprobs"]
    tokens, likeliest = (told[name][num_context:-1] for name in ("token_logprobs", "top_logprobs"))
    best = mx.argmax(all_logprobs(model, ids), axis=-1).tolist()[num_context - 1 :]  # type: ignore[index]
    is_greedy = [each == token for each, token in zip(best, ids[num_context:], strict=True)]
    assert [each == max(top.values()) for each, top in zip(tokens, likeliest, strict=True)] == is_greedy
    ends = [*told["text_offset"][1:-1], len(text)]
    assert [text[begin:end] for begin, end in zip(told["text_offset"][:-1], ends, strict=True)] == [
        words.decode([token]) for token in ids
    ]
    assert first["error"]["param"] == "prompt" and "at least two tokens" in first["error"]["message"]
    [choice] = only["choices"]
    assert (choice["text"], only["usage"]["completion_tokens"], choice["finish_reason"]) == (text, 0, "length")
    assert choice["logprobs"] == {name: values[:-1] for name, values in told.items()}
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert {name: [each for piece in pieces for each in piece[name]] for name in told} == told


async def test_the_bodies_that_lm_eval_sends_are_answered_as_mlx_lm_would(talker: Path) -> None:
    """As recorded from lm-eval 0.4.13, `local-completions`: token ids in batches, or a text that begins with EOS."""
    model, words = Whole(talker), Tokenizer.from_file(str(talker / "tokenizer.json"))
    scored = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    free = {"model": "tiny", "max_tokens": 12, "temperature": 0, "stop": ["."], "seed": 1234}
    batch = [[291, 306, 74, 14, 310, 305, 14, 283, 288], [271, 91, 287, 16, 261, 290, 283, 288], [316, 290, 286, 287]]
    text = "<end>Zürich, naïve, 日本語, 😀 and one two three four five"
    async with served(talker, (1, 3)) as client:
        bodies = [scored | {"prompt": batch}, scored | {"prompt": text}, free | {"prompt": batch}]
        many, one, written = [(await client.post("/v1/completions", json=body)).json()["choices"] for body in bodies]
    for choice, ids in zip([*many, *one], [*batch, words.encode(text).ids], strict=True):
        told = choice["logprobs"]["token_logprobs"][1:-1]
        assert told == pytest.approx(logprobs_of(model, ids), abs=CLOSE) and len(told) == len(ids) - 1
    for choice, ids in zip(written, batch, strict=True):
        whole = words.decode(model.tokens(ids, 12)).partition(".")[0]
        assert choice["text"].rstrip("\ufffd") == whole.rstrip("\ufffd") and whole.startswith(choice["text"])


async def test_a_token_that_can_never_come_has_scores_of_json() -> None:
    """MASK of the bundled model, whose logit is minus infinity."""
    labels = ["<|mask|>", "<|mask|><|mask|>"]
    async with served(DEMO, (8,)) as client:
        scores = await client.post("/v1/score", json={"prompt_tokens": [5], "continuations": [[MASK]]})
        classes = await client.post("/v1/classify", json={"prompt": "the", "labels": labels})
    assert scores.status_code == classes.status_code == 200, (scores.text, classes.text)
    assert scores.json()["scores"] == [
        {"logprob": MIN_LOGPROB, "is_greedy": False, "tokens": [MASK], "logprobs": [MIN_LOGPROB]}
    ]
    assert [each["probability"] for each in classes.json()["labels"]] == [1.0, 0.0]


def test_a_text_with_a_token_that_can_never_come_has_no_perplexity() -> None:
    arguments = ("score", "--model", "demo", "--local", "0")
    found = parse(run_here(*arguments, "--json", stdin="a<|mask|>"))
    assert found == {"tokens": 1, "logprob": MIN_LOGPROB, "perplexity": None}
    told = run_here(*arguments, stdin="a<|mask|>")
    assert told.code == 0 and told.out == "perplexity: overflow, log-probability -9999.000 of 1 token\n", told.err
