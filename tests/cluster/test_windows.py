"""Every decoder as a user runs it: over real workers and slow hops, and what each one prints.

`diffusion` and `ngram` are lossless: they give the tokens of `ar`.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.commands import answer_here
from tests.cluster.conftest import RECITED
from tests.cluster.processes import Starter, write_cluster
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
DEMO = ("--model", "demo", "--local", "0", *QUESTION)


def test_over_slow_hops_every_lossless_decoder_gives_the_tokens_of_ar_and_diffusion_a_fifth_of_its_steps(
    start: Starter, tmp_path: Path
) -> None:
    workers = [start.worker(name, "--model", "demo") for name in ("mini", "air")]
    with ExitStack() as stack:
        nodes = [(w.name, stack.enter_context(proxy_to(w.address, latency_s=HOP_S)).address) for w in workers]
        config = write_cluster(tmp_path / "cluster.yaml", *nodes, model="demo")
        common = ("--config", config, *QUESTION, "--logprobs", "2")
        answers: dict[str, Any] = {name: answer_here(*common, *flags) for name, flags in DECODERS.items()}
    answers["auto"] = answer_here(*DEMO, "--logprobs", "2", "--window", "8")  # in one process
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
