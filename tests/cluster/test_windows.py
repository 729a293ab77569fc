"""Windows as a user runs them: every decoder and cache over real workers and slow hops, and what is refused.

`diffusion` and `ngram` are lossless: whatever a test asks of them, it asks for the tokens of `ar`.
"""

import json
import re
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from coordinator.cli.demo import DEMO_PROMPT
from tests.cluster.commands import answer_here, parse, run_here
from tests.cluster.conftest import RECITED
from tests.cluster.models import altered_copy, make_talker, reconfigured_copy
from tests.cluster.processes import FINISH_S, Starter, Worker, free_port, write_cluster
from tests.tiny import make_model
from tools.proxy import proxy_to

STORY = "Tell me a story about a fox."
HOP_S = 0.005
NUM_HOPS = 3  # of three nodes: two between them and the result's way back
ALTERED = "model.layers.3.mlp.down_proj.weight"
DECODERS = {
    "ar": ("--decode", "ar"),
    "auto": (),
    "auto, window 8": ("--window", "8"),
    "ngram": ("--decode", "ngram"),
    "diffusion": ("--decode", "diffusion", "--window", "auto"),
    "window 4": ("--decode", "diffusion", "--window", "4"),
    "window 8": ("--decode", "diffusion", "--window", "8"),
    "diffusion-fast": ("--decode", "diffusion-fast"),
}
LOSSLESS = [name for name in DECODERS if name != "diffusion-fast"]


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a MASK token, whose guesses are mostly wrong, and heads that can be quantised."""
    return make_talker(tmp_path_factory.mktemp("masked") / "model", mask_token_id=0, head_dim=64)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recurrent layers, and a MASK token all the same."""
    return make_model(tmp_path_factory.mktemp("hybrid") / "model", "qwen3_5", config={"mask_token_id": 0})


@pytest.fixture(scope="module")
def workers(
    module_start: Starter, masked: Path, talker: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Worker]:
    """Workers that may load the bundled model and two others: a coordinator chooses."""
    nodes = {name: f"127.0.0.1:{free_port()}" for name in ("mini", "air", "spare")}
    path = tmp_path_factory.mktemp("workers") / "cluster.yaml"
    config = write_cluster(path, *nodes.items(), models=f"[{masked.parent}, {talker.parent}]")
    return {name: module_start.worker(name, "--config", config) for name in nodes}


@pytest.fixture(scope="module")
def pair(workers: dict[str, Worker], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cluster.yaml of one worker."""
    return write_cluster(tmp_path_factory.mktemp("pair") / "cluster.yaml", ("mini", workers["mini"].address))


@pytest.fixture(scope="module")
def trio(workers: dict[str, Worker], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cluster.yaml of two workers."""
    nodes = [(name, workers[name].address) for name in ("mini", "air")]
    return write_cluster(tmp_path_factory.mktemp("trio") / "cluster.yaml", *nodes)


@pytest.fixture(scope="module")
def answers(pair: Path) -> dict[str, Any]:
    """The bundled model's answer by every decoder."""
    common = ("--model", "demo", "--prompt", DEMO_PROMPT, "--config", pair, "--logprobs", "2")
    return {name: answer_here(*common, *flags) for name, flags in DECODERS.items()}


def test_over_slow_hops_diffusion_gives_the_tokens_of_ar_and_crosses_them_a_fifth_as_often(
    workers: dict[str, Worker], tmp_path: Path
) -> None:
    """Every hop is delayed once per step: both workers are reached through proxies, by their predecessors too."""
    with ExitStack() as stack:
        proxies = {n: stack.enter_context(proxy_to(workers[n].address, latency_s=HOP_S)) for n in ("mini", "air")}
        config = write_cluster(tmp_path / "cluster.yaml", *((name, proxy.address) for name, proxy in proxies.items()))
        common = ("--config", config, "--model", "demo", "--prompt", DEMO_PROMPT, "--decode")
        ar, diffusion = answer_here(*common, "ar"), answer_here(*common, "diffusion", "--window", "16")
    assert len(ar["tokens"]) > 80 and ar["finish_reason"] == "stop"
    assert (diffusion["tokens"], diffusion["text"]) == (ar["tokens"], ar["text"])
    assert ar["stats"]["decode_s"] > NUM_HOPS * HOP_S * (len(ar["tokens"]) - 1)
    assert diffusion["stats"]["steps"] < ar["stats"]["steps"] / 5


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("masked", "diffusion"),
        ("masked", "diffusion-fast"),
        ("masked", "ngram"),
        ("demo", "diffusion"),
        pytest.param("demo", "diffusion-fast", marks=pytest.mark.matrix),
        pytest.param("demo", "ngram", marks=pytest.mark.matrix),
    ],
)
def test_verify_finds_every_decoder_equal_on_three_nodes(trio: Path, masked: Path, model: str, kind: str) -> None:
    """The bundled model, and a random one whose drafts are wrong nearly always."""
    split = ("--config", trio, "--max-tokens", "12", "--json", *(() if kind == "ngram" else ("--window", "8")))
    flags = ("--model", masked, "--layers", "1,2,1") if model == "masked" else ("--model", model)
    found = parse(run_here("verify", "--decode", kind, *flags, *split))
    assert (found["equal"], found["tensors"]) == (True, [])
    assert len(found["cases"]) >= 12
    for case in found["cases"]:
        assert case["expected"] == case["found"] and len(case["found"]) == 12, case["name"]


def test_verify_of_drafts_from_the_text_needs_no_mask_token(trio: Path, talker: Path) -> None:
    outcome = run_here("verify", "--decode", "ngram", "--config", trio, "--model", talker, "--max-tokens", "24")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1].startswith(
        f"the cluster is the model: {18 * 24} tokens equal, smallest margin "
    )


def test_verify_finds_an_altered_tensor_by_every_decoder(
    workers: dict[str, Worker], start: Starter, masked: Path, tmp_path: Path
) -> None:
    """An altered worker speaks other tokens, and its tensor is named."""

    def change(weights: dict[str, mx.array]) -> None:
        weights[ALTERED][2:24] *= -1  # not where nodes compare samples of their copies before they load them

    odd = start.worker("odd", "--model", altered_copy(masked, tmp_path / "odd", change))
    nodes = ("mini", workers["mini"].address), ("odd", odd.address)
    config = write_cluster(tmp_path / "cluster.yaml", *nodes, model=str(masked), layers="[1, 1, 2]")
    for kind in ("diffusion", "diffusion-fast", "ngram"):
        outcome = run_here("verify", "--config", config, "--decode", kind, "--max-tokens", "4", "--json")
        assert (outcome.code, outcome.err) == (1, ""), kind
        found = json.loads(outcome.out)
        assert found["tensors"] == [{"node": "odd", "tensor": ALTERED}]
        assert any(case["expected"] != case["found"] for case in found["cases"]), kind


@pytest.mark.parametrize("name", DECODERS)
def test_json_of_every_decoder_has_the_promised_keys(answers: dict[str, Any], name: str) -> None:
    answer = answers[name]
    assert set(answer) >= {"text", "tokens", "prompt_tokens", "finish_reason", "logprobs", "stats", "stages"}
    stats = answer["stats"]
    for key in (
        "ttft_s", "decode_s", "tokens_per_s", "prompt_tokens_per_s", "steps", "tokens_per_step", "peak_memory_bytes",
        "cache_bytes",
    ):  # fmt: skip
        assert isinstance(stats[key], int | float) and stats[key] > 0, key
    assert stats["recoveries"] == 0
    assert stats["tokens_per_step"] == pytest.approx(len(answer["tokens"]) / stats["steps"])
    for stage in answer["stages"]:
        assert set(stage) >= {"node", "start", "end", "compute_ms", "wire_ms", "queue_ms", "utilisation"}
    assert (answer["finish_reason"], answer["prompt_tokens"]) == ("stop", answers["ar"]["prompt_tokens"])
    assert [entry["token"] for entry in answer["logprobs"]] == answer["tokens"]


@pytest.mark.parametrize("name", LOSSLESS)
def test_every_lossless_decoder_gives_the_tokens_text_and_logprobs_of_ar(answers: dict[str, Any], name: str) -> None:
    found, ar = answers[name], answers["ar"]
    assert len(ar["tokens"]) > 80 and ar["text"].endswith("45")
    assert (found["tokens"], found["text"]) == (ar["tokens"], ar["text"])
    for entry, expected in zip(found["logprobs"], ar["logprobs"], strict=True):
        assert entry["logprob"] == pytest.approx(expected["logprob"], abs=0.03)  # bfloat16, rows computed together
        assert len(entry["top"]) == 2 and entry["top"][0][0] == entry["token"]


def test_auto_is_diffusion_where_weights_are_mask_trained_and_else_ar(
    answers: dict[str, Any], talker: Path, hybrid: Path
) -> None:
    assert answers["ar"]["stats"]["tokens_per_step"] == 1
    for name in ("auto, window 8", "window 8", "diffusion-fast"):  # chosen windows go by what steps cost, here and now
        assert answers[name]["stats"]["tokens_per_step"] > 3, name
    flags = ("--local", "0", "--prompt-tokens", "5,6,7", "--ignore-eos", "--max-tokens", "24")
    for answer in (answer_here("--model", model, *flags) for model in (talker, hybrid)):
        assert (answer["stats"]["tokens_per_step"], len(answer["tokens"])) == (1, 24)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--stop", "write 7"), "stop"),  # within an accepted run
        (("--max-tokens", "41"), "length"),
        (("--temp", "0.9", "--top-p", "0.95", "--seed", "5", "--max-tokens", "64"), None),
        (("--repetition-penalty", "1.2", "--max-tokens", "48"), None),
        (("--ignore-eos", "--max-tokens", "140"), "length"),
        (("--kv", "int8", "--max-tokens", "48"), None),
        (("--kv", "rotating", "--max-kv-size", "64", "--max-tokens", "64"), None),
    ],
    ids=lambda value: value[1 if value[0] == "--kv" else 0] if isinstance(value, tuple) else "",
)
def test_diffusion_gives_what_ar_gives_under_every_other_flag(flags: tuple[str, ...], reason: str | None) -> None:
    most = () if "--max-tokens" in flags else ("--max-tokens", "200")
    common = ("--prompt", DEMO_PROMPT, "--local", "0", *most, *flags, "--decode")
    ar, diffusion = answer_here(*common, "ar"), answer_here(*common, "diffusion", "--window", "8")
    for key in ("tokens", "text", "finish_reason"):
        assert diffusion[key] == ar[key], key
    assert reason in (None, ar["finish_reason"])
    # a stop string is found while the next step is under way
    assert diffusion["stats"]["tokens_per_step"] > 1 == ar["stats"]["tokens_per_step"]


@pytest.mark.parametrize("flags", [(), ("--stop", "friends")], ids=["whole", "stopped"])
def test_standard_output_under_diffusion_is_the_text_of_the_json(pair: Path, flags: tuple[str, ...]) -> None:
    command = ("generate", "--prompt", STORY, "--model", "demo", "--config", pair, "--decode", "diffusion", *flags)
    streamed, whole = run_here(*command), parse(run_here(*command, "--json"))
    assert streamed.code == 0
    assert streamed.out == whole["text"] + "\n"
    assert len(streamed.out) > 200 and "friends" not in streamed.out.split("\n")[0]


def test_int8_takes_a_fraction_of_a_full_cache_and_a_rotating_one_stops_growing(pair: Path, masked: Path) -> None:
    """Of which most is fed and not generated: the caches do not know the difference, and it takes a second."""
    common = ("--model", masked, "--config", pair, "--ignore-eos", "--decode", "ar", "--max-tokens", "8")
    prompts = {
        num_rows: ("--prompt-tokens", ",".join(["5", "6", "7", "8"] * (num_rows // 4))) for num_rows in (600, 1200)
    }
    rotating = ("--kv", "rotating", "--max-kv-size", "64")
    full, int8, short, long = (
        answer_here(*common, *flags)["stats"]["cache_bytes"]
        for flags in (
            prompts[1200],
            (*prompts[1200], "--kv", "int8"),
            (*prompts[600], *rotating),
            (*prompts[1200], *rotating),
        )
    )
    row_bytes = 2 * 2 * 64 * 4 * 4  # keys and values, 2 heads of 64 float32, 4 layers
    assert full >= 1200 * row_bytes
    assert 0.25 * full < int8 < 0.3 * full  # a byte for four, and a scale and a bias per 64
    assert short == long <= (64 + 2 * 256) * row_bytes < full / 2


@pytest.mark.parametrize("times", [2, 4])
def test_the_repeat_guard_ends_a_looping_answer(reciter: Path, times: int) -> None:
    common = ("--model", reciter, "--local", "0", "--prompt", "go", "--max-tokens", "200", "--repeat-guard")
    guarded, off = answer_here(*common, str(times)), answer_here(*common, "0")
    assert (guarded["text"], guarded["finish_reason"]) == (times * RECITED, "stop")
    assert len(guarded["tokens"]) == times * len(RECITED.encode())
    assert (off["finish_reason"], len(off["tokens"])) == ("length", 200)


def test_drafts_from_the_text_take_few_steps_where_it_repeats(reciter: Path) -> None:
    common = ("--model", reciter, "--local", "0", "--prompt", "go", "--max-tokens", "200", "--decode")
    ar, ngram = answer_here(*common, "ar"), answer_here(*common, "ngram")
    assert (ngram["tokens"], ngram["text"]) == (ar["tokens"], ar["text"])
    assert ngram["stats"]["tokens_per_step"] > 4


@pytest.mark.parametrize(("nodes", "lost"), [(("spare", "mini"), "mini"), (("air", "spare"), "air")])
def test_a_worker_killed_during_a_diffusion_request_ends_it_with_its_name(
    start: Starter, workers: dict[str, Worker], masked: Path, tmp_path: Path, nodes: Sequence[str], lost: str
) -> None:
    """First the last node, then the first one."""
    config = write_cluster(
        tmp_path / "cluster.yaml", *((name, workers[name].address) for name in nodes), model=str(masked)
    )
    endless = ("--prompt", "go", "--ignore-eos", "--max-tokens", "39000", "--recovery-timeout", "0")
    running = start.brigade("generate", "--config", config, "--decode", "diffusion", *endless)
    running.out.wait_match(r".", FINISH_S)
    workers[lost].send_signal(signal.SIGKILL)
    outcome = running.wait(10.0)
    assert outcome.code == 3, outcome.err
    lines = outcome.err.splitlines()
    assert lines[0].startswith(f"error: worker {lost}: ") and len(lines) <= 2, outcome.err
    assert "Traceback" not in outcome.err
    workers["spare"].wait_slots(0, 10.0)


REFUSALS = {
    "diffusion without MASK": ("talker", "--decode diffusion", "no mask_token_id in config.json; use ngram or ar"),
    "diffusion-fast without MASK": ("talker", "--decode diffusion-fast", "diffusion-fast needs mask-trained weights"),
    "ngram on a hybrid": ("hybrid", "--decode ngram", "ngram .*recurrent layers .*layer 0.*; use ar"),
    "diffusion on a hybrid": ("hybrid", "--decode diffusion", "diffusion .*recurrent layers .*; use ar"),
    "window 0": ("masked", "--window 0", "--window: expected a whole number from 1 to 128 or `auto`, got '0'"),
    "window -1": ("masked", "--window -1", "--window: .*got '-1'"),
    "window x": ("masked", "--window x", "--window: .*got 'x'"),
    "window 4.5": ("masked", "--window 4.5", "--window: .*got '4.5'"),
    "window too large": ("demo", "--window 2048", "--window: expected a whole number from 1 to 128 .*got '2048'"),
    "window of the rotating cache": (
        "masked", "--kv rotating --max-kv-size 32 --window 32", "--window: .*32 tokens that the rotating cache keeps",
    ),
    "negative threshold": ("masked", "--entropy-threshold -1", "--entropy-threshold: .*from 0, got -1"),
    "threshold nan": ("masked", "--entropy-threshold nan", "--entropy-threshold: .*got nan"),
    "threshold high": ("masked", "--entropy-threshold high", "--entropy-threshold"),
    "negative penalty": ("masked", "--position-penalty -0.1", "--position-penalty: .*got -0.1"),
    "penalty inf": ("masked", "--position-penalty inf", "--position-penalty: .*got inf"),
    "rotating without a size": ("masked", "--kv rotating", "--max-kv-size: expected with a rotating cache"),
    "size without rotating": ("masked", "--max-kv-size 64", "--max-kv-size: expected with a rotating cache"),
    "size with int8": ("masked", "--kv int8 --max-kv-size 64", "--max-kv-size: expected with a rotating cache"),
    "size too small": ("masked", "--kv rotating --max-kv-size 8", "--max-kv-size: expected more than 8 tokens .*got 8"),
    "size 0": ("masked", "--kv rotating --max-kv-size 0", "--max-kv-size"),
    "heads too small for int8": ("talker", "--kv int8", "--kv: .*8.*multiple of 32.*have 16; use full"),
    "negative repeat guard": ("masked", "--repeat-guard -1", "--repeat-guard"),
    "unknown decoder": ("masked", "--decode magic", "--decode: expected one of auto, ar, ngram, .*got 'magic'"),
    "unknown cache": ("masked", "--kv fp4", "--kv: expected one of full, rotating, int8, got 'fp4'"),
    "MASK outside the vocabulary": ("outside", "", r"config\.json: mask_token_id: .*from 0 to 319, got 320"),
    "MASK is text": ("text", "--decode ar", r"config\.json: mask_token_id: .*got 'zero'"),
    "verify without MASK": ("talker", "--decode diffusion", "no mask_token_id in config.json"),
    "verify ngram on a hybrid": ("hybrid", "--decode ngram", "recurrent layers .*; use ar"),
}  # fmt: skip


@pytest.fixture(scope="module")
def places(talker: Path, masked: Path, hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | Path]:
    """The models of the table, and a cluster.yaml at whose worker's address nobody is; nobody misses it."""
    folder = tmp_path_factory.mktemp("refused")
    config = write_cluster(folder / "cluster.yaml", ("ghost", f"127.0.0.1:{free_port()}"))
    outside = reconfigured_copy(masked, folder / "outside", mask_token_id=320)
    text = reconfigured_copy(masked, folder / "text", mask_token_id="zero")
    models = {"talker": talker, "masked": masked, "hybrid": hybrid, "demo": "demo", "outside": outside, "text": text}
    return models | {"config": config}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_it_is_refused_before_any_worker_is_asked(places: dict[str, str | Path], refusal: str) -> None:
    model, flags, message = REFUSALS[refusal]
    command = ("verify",) if refusal.startswith("verify") else ("generate", "--prompt-tokens", "5,6,7")
    outcome = run_here(*command, "--config", places["config"], "--model", places[model], *flags.split())
    assert (outcome.code, outcome.out) == (2, ""), outcome.err  # a worker that was asked would be missing: 3
    lines = outcome.err.splitlines()
    assert len(lines) in (1, 2) and lines[0].startswith("error: ") and max(map(len, lines)) < 400, outcome.err
    assert re.search(message, outcome.err), outcome.err
    assert "Traceback" not in outcome.err and "internal error" not in outcome.err
