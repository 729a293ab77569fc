"""`brigade generate` as a user runs it: what it prints, and on which stream."""

import itertools
import json
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.commands import answer_here, run_here
from tests.cluster.conftest import RECITED
from tests.cluster.models import CONTEXT
from tests.cluster.processes import FINISH_S, Starter
from tests.unit.cli.test_trace import assert_no_two_cross, slices

PROMPT = "The quick brown fox, Zürich and 日本語: what comes next?"
NUM_TOKENS = 48
REQUEST = (
    "--prefill-step-size", "16", "--temp", "0.9", "--seed", "11", "--ignore-eos", "--max-tokens", str(NUM_TOKENS)
)  # fmt: skip
LAYERS = {"one process": [(0, 4)], "three": [(0, 1), (1, 3), (3, 4)]}


@pytest.fixture(scope="module")
def answers(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One sampled request on both splits, its prompt in several chunks, and the trace of the chain."""
    trace = tmp_path_factory.mktemp("traces") / "three"
    command = ("--model", talker, "--prompt", PROMPT, *REQUEST, "--logprobs", "3")
    return {
        "one process": answer_here(*command, "--local", "0"),
        "three": answer_here(*command, "--local", "2", "--layers", "1,2,1", "--trace", trace),
        "trace": json.loads(trace.read_text()),
    }


def test_a_chain_gives_the_tokens_of_one_process(answers: dict[str, Any]) -> None:
    whole, sharded = answers["one process"], answers["three"]
    assert len(set(whole["tokens"])) > NUM_TOKENS / 4  # a model that repeats one token would prove little
    assert (sharded["tokens"], sharded["text"]) == (whole["tokens"], whole["text"])
    logprobs = [[entry["logprob"] for entry in answers[split]["logprobs"]] for split in LAYERS]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


@pytest.mark.parametrize("split", LAYERS)
def test_json_has_the_layers_that_were_asked_for_and_figures_that_add_up(answers: dict[str, Any], split: str) -> None:
    answer = answers[split]
    stats, stages, waterfall = answer["stats"], answer["stages"], dict(answer["waterfall"])
    assert (answer["finish_reason"], answer["seed"], len(answer["tokens"])) == ("length", 11, NUM_TOKENS)
    assert [entry["token"] for entry in answer["logprobs"]] == answer["tokens"]
    assert [(stage["start"], stage["end"]) for stage in stages] == LAYERS[split]
    assert len({stage["node"] for stage in stages}) == len(stages)
    for stage in stages:
        assert stage["compute_ms"] > 0 and 0 < stage["utilisation"] <= 1 and stage["queue_ms"] >= 0
    assert stats["tokens_per_s"] == pytest.approx((NUM_TOKENS - 1) / stats["decode_s"])
    assert stats["prompt_tokens_per_s"] == pytest.approx(answer["prompt_tokens"] / stats["ttft_s"])
    assert stats["tokens_per_step"] == pytest.approx(NUM_TOKENS / stats["steps"]) and stats["recoveries"] == 0
    assert 100_000 < stats["peak_memory_bytes"] < 2**32  # more than nothing, less than a machine
    wall_ms = waterfall.pop("wall_ms")
    assert sum(waterfall.values()) == pytest.approx(wall_ms, rel=0.05) and min(waterfall.values()) >= 0
    assert wall_ms == pytest.approx(1e3 * (stats["ttft_s"] + stats["decode_s"]), rel=0.05)
    assert (waterfall["worker compute"] > 0) == (split != "one process")


def test_the_trace_has_every_frame_on_every_stage(answers: dict[str, Any]) -> None:
    events = answers["trace"]["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {i: f"stage {i}: {stage['node']}" for i, stage in enumerate(answers["three"]["stages"])}
    assert_no_two_cross(events)
    chunks = -(-answers["three"]["prompt_tokens"] // 16)
    for stage in range(3):
        computing = [event for event in slices(events) if event["pid"] == stage and "compute" in event["name"]]
        assert len({event["args"]["step"] for event in computing}) >= chunks + NUM_TOKENS - 1, f"stage {stage}"
    brought = {event["args"]["step"]: event["args"]["tokens"] for event in slices(events)}
    assert sum(brought.values()) == NUM_TOKENS


def test_standard_output_is_the_text_and_nothing_else(answers: dict[str, Any], talker: Path) -> None:
    note = f"note: planned for {CONTEXT} tokens: {talker} has no room for 99999"
    for more in ((), ("--stats", "--context", "99999")):
        outcome = run_here("generate", "--model", talker, "--local", "0", PROMPT, *REQUEST, *more)
        assert (outcome.code, outcome.out) == (0, answers["one process"]["text"] + "\n")
        lines = [line for line in outcome.err.splitlines() if not line.startswith("coordinator: load")]  # if it is slow
        assert [line for line in lines if line.startswith("note: ")] == ([note] if more else [])
        blank, speed, ended, *table = [line for line in lines if line != note]
        assert blank == "" and speed.startswith(f"{NUM_TOKENS} tokens, ") and "tok/s" in speed
        assert ended == f"cut off at --max-tokens {NUM_TOKENS}; sampled at --temp 0.9, --seed 11"
        assert ("wall time" in outcome.err, bool(table)) == (bool(more), bool(more))


def test_text_comes_while_it_is_made_in_whole_characters_and_an_interrupt_ends_the_line_and_the_worker(
    start: Starter, reciter: Path
) -> None:
    running = start.brigade("generate", "--model", reciter, "--local", "1", "go", "--max-tokens", "39000")
    running.out.wait_match(".{150}", FINISH_S)
    children = start.children(running, 1)
    running.send_signal(signal.SIGINT)
    outcome, pieces = running.wait(), running.out.pieces
    assert outcome.code == 130 and psutil.wait_procs(children, 2.0)[1] == []
    assert not any("\ufffd" in piece.decode() for piece in pieces)  # strict: half a character raises
    assert len(pieces) > 20  # one by one, but for those that a busy reader finds together
    text = outcome.out.removesuffix("\n")
    assert len(text) == len(outcome.out) - 1
    assert list(text) == list(itertools.islice(itertools.cycle(RECITED), len(text)))
    assert re.search(r"(?m)^interrupted after \d+ tokens, [\d.]+ tok/s; first after [\d.]+ s\n\Z", outcome.err)


def test_a_prompt_cache_serves_the_next_run_and_a_file_of_another_kind_is_left_alone(
    talker: Path, tmp_path: Path
) -> None:
    file, letter = tmp_path / "cache", tmp_path / "letter"
    letter.write_text("Dear Ann,")
    tokens = ",".join(str(7 * i % 89) for i in range(600))
    command = ("generate", "--model", talker, "--prompt-tokens", tokens, "--context", "1024", "--local", "0", "-m", "4")
    first, second = (run_here(*command, "--prompt-cache", file) for _ in range(2))
    assert f"{file} holds the caches of 512 tokens" in first.err and "caches" not in second.err
    assert (first.code, second.code, second.out) == (0, 0, first.out)
    refused = run_here(*command, "--prompt-cache", letter)
    assert refused.code == 2 and refused.err.startswith("error: --prompt-cache: expected a file that --prompt-cache")
    assert letter.read_text() == "Dear Ann,"
