"""Every decoder as a user runs it: over real workers and slow hops, with other flags, and what each one prints.

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
QUESTION = "What is 12 times 3?"
DEMO = ("--model", "demo", "--local", "0", "--prompt", QUESTION)


@pytest.fixture(scope="module")
def answers(module_start: Starter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The bundled model's answer by every decoder, over three nodes whose hops are all delayed by proxies."""
    workers = [module_start.worker(name, "--model", "demo") for name in ("mini", "air")]
    with ExitStack() as stack:
        nodes = [(w.name, stack.enter_context(proxy_to(w.address, latency_s=HOP_S)).address) for w in workers]
        config = write_cluster(tmp_path_factory.mktemp("slow") / "cluster.yaml", *nodes, model="demo")
        common = ("--config", config, "--prompt", QUESTION, "--logprobs", "2")
        found = {name: answer_here(*common, *flags) for name, flags in DECODERS.items()}
    return found | {"auto": answer_here(*DEMO, "--logprobs", "2", "--window", "8")}  # in one process


def test_over_slow_hops_every_lossless_decoder_gives_the_tokens_text_and_logprobs_of_ar(
    answers: dict[str, Any],
) -> None:
    ar = answers["ar"]
    assert len(ar["tokens"]) > 50 and ar["text"].endswith("36") and ar["finish_reason"] == "stop"
    for name in ("ngram", "diffusion", "auto"):
        found = answers[name]
        assert (found["tokens"], found["text"]) == (ar["tokens"], ar["text"]), name
        for entry, expected in zip(found["logprobs"], ar["logprobs"], strict=True):
            assert entry["logprob"] == pytest.approx(expected["logprob"], abs=0.03)  # bfloat16, rows computed together
            assert len(entry["top"]) == 2 and entry["top"][0][0] == entry["token"]


def test_diffusion_crosses_slow_hops_a_fifth_as_often_as_ar(answers: dict[str, Any]) -> None:
    ar, diffusion = answers["ar"]["stats"], answers["diffusion"]["stats"]
    assert ar["decode_s"] > NUM_HOPS * HOP_S * (len(answers["ar"]["tokens"]) - 1)
    assert diffusion["steps"] < ar["steps"] / 5


def test_json_of_every_decoder_says_what_its_steps_brought(answers: dict[str, Any]) -> None:
    for name, answer in answers.items():
        stats = answer["stats"]
        assert stats["tokens_per_step"] == pytest.approx(len(answer["tokens"]) / stats["steps"]), name
        assert (answer["finish_reason"], answer["prompt_tokens"]) == ("stop", answers["ar"]["prompt_tokens"])
        assert stats["cache_bytes"] > 0 and stats["recoveries"] == 0
        assert [entry["token"] for entry in answer["logprobs"]] == answer["tokens"]


def test_auto_is_diffusion_where_weights_are_mask_trained_and_else_ar(answers: dict[str, Any], talker: Path) -> None:
    assert answers["ar"]["stats"]["tokens_per_step"] == 1
    assert min(answers[name]["stats"]["tokens_per_step"] for name in ("auto", "diffusion-fast")) > 3
    flags = ("--local", "0", "--prompt-tokens", "5,6,7", "--ignore-eos", "--max-tokens", "8")
    assert answer_here("--model", talker, *flags)["stats"]["tokens_per_step"] == 1


@pytest.mark.matrix
@pytest.mark.parametrize(
    "flags",
    [
        ("--temp", "0.9", "--top-p", "0.95", "--seed", "5", "--repetition-penalty", "1.2", "--max-tokens", "48"),
        ("--kv", "int8", "--max-tokens", "24"),
    ],
    ids=["sampled", "int8"],
)
def test_diffusion_gives_what_ar_gives_under_other_flags(flags: tuple[str, ...]) -> None:
    ar, diffusion = (answer_here(*DEMO, *flags, "--decode", kind) for kind in ("ar", "diffusion"))
    for key in ("tokens", "text", "finish_reason"):
        assert diffusion[key] == ar[key], key
    assert diffusion["stats"]["tokens_per_step"] > 1 == ar["stats"]["tokens_per_step"]


def test_a_stop_string_within_a_window_ends_the_text(answers: dict[str, Any]) -> None:
    found = answer_here(*DEMO, "--decode", "diffusion", "--stop", "write 3")
    text = answers["ar"]["text"]
    assert (found["text"], found["finish_reason"]) == (text[: text.index("write 3")], "stop")


def test_where_the_text_repeats_drafts_from_it_take_few_steps_and_the_guard_ends_it(reciter: Path) -> None:
    common = ("--model", reciter, "--local", "0", "--prompt", "go", "--max-tokens", "200", "--decode")
    ar = answer_here(*common, "ar", "--repeat-guard", "0")
    ngram, guarded = answer_here(*common, "ngram"), answer_here(*common, "ngram", "--repeat-guard", "4")
    assert (ar["finish_reason"], len(ar["tokens"])) == ("length", 200)
    assert (ngram["tokens"], ngram["text"]) == (ar["tokens"], ar["text"])
    assert ngram["stats"]["tokens_per_step"] > 4
    assert (guarded["text"], guarded["finish_reason"]) == (4 * RECITED, "stop")
    assert len(guarded["tokens"]) == 4 * len(RECITED.encode())
