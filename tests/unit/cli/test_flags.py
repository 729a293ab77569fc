"""Flags of every command: a prompt in any form, help, version, and what is refused since it would change nothing."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from coordinator.cli import commands, generate, run_async
from coordinator.cli.app import app
from coordinator.cluster.options import ClusterOptions
from coordinator.doors import batch
from coordinator.http import run
from tests.unit.cli.conftest import Command
from worker.errors import InputError

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("help_flag", ["-h", "--help"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(
    brigade: Command, capsys: pytest.CaptureFixture[str], command: str, help_flag: str
) -> None:
    assert not brigade(command, help_flag)
    assert f"{command} [OPTIONS]" in capsys.readouterr().out


def test_no_help_gives_two_defaults_of_a_flag(brigade: Command, capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        brigade(command, "-h")
        for entry in capsys.readouterr().out.split("--"):
            assert entry.count("default:") <= 1, entry


def test_the_version_is_told_with_those_of_what_computes(brigade: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert not brigade("--version")
    told = capsys.readouterr().out
    assert told.startswith("brigade 0.") and "mlx " in told and "mlx-lm " in told and told.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "demo"])
@pytest.mark.parametrize("flags", [["Hello there"], ["-p", "Hello there"], ["--prompt", "Hello there"]])
def test_a_prompt_is_an_argument_or_a_flag(wished: Command, command: str, flags: list[str]) -> None:
    assert wished(command, *flags, "--json").prompt == "Hello there"


def test_a_demo_has_as_many_workers_as_it_is_told(wished: Command, chosen: list[ClusterOptions]) -> None:
    for flags in ((), ("--local", "5")):
        wished("demo", *flags, "--json")
    assert [each.local for each in chosen] == [2, 5]
    with pytest.raises(typer.BadParameter, match="greater than or equal to 1"):
        wished("demo", "--local", "0")


@pytest.mark.parametrize("flags", [["-"], ["-p", "-"]])
def test_a_dash_reads_the_prompt_from_standard_input(
    wished: Command, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("Zürich".encode())))
    assert wished("generate", *flags).prompt == "Zürich"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("generate", "none"),
        ("generate a -p b", "the argument 'a' and --prompt 'b'"),
        ("generate a --prompt-tokens 1", "the argument 'a' and --prompt-tokens '1'"),
        ("generate -p a --prompt-tokens 1", "--prompt 'a' and --prompt-tokens '1'"),
        ("demo a -p b", "the argument 'a' and --prompt 'b'"),
    ],
)
def test_there_is_exactly_one_prompt(brigade: Command, arguments: str, found: str) -> None:
    forms = r"--prompt TEXT \(.*\)"
    if "demo" not in arguments:
        forms = f"either {forms} or --prompt-tokens 1,2,3"
    with pytest.raises(InputError, match=f"^expected {forms}, found {found}$"):
        brigade(*arguments.split())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("generate -p a -p b", "prompt"),
        ("generate -p a --prompt b", "prompt"),
        ("generate a --temp 1 --temp 0.5", "temp"),
        ("generate a --raw --raw", "raw"),
        ("generate a --json --json", "json"),
        ("worker --name a --name b", "name"),
        ("plan --model a --model=b", "model"),
        ("verify -m 3 --max-tokens 4", "max_tokens"),
        ("bench -g 3 -g 4", "num_tokens"),
    ],
)
def test_a_flag_that_takes_one_value_is_given_once(brigade: Command, arguments: str, field: str) -> None:
    with pytest.raises(InputError, match="expected once, found it twice") as refusal:
        brigade(*arguments.split())
    assert refusal.value.field == field


def test_a_flag_that_can_be_repeated_can_be_repeated(wished: Command) -> None:
    assert wished("generate", "a", "--stop", "x", "--stop", "y").stops == ("x", "y")


IDLE = [
    ("generate a --raw --system-prompt b", "system_prompt", "--raw"),
    ("generate --prompt-tokens 1 --raw", "raw", "--prompt-tokens"),
    ("generate --prompt-tokens 1 --system-prompt b", "system_prompt", "--prompt-tokens"),
    ("generate a --logprobs 3", "logprobs", "without --json"),
    ("generate a --json --stats", "stats", "--json"),
    ("generate a --json -v", "stats", "--json"),
    ("generate a --decode ar --window 4", "window", "--decode ar"),
    ("generate a --decode ngram --window auto", "window", "--decode ngram"),
    ("verify --window 4", "window", "--decode ar"),
    ("verify --position-penalty 0", "position_penalty", "diffusion-fast"),
    ("generate a --entropy-threshold 0.4", "entropy_threshold", "diffusion-fast"),
    ("generate a --decode diffusion --position-penalty 0.1", "position_penalty", "diffusion-fast"),
    ("generate a --temp 0 --top-p 0.9", "top_p", "--temp 0"),
    ("generate a --temp 0 --top-k 5", "top_k", "--temp 0"),
    ("generate a --temp 0 --min-p 0.1", "min_p", "--temp 0"),
    ("generate a --temp 0 --seed 1", "seed", "--temp 0"),
    *(
        (f"{command} --objective throughput", "objective", "without --config")
        for command in (
            "generate a",
            "generate a --local 1",
            "serve",
            "batch in.jsonl -o out.jsonl",
            "bench",
            "bench --config x.yaml --local 1",
        )
    ),
    ("bench --config two.yaml --layers 4,4 --objective throughput", "objective", "with --layers"),
    ("plan --measure-again", "measure_again", "without --config"),
    ("plan --measure-again --config x.yaml --local 1", "measure_again", "without --config"),
]


@pytest.mark.parametrize(("arguments", "field", "why"), IDLE, ids=lambda value: str(value)[:50])
def test_a_flag_that_would_change_nothing_is_refused(
    brigade: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, field: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("model: demo", encoding="utf-8")
    Path("two.yaml").write_text("workers: [{name: n1, address: '127.0.0.1:1'}]", encoding="utf-8")
    with pytest.raises(InputError, match=f"changes nothing .*{why}") as refusal:
        brigade(*arguments.split())
    assert refusal.value.field == field


@pytest.mark.parametrize("command", ["generate a", "serve", "batch in.jsonl -o out.jsonl", "bench --concurrency 2,5"])
def test_what_plans_are_to_be_fast_at_is_asked_of_all_who_open_a_chain(
    brigade: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """`bench` has a number of requests of its own; one request is what all plan for unless they are told otherwise."""
    config = tmp_path / "cluster.yaml"
    config.write_text("workers: [{name: n1, address: '127.0.0.1:1'}]", encoding="utf-8")
    found: list[ClusterOptions] = []
    monkeypatch.setattr(run_async, "run_async", lambda work: work)
    for module, name in ((generate, "run_generate"), (commands, "run_bench"), (run, "serve"), (batch, "run_batch")):
        monkeypatch.setattr(module, name, lambda options, *more, **others: found.append(options))
    for flags in ((), ("--objective", "throughput")):
        brigade(*command.split(), "--config", str(config), *flags)
    requests = 5 if command.startswith("bench") else 8
    assert [options.objective for options in found] == ["latency", "throughput"]
    assert found[1].num_requests == requests


@pytest.mark.parametrize(
    "arguments",
    [
        "generate a --window 4",  # `auto` decides whether there are windows
        "generate a --decode diffusion --window auto",
        "generate a --decode diffusion-fast --window 8 --entropy-threshold 0.4 --position-penalty 0",
        "generate a --top-p 0.9 --seed 3",  # the model decides whether it is sampled
        "generate a --temp 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3",
        "generate a --temp 0 --repetition-penalty 1.1 --logit-bias 5:1",
        "generate a --json --logprobs 0",
        "generate a --stats",
        "generate a --raw",
        "verify --seed 3",
        "verify --decode diffusion --window 8",
    ],
)
def test_a_flag_that_may_change_something_is_not(wished: Command, arguments: str) -> None:
    assert wished(*arguments.split())


@pytest.mark.parametrize(
    ("flag", "field"), [("--stop=", "stop"), ("--system-prompt=", "system_prompt"), ("--logit-bias=", "logit_bias")]
)
def test_an_empty_text_is_as_good_as_no_flag_and_refused(brigade: Command, flag: str, field: str) -> None:
    with pytest.raises(InputError, match="expected some text, found none") as refusal:
        brigade("generate", "a", flag)
    assert refusal.value.field == field


@pytest.mark.parametrize("flags", ["--temp nan", "--top-p 2", "--top-k -1", "--repetition-penalty -3"])
def test_a_value_that_none_can_have_is_refused_before_the_model_is_read(brigade: Command, flags: str) -> None:
    with pytest.raises(InputError, match="expected a"):
        brigade("generate", "a", "--model", "nowhere", *flags.split())


def test_only_what_was_chosen_overrides_the_model(wished: Command) -> None:
    assert "temperature" not in wished("generate", "a").sampling
    assert wished("generate", "a", "--temp", "0").sampling["temperature"] == 0
