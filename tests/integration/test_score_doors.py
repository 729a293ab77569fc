"""The doors to scores: long texts in windows, continuations of a prompt, by HTTP; mlx-lm's own loss on every split."""

import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import mlx.core as mx
import mlx.nn as nn
import pytest
from tokenizers import Tokenizer

from coordinator.api.app import make_app
from coordinator.api.server import Server
from coordinator.cli.score import figures_of
from coordinator.cluster.cluster import Cluster
from coordinator.engine.engine import Engine
from coordinator.engine.inputs import InputProcessor
from coordinator.engine.scores import score_continuations, score_text, windows_of
from coordinator.sessions.output import MIN_LOGPROB
from tests.cluster.commands import parse, run_here
from tests.cluster.models import make_talker
from tests.integration.conftest import Models, Whole, running
from tests.integration.many import tokens_of
from worker.model.checkpoint import DEMO

CLOSE = 1e-5  # nats
TEXT = tokens_of(150)
MASK = 3  # of the bundled model


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("doors") / "model")


@asynccontextmanager
async def resident(folder: Path, layers: Sequence[int]) -> AsyncIterator[Engine]:
    """The model on nodes of this process."""
    frontend = await InputProcessor.read(str(folder), needs_text=False)
    cluster = cast(Cluster, SimpleNamespace(trouble="", missing=[], waiting=""))
    async with running(folder, layers) as chain, Engine(chain, inputs=frontend, cluster=cluster) as engine:
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


def losses(model: Whole, tokens: Sequence[int]) -> list[float]:
    """Of each token but the first, as mlx-lm trains by them."""
    inputs, targets = mx.array([tokens[:-1]]), mx.array([tokens[1:]])
    found = nn.losses.cross_entropy(model.reference.model(inputs).astype(mx.float32), targets)
    return cast(list[float], found[0].tolist())


async def test_a_texts_loss_is_mlx_lms(models: Models) -> None:
    model = models("qwen3")
    async with resident(model.folder, (1, 2, 1)) as engine:
        whole = figures_of(await score_text(engine, TEXT, 200))
        pieces = await score_text(engine, TEXT, 40)
    expected = losses(model, TEXT)
    assert -whole["logprob"] / whole["tokens"] == pytest.approx(sum(expected) / len(expected), abs=CLOSE)
    assert whole["perplexity"] == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-4)
    windows = windows_of(len(TEXT), 40)
    in_windows = [
        loss
        for window in windows
        for loss in losses(model, TEXT[window.begin : window.end])[window.scored - window.begin - 1 :]
    ]
    assert [-score.token.logprob for score in pieces] == pytest.approx(in_windows, abs=CLOSE)


async def test_continuations_are_scored_after_their_prompt(models: Models) -> None:
    model = models("qwen3")
    prompt = TEXT[:40]
    greedy = tuple(model.tokens(prompt, 3))
    async with resident(model.folder, (2, 2)) as engine:
        answers = await score_continuations(engine, prompt, [greedy, (5,), (7, 8, 9)])
    for continuation, scores in zip([greedy, (5,), (7, 8, 9)], answers, strict=True):
        expected = losses(model, prompt + continuation)[len(prompt) - 1 :]
        assert [-score.token.logprob for score in scores] == pytest.approx(expected, abs=CLOSE)
    assert [all(score.is_greedy for score in scores) for scores in answers] == [True, False, False]


async def test_scores_and_classes_by_http(models: Models) -> None:
    model = models("qwen3")
    prompt, labels = TEXT[:40], [(5, 6), (7,)]
    async with served(model.folder, (2, 2)) as client:
        told = await client.post("/v1/score", json={"prompt_tokens": prompt, "continuations": labels})
        wrong = await client.post("/v1/score", json={"prompt_tokens": [], "continuations": labels})
        unread = await client.post("/v1/classify", json={"prompt_tokens": prompt, "labels": ["x"]})
    assert told.status_code == 200, told.text
    for label, score in zip(labels, told.json()["scores"], strict=True):
        assert score["tokens"] == list(label) and score["is_greedy"] is False
        expected = -sum(losses(model, prompt + label)[len(prompt) - 1 :])
        assert score["logprob"] == pytest.approx(expected, abs=2 * CLOSE)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
    assert unread.status_code == 400 and "no tokenizer" in unread.json()["error"]["message"]


async def test_classes_are_as_likely_as_the_whole_model_says(talker: Path) -> None:
    model, words = Whole(talker), Tokenizer.from_file(str(talker / "tokenizer.json"))
    begin: list[int] = words.encode("the quick brown").ids
    labels = [" fox", " dog", " fox jumps over", "Zürich"]
    expected = probabilities([-sum(losses(model, begin + words.encode(each).ids)[len(begin) - 1 :]) for each in labels])
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
    expected = [-loss for loss in losses(model, ids)]
    asked = {"prompt": [ids, ids[:4]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    async with served(talker, (1, 3)) as client:
        whole = (await client.post("/v1/completions", json=asked)).json()
        plain = (await client.post("/v1/completions", json=asked | {"echo": False})).json()
        only = (await client.post("/v1/completions", json=asked | {"prompt": text, "max_tokens": 0})).json()
        stream = await client.post("/v1/completions", json=asked | {"prompt": text, "stream": True})
    for choice, answer, length in zip(whole["choices"], plain["choices"], (len(ids), 4), strict=True):
        told = choice["logprobs"]
        assert [len(told[name]) for name in told] == [length + 1] * 4
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert told["token_logprobs"][1:-1] == pytest.approx(expected[: length - 1], abs=CLOSE)
        assert told["token_logprobs"][-1:] == answer["logprobs"]["token_logprobs"]
        assert choice["text"] == words.decode(ids[:length]) + answer["text"] and choice["finish_reason"] == "length"
    scored = whole["choices"][0]["logprobs"]
    tokens, likeliest = (scored[name][num_context:-1] for name in ("token_logprobs", "top_logprobs"))
    assert len(tokens) == len(ids) - num_context
    whole_logits = model.reference.model(mx.array([ids]))[0]
    is_greedy = [int(mx.argmax(whole_logits[at - 1])) == ids[at] for at in range(num_context, len(ids))]
    assert [each == max(top.values()) for each, top in zip(tokens, likeliest, strict=True)] == is_greedy
    offsets = scored["text_offset"]
    assert [text[begin:end] for begin, end in zip(offsets[:-1], [*offsets[1:-1], len(text)], strict=True)] == [
        words.decode([token]) for token in ids
    ]
    [choice] = only["choices"]
    assert (choice["text"], only["usage"]["completion_tokens"], choice["finish_reason"]) == (text, 0, "length")
    assert choice["logprobs"] == {name: values[:-1] for name, values in scored.items()}
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert {name: [each for piece in pieces for each in piece[name]] for name in scored} == scored


async def test_a_token_that_can_never_come_has_scores_of_json() -> None:
    """MASK of the bundled model, whose logit is minus infinity."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/score", {"prompt_tokens": [5], "continuations": [[MASK]]}),
        ("/v1/classify", {"prompt": "the", "labels": ["<|mask|>", "<|mask|><|mask|>"]}),
    ]
    async with served(DEMO, (8,)) as client:
        scored, classified = [await client.post(path, json=body) for path, body in asked]
    assert scored.status_code == classified.status_code == 200, (scored.text, classified.text)
    [score] = scored.json()["scores"]
    assert score == {"logprob": MIN_LOGPROB, "is_greedy": False, "tokens": [MASK], "logprobs": [MIN_LOGPROB]}
    assert [each["probability"] for each in classified.json()["labels"]] == [1.0, 0.0]


def test_a_text_with_a_token_that_can_never_come_has_no_perplexity() -> None:
    arguments = ("score", "--model", "demo", "--local", "0")
    found = parse(run_here(*arguments, "--json", stdin="a<|mask|>"))
    assert found == {"tokens": 1, "logprob": MIN_LOGPROB, "perplexity": None}
    told = run_here(*arguments, stdin="a<|mask|>")
    assert told.code == 0 and told.out == "perplexity: overflow, log-probability -9999.000 of 1 tokens\n", told.err


def probabilities(logprobs: Sequence[float]) -> list[float]:
    """Of labels one of which has to come."""
    return cast(list[float], mx.softmax(mx.array(logprobs)).tolist())
