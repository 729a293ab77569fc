"""`brigade generate` as a user runs it: what it prints, on which stream, for every split."""

import itertools
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.cluster.commands import answer_here, parse, run_here
from tests.cluster.conftest import RECITED
from tests.cluster.models import END, EOS, reconfigured_copy
from tests.cluster.processes import FINISH_S, Starter
from tests.unit.cli.test_trace import assert_no_two_cross, slices

PROMPT = "The quick brown fox, Zürich and 日本語: what comes next?"
NUM_TOKENS = 48
SPLITS = {"one process": ("--local", "0"), "three": ("--local", "2", "--layers", "1,2,1")}
REQUEST = (
    "--prefill-step-size", "16", "--temp", "0.9", "--seed", "11", "--ignore-eos", "--max-tokens", str(NUM_TOKENS)
)  # fmt: skip


@pytest.fixture(scope="module")
def answers(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One sampled request on both splits, its prompt in several chunks, and the trace of the chain."""
    trace = tmp_path_factory.mktemp("traces") / "three"
    command = ("generate", "--model", talker, "--prompt", PROMPT, *REQUEST, "--logprobs", "3", "--json")
    found = {
        "one process": parse(run_here(*command, *SPLITS["one process"])),
        "three": parse(run_here(*command, *SPLITS["three"], "--trace", trace)),
    }
    return found | {"trace": json.loads(trace.read_text())}


def test_a_chain_gives_the_tokens_of_one_process_from_the_layers_that_were_asked_for(answers: dict[str, Any]) -> None:
    whole, sharded = answers["one process"], answers["three"]
    assert len(whole["tokens"]) == NUM_TOKENS
    assert len(set(whole["tokens"])) > NUM_TOKENS / 4  # a model that repeats one token would prove little
    assert (sharded["tokens"], sharded["text"]) == (whole["tokens"], whole["text"])
    assert [entry["logprob"] for entry in sharded["logprobs"]] == pytest.approx(
        [entry["logprob"] for entry in whole["logprobs"]], abs=1e-4
    )
    layers = {split: [(stage["start"], stage["end"]) for stage in answers[split]["stages"]] for split in SPLITS}
    assert layers == {"one process": [(0, 4)], "three": [(0, 1), (1, 3), (3, 4)]}


@pytest.mark.parametrize("split", SPLITS)
def test_json_has_the_promised_keys_with_values_that_add_up(answers: dict[str, Any], split: str) -> None:
    answer = answers[split]
    types = {"text": str, "tokens": list, "prompt_tokens": int, "finish_reason": str, "stats": dict, "stages": list}
    assert {key: type(answer[key]) for key in types} == types
    assert (answer["finish_reason"], answer["seed"]) == ("length", 11)
    assert answer["prompt_tokens"] > len(PROMPT) / 4
    stats = answer["stats"]
    for key in ("ttft_s", "decode_s", "tokens_per_s", "prompt_tokens_per_s", "steps", "tokens_per_step"):
        assert isinstance(stats[key], int | float) and stats[key] > 0, key
    assert stats["tokens_per_s"] == pytest.approx((NUM_TOKENS - 1) / stats["decode_s"])
    assert stats["prompt_tokens_per_s"] == pytest.approx(answer["prompt_tokens"] / stats["ttft_s"])
    assert stats["tokens_per_step"] == pytest.approx(NUM_TOKENS / stats["steps"])
    assert stats["recoveries"] == 0
    assert 100_000 < stats["peak_memory_bytes"] < 2**32  # more than nothing, less than a machine
    for stage in answer["stages"]:
        assert set(stage) >= {"node", "start", "end", "compute_ms", "wire_ms", "queue_ms", "utilisation"}
        assert stage["compute_ms"] > 0 and 0 < stage["utilisation"] <= 1 and stage["queue_ms"] >= 0
    assert len({stage["node"] for stage in answer["stages"]}) == len(answer["stages"])
    waterfall = dict(answer["waterfall"])
    wall_ms = waterfall.pop("wall_ms")
    assert sum(waterfall.values()) == pytest.approx(wall_ms, rel=0.05)
    assert wall_ms == pytest.approx(1e3 * (stats["ttft_s"] + stats["decode_s"]), rel=0.05)
    assert min(waterfall.values()) >= 0
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
    assert {event["args"]["rows"] for event in slices(events)} <= set(range(1, 17))


def test_logprobs_are_of_the_tokens_and_their_alternatives(answers: dict[str, Any]) -> None:
    answer = answers["one process"]
    assert [entry["token"] for entry in answer["logprobs"]] == answer["tokens"]
    for entry in answer["logprobs"]:
        tops = [logprob for _, logprob in entry["top"]]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert entry["logprob"] <= tops[0] + 1e-5 <= 2e-5
        assert dict(map(tuple, entry["top"])).get(entry["token"], entry["logprob"]) == pytest.approx(entry["logprob"])


def test_standard_output_is_the_text_and_nothing_else(answers: dict[str, Any], talker: Path) -> None:
    for more in ((), ("--stats",)):
        outcome = run_here("generate", "--model", talker, "--local", "0", PROMPT, *REQUEST, *more)
        assert (outcome.code, outcome.out) == (0, answers["one process"]["text"] + "\n")
        blank, speed, ended, *table = outcome.err.splitlines()
        assert blank == "" and speed.startswith(f"{NUM_TOKENS} tokens, ") and "tok/s" in speed
        assert ended == f"cut off at --max-tokens {NUM_TOKENS}; sampled at --temp 0.9, --seed 11"
        assert ("wall time" in outcome.err, bool(table)) == (bool(more), bool(more))


def test_text_comes_while_it_is_made_in_whole_characters_and_an_interrupt_ends_the_line(
    start: Starter, reciter: Path
) -> None:
    running = start.brigade("generate", "--model", reciter, "--local", "0", "go", "--max-tokens", "39000")
    running.out.wait_match(".{150}", FINISH_S)
    running.send_signal(signal.SIGINT)
    outcome, pieces = running.wait(), running.out.pieces
    assert outcome.code == 130
    for piece in pieces:
        assert "\ufffd" not in piece.decode()  # strict: half a character raises
    assert len(pieces) > 20  # one by one, but for those that a busy reader finds together
    text = outcome.out.removesuffix("\n")
    assert len(text) == len(outcome.out) - 1 and list(text) == list(
        itertools.islice(itertools.cycle(RECITED), len(text))
    )
    assert re.fullmatch(r"interrupted after \d+ tokens, [\d.]+ tok/s; first after [\d.]+ s\n", outcome.err)


@pytest.mark.parametrize(
    ("stops", "expected", "reason"),
    [
        (["yz", "日😀"], "aé", "stop"),  # the one that comes first
        (["xyzaX"], (RECITED * 3)[:21], "length"),  # held back three times, never completed
    ],
)
def test_no_part_of_a_stop_string_is_printed(reciter: Path, stops: list[str], expected: str, reason: str) -> None:
    flags = ["--max-tokens", str(len((RECITED * 3)[:21].encode()))]
    flags += [flag for stop in stops for flag in ("--stop", stop)]
    command = ("generate", "--model", reciter, "--local", "0", "--prompt", "go", *flags)
    streamed, answer = run_here(*command), parse(run_here(*command, "--json"))
    assert (streamed.code, streamed.out) == (0, expected + "\n")
    assert (answer["text"], answer["finish_reason"]) == (expected, reason)


def test_the_end_of_sequence_token_ends_the_answer_unless_it_is_ignored(reciter: Path, tmp_path: Path) -> None:
    after_a = Tokenizer.from_file(str(reciter / "tokenizer.json")).encode("x").ids[0]
    model = reconfigured_copy(reciter, tmp_path / "model", eos_token_id=[EOS, END, after_a])
    common = ("--model", model, "--local", "0", "--prompt", "go", "--max-tokens", "20")
    ended, ignored = answer_here(*common), answer_here(*common, "--ignore-eos")
    assert (ended["text"], ended["finish_reason"], ended["tokens"][-1]) == ("aé日😀-", "stop", after_a)
    assert (ignored["finish_reason"], len(ignored["tokens"])) == ("length", 20)
    assert ignored["text"].startswith(RECITED)


def test_a_prompt_from_standard_input_is_the_prompt(answers: dict[str, Any], talker: Path) -> None:
    answer = answer_here("--model", talker, "--local", "0", "--prompt", "-", *REQUEST, stdin=PROMPT)
    assert answer["tokens"] == answers["one process"]["tokens"]
    assert answer["logprobs"] is None  # not asked for


def test_a_raw_prompt_is_given_as_it_stands(talker: Path) -> None:
    common = ("--model", talker, "--local", "0", "--max-tokens", "1", "--prompt", PROMPT)
    raw, templated = answer_here(*common, "--raw"), answer_here(*common, "--system-prompt", "Be brief.")
    encode = Tokenizer.from_file(str(talker / "tokenizer.json")).encode
    assert raw["prompt_tokens"] == len(encode(PROMPT).ids)
    whole = f"system: Be brief.\nuser: {PROMPT}\nassistant: "
    assert templated["prompt_tokens"] == len(encode(whole).ids) > raw["prompt_tokens"]


def test_the_reported_seed_repeats_the_answer_and_another_does_not(talker: Path) -> None:
    common = ("--model", talker, "--local", "0", "--prompt-tokens", "5,6,7", "--temp", "1", "--max-tokens", "32")
    first = answer_here(*common)
    same, other = (answer_here(*common, "--seed", str(first["seed"] + more)) for more in (0, 1))
    assert (same["tokens"], same["seed"]) == (first["tokens"], first["seed"])
    assert other["tokens"] != first["tokens"]
