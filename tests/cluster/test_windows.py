"""Every decoder as a user runs it: over real workers, which are sent the models, and what each one prints.

`diffusion` and `ngram` are lossless: they give the tokens of `ar`.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from coordinator.cluster.options import cluster_options
from tests.cluster.commands import answer_here
from tests.cluster.conftest import RECITED
from tests.cluster.models import VOCAB, make_refiner, make_talker
from tests.cluster.processes import Starter, write_cluster
from tests.cluster.servers import TEXTS, served
from tools.proxy import proxy_to

HOP_S = 0.005
NUM_HOPS = 3  # of three nodes: two between them and the result's way back
DECODERS = {
    "ar": ("--decode", "ar"),
    "ngram": ("--decode", "ngram"),
    "diffusion": ("--decode", "diffusion", "--window", "16"),
    "diffusion-fast": ("--decode", "diffusion-fast"),
}
QUESTION = ("--prompt", "What is 12 times 3?")
PROMPT = "Hello"


@pytest.fixture(scope="module")
def nodes(module_start: Starter, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Two workers without a model, by name and address."""
    workers = []
    for name in ("mini", "air"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp(name)))
            workers.append(module_start.worker(name))
    return [(worker.name, worker.address) for worker in workers]


@pytest.mark.long
def test_over_slow_hops_lossless_decoders_give_the_tokens_of_ar_and_diffusion_takes_a_fifth_of_its_steps(
    nodes: list[tuple[str, str]], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        slow = [(name, stack.enter_context(proxy_to(at, latency_s=HOP_S)).address) for name, at in nodes]
        config = write_cluster(tmp_path / "cluster.yaml", *slow, model="demo")
        common = ("--config", config, *QUESTION, "--logprobs", "2")
        answers: dict[str, Any] = {name: answer_here(*common, *flags) for name, flags in DECODERS.items()}
    here = ("--model", "demo", "--local", "0", *QUESTION)
    answers["auto"] = answer_here(*here, "--logprobs", "2", "--window", "8")  # in one process
    ar = answers["ar"]
    assert len(ar["tokens"]) > 50 and ar["text"].endswith("36")
    for name, answer in answers.items():
        stats = answer["stats"]
        assert (answer["finish_reason"], answer["prompt_tokens"]) == ("stop", ar["prompt_tokens"])
        assert stats["tokens_per_step"] == pytest.approx(len(answer["tokens"]) / stats["steps"]), name
        assert stats["cache_bytes"] > 0 and stats["recoveries"] == 0
        assert [entry["token"] for entry in answer["logprobs"]] == answer["tokens"]
    for name in ("ngram", "diffusion", "auto"):
        assert (answers[name]["tokens"], answers[name]["text"]) == (ar["tokens"], ar["text"]), name
        for entry, expected in zip(answers[name]["logprobs"], ar["logprobs"], strict=True):
            assert entry["logprob"] == pytest.approx(expected["logprob"], abs=0.03)  # bfloat16, rows computed together
            assert len(entry["top"]) == 2 and entry["top"][0][0] == entry["token"]
    assert ar["stats"]["decode_s"] > NUM_HOPS * HOP_S * (len(ar["tokens"]) - 1)
    assert answers["diffusion"]["stats"]["steps"] < ar["stats"]["steps"] / 5
    assert ar["stats"]["tokens_per_step"] == 1
    assert min(answers[name]["stats"]["tokens_per_step"] for name in ("auto", "diffusion-fast")) > 3


def test_text_that_repeats_takes_few_steps_with_drafts_from_it_and_the_guard_ends_it(reciter: Path) -> None:
    common = ("--model", reciter, "--local", "0", "--prompt", "go", "--max-tokens", "120", "--decode")
    ar = answer_here(*common, "ar", "--repeat-guard", "0")
    ngram, guarded = answer_here(*common, "ngram"), answer_here(*common, "ngram", "--repeat-guard", "4")
    assert (ar["finish_reason"], len(ar["tokens"])) == ("length", 120)
    assert (ngram["tokens"], ngram["text"]) == (ar["tokens"], ar["text"])
    assert ngram["stats"]["tokens_per_step"] > 4
    assert (guarded["text"], guarded["finish_reason"]) == (4 * RECITED, "stop")
    assert len(guarded["tokens"]) == 4 * len(RECITED.encode())


def test_a_draft_model_changes_no_token_and_its_drafts_are_counted(
    nodes: list[tuple[str, str]], talker: Path, tmp_path: Path
) -> None:
    """The drafter is the model itself."""
    config = write_cluster(tmp_path / "cluster.yaml", *nodes, model=str(talker), layers="[1, 1, 2]")
    flags = (PROMPT, "--config", config, "--max-tokens", "12", "--seed", "3", "--temp", "0.8")
    drafted, expected = answer_here(*flags, "--draft-model", talker, "--num-draft-tokens", "3"), answer_here(*flags)
    assert drafted["tokens"] == expected["tokens"]
    assert drafted["stats"]["drafts_held"] == [1.0, 1.0, 1.0] and expected["stats"]["drafts_held"] == []
    assert drafted["stats"]["steps"] < expected["stats"]["steps"]

    async def ask() -> str:
        async with served(cluster_options(None, str(talker), 0, None, None, draft_model=str(talker))) as (client, _):
            body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "num_draft_tokens": 2}
            assert (await client.post(TEXTS, json=body)).status_code == 200
            return str((await client.get("/metrics")).text)

    families = text_string_to_metric_families(uvloop.run(ask()))
    samples = [sample for family in families for sample in family.samples if "drafts" in sample.name]
    found = {(each.name, each.labels["place"]): each.value for each in samples}
    assert {place for _, place in found} == {"1", "2"}
    for place in ("1", "2"):
        assert found["brigade_drafts_total", place] == found["brigade_drafts_held_total", place] > 0


def test_canvases_over_three_processes_are_those_of_one_and_of_the_server(
    nodes: list[tuple[str, str]], tmp_path: Path
) -> None:
    denoiser = make_talker(tmp_path / "denoiser", model_type="sdar", mask_token_id=VOCAB - 1)
    config = write_cluster(tmp_path / "cluster.yaml", *nodes, model=str(denoiser), layers="[1, 1, 2]")
    flags = (PROMPT, "--raw", "--max-tokens", "13", "--seed", "3", "--temp", "0.8", "--ignore-eos")
    here = answer_here(*flags, "--model", denoiser, "--local", "0")
    there = answer_here(*flags, "--config", config, "--decode", "canvas", "--canvas", "4")
    assert there["tokens"] == here["tokens"] and len(here["tokens"]) == 13
    assert there["stats"]["steps"] == here["stats"]["steps"] > 0
    other = answer_here(*flags, "--model", denoiser, "--local", "0", "--canvas-steps", "1")
    assert other["tokens"] != here["tokens"] and other["stats"]["steps"] < here["stats"]["steps"]
    assert here["stats"]["prompt_tokens_per_s"] is None, "its first tokens come after several steps"
    assert other["stats"]["prompt_tokens_per_s"] > 0

    async def ask() -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 13, "ignore_eos": True, "seed": 3, "temperature": 0.8}
        async with served(cluster_options(None, str(denoiser), 0, None, None)) as (client, _):
            for more in ({}, {"decode": "canvas", "canvas_sampler": "confidence"}):
                answer = await client.post(TEXTS, json=body | more)
                assert answer.json()["choices"][0]["text"] == here["text"]
            for refused in ({"decode": "ar"}, {"logprobs": 1}, {"canvas_threshold": "high"}, {"canvas": 5}):
                answer = await client.post(TEXTS, json=body | refused)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(refused)))

    uvloop.run(ask())


@pytest.mark.long
def test_diffusion_gemma_over_three_processes_and_http_answers_as_one_process(
    nodes: list[tuple[str, str]], tmp_path: Path
) -> None:
    """tests/integration/test_diffusion_gemma.py loses a worker amid canvases."""
    refiner = make_refiner(tmp_path / "refiner")
    config = write_cluster(tmp_path / "cluster.yaml", *nodes, model=str(refiner), layers="[2, 1, 3]")
    sampled = ("--raw", "--max-tokens", "24", "--seed", "3", "--temp", "0.8", "--ignore-eos", "--canvas-steps", "5")
    kinds = (("entropy", "exact"), ("confidence", "top-64"))
    texts = []
    for sampler, conditioning in kinds:
        flags = (PROMPT, *sampled, "--canvas-sampler", sampler, "--conditioning", conditioning)
        here = answer_here(*flags, "--model", refiner, "--local", "0")
        assert answer_here(*flags, "--config", config)["tokens"] == here["tokens"] and len(here["tokens"]) == 24
        texts.append(here["text"])

    async def ask() -> list[str]:
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "seed": 3, "temperature": 0.8, "ignore_eos": True}
        async with served(cluster_options(None, str(refiner), 0, None, None)) as (client, _):
            bodies = [body | {"canvas_steps": 5, "canvas_sampler": one, "conditioning": other} for one, other in kinds]
            return [(await client.post(TEXTS, json=each)).json()["choices"][0]["text"] for each in bodies]

    assert uvloop.run(ask()) == texts
