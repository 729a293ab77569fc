"""`generate --journal`: the coordinator is killed in the middle, and the next run completes the same answer."""

import signal
import time
from pathlib import Path

import pytest

from coordinator.sessions.journal import read_journal
from tests.cluster.commands import answer_here, parse, run_here
from tests.cluster.models import make_talker, reconfigured_copy
from tests.cluster.processes import FINISH_S, Starter, Worker, write_cluster

FREE_S = 10.0  # from the death of a coordinator until its workers are free
PROMPT = ("--prompt", "Tell me about the fox and the dog.", "--ignore-eos", "--max-tokens")
GREEDY, SAMPLED = ("--temp", "0"), ("--temp", "0.9", "--seed", "11")
PENALTIES = ("--top-p", "0.95", "--repetition-penalty", "1.2", "--presence-penalty", "0.3", "--logit-bias", "70:1.5")
REQUESTS = {
    "sampled": ("--decode", "ar", *SAMPLED, *PENALTIES),
    "diffusion-fast": ("--decode", "diffusion-fast", "--window", "4", *SAMPLED),
    "ar": ("--decode", "ar", *GREEDY),
    "ngram": ("--decode", "ngram", *GREEDY),
    "diffusion": ("--decode", "diffusion", "--window", "4", *SAMPLED),
}


@pytest.fixture(scope="module")
def cluster(module_start: Starter, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Worker, Path]:
    """A random model with a MASK token, a worker that holds it, and their cluster.yaml."""
    folder = tmp_path_factory.mktemp("masked")
    model = make_talker(folder / "model", mask_token_id=0)
    worker = module_start.worker("last", "--model", model)
    return model, worker, write_cluster(folder / "cluster.yaml", (worker.name, worker.address), model=str(model))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def known(journal: Path) -> list[int]:
    """The tokens that the file has by now."""
    found = read_journal(journal.read_bytes()) if journal.exists() else None
    return [token.token for token in found.known.tokens] if found else []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "sampled" else pytest.mark.matrix) for name in REQUESTS]
)
def test_an_answer_continues_after_its_coordinator_was_killed(
    start: Starter, cluster: tuple[Path, Worker, Path], journal: Path, name: str
) -> None:
    """The worker is free soon; what was printed and what the second run prints is the text."""
    model, worker, config = cluster
    request: tuple[str, ...] = (*PROMPT, "160", *REQUESTS[name])
    expected = answer_here("--model", model, "--local", "0", *request)
    if name == "sampled":
        request = (*request, "--stop", expected["text"][-30:-26])
        expected = answer_here("--model", model, "--local", "0", *request)
        assert expected["finish_reason"] == "stop"
    running = start.brigade("generate", "--config", config, *request, "--journal", journal)
    running.out.wait_match(r"(?s).{30}", FINISH_S)
    running.send_signal(signal.SIGKILL)
    printed = running.wait().out
    worker.wait_slots(0, FREE_S)
    before = known(journal)
    assert 0 < len(before) < len(expected["tokens"]) and before == expected["tokens"][: len(before)]
    rest = run_here("generate", "--config", config, "--journal", journal)
    assert rest.code == 0, rest.err
    assert printed + rest.out == expected["text"] + "\n"
    assert known(journal) == expected["tokens"]
    kept = read_journal(journal.read_bytes())
    assert kept and kept.known.finish_reason == expected["finish_reason"]
    whole = run_here("generate", "--config", config, "--journal", journal)
    assert (whole.code, whole.out) == (0, "") and "holds the whole answer already" in whole.err
    trace = journal.with_name("trace")
    outcome = run_here("generate", "--config", config, "--journal", journal, "--trace", trace, "--json")
    assert f"{trace} is not written" in outcome.err and not trace.exists()
    again = parse(outcome)
    for key in ("text", "tokens", "prompt_tokens", "finish_reason"):
        assert again[key] == expected[key], key
    assert set(again["stats"]) == {*expected["stats"], "tokens_from_journal"}


def test_logprobs_and_a_random_seed_survive_as_well(start: Starter, talker: Path, journal: Path) -> None:
    """A seed that was not given is in the journal only. Killed once, and cut in the middle."""
    command = ("--model", str(talker), "--local", "0", "--journal", str(journal))
    request = (*PROMPT, "120", "--temp", "0.9", "--logprobs", "2")
    running = start.brigade("generate", *command, *request, "--json")
    deadline = time.monotonic() + FINISH_S
    while len(known(journal)) < 20:
        assert running.is_running and time.monotonic() < deadline, running.err.text
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait().out == ""
    first = known(journal)
    answer = answer_here(*command)
    assert answer["tokens"][: len(first)] == first
    assert answer["stats"]["tokens_from_journal"] >= len(first)
    content = journal.read_bytes()
    journal.write_bytes(content[: len(content) * 2 // 3])
    again = answer_here(*command)
    assert 20 < again["stats"]["tokens_from_journal"] < 120
    assert (again["tokens"], again["text"]) == (answer["tokens"], answer["text"])
    assert len(again["logprobs"]) == 120
    journal.unlink()
    expected = answer_here(*command, *request, "--seed", str(answer["seed"]))
    assert answer["tokens"] == expected["tokens"] and answer["text"] == expected["text"]
    assert len(answer["logprobs"]) == 120
    for found, there in zip(answer["logprobs"], expected["logprobs"], strict=True):
        assert (found["token"], found["logprob"]) == (there["token"], pytest.approx(there["logprob"], abs=1e-4))
        assert [token for token, _ in found["top"]] == [token for token, _ in there["top"]]


def test_the_same_command_continues_and_a_contradiction_is_refused(talker: Path, tmp_path: Path, journal: Path) -> None:
    def run(*arguments: str | Path, model: Path | str = talker) -> tuple[int, str]:
        outcome = run_here("generate", "--model", model, "--local", "0", "--journal", journal, *arguments)
        return outcome.code, outcome.err

    request = ("go", "--max-tokens", "8", "--temp", "0.5", "--seed", "3", "--stop", "éé", "--stop-token-ids", "9,8",
               "--dry-multiplier", "1", "--dry-sequence-breaker", "x", "--logprobs", "2")  # fmt: skip
    assert run()[0] == 2 and not journal.exists()
    assert run("go", "--temp", "-1")[0] == 2 and not journal.exists()
    assert run(*request)[0] == 0
    content = journal.read_bytes()
    assert run(*request)[0] == 0
    assert run("--stop-token-ids", "8,9,1")[0] == 0, "the model's own end an answer anyhow"
    for flags, found in {
        ("other",): "another one", ("go", "--raw"): "another one", ("--max-tokens", "9"): "8, not 9",
        ("--temp", "0.6"): "0.5, not 0.6", ("--seed", "4"): "3, not 4", ("--logit-bias", "4:1.5"): "none, not 4:1.5",
        ("--stop", "x"): "'éé', not 'x'", ("--decode", "ngram"): "ar, not ngram", ("--kv", "int8"): "full, not int8",
        ("--ignore-eos",): "off, not on", ("--stop-token-ids", "8"): "8,9, not 8", ("--logprobs", "3"): "2, not 3",
        ("--dry-multiplier", "1", "--dry-sequence-breaker", "y"): "another one",
    }.items():  # fmt: skip
        code, err = run(*flags)
        field = "--prompt" if "go" in flags or "other" in flags else flags[-2 if len(flags) > 1 else 0]
        assert (code, err.startswith(f"error: {field}: the journal's request has {found};")) == (2, True), err
    assert run("--dry-multiplier", "1", "--dry-sequence-breaker", "\udc80")[0] == 2
    code, err = run("--raw")
    assert (code, err.startswith("error: --raw: ")) == (2, True), err
    for other in (reconfigured_copy(talker, tmp_path / "other", rms_norm_eps=1e-3), "demo"):
        code, err = run(model=other)
        assert code == 2 and "expected the journal's model" in err
    assert journal.read_bytes() == content
    journal.unlink()
    for _ in range(2):
        assert run("go", "--max-tokens", "2", "--ignore-eos", "--stop-token-ids", "9")[0] == 0
    assert run("--ignore-eos")[0] == 0
    journal.write_bytes(content[:60])
    assert run()[0] == 2 and journal.read_bytes() == b""
    journal.write_bytes(content[:-9] + b"?" + content[-8:])
    assert run()[0] == 2
