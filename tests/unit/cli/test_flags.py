"""Flags of every command: prompts, help, version, contradictions, and which cluster.yaml counts."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from coordinator.api import serve as server_module
from coordinator.cli import (
    batch,
    bench,
    bridge,
    chat,
    demo,
    doctor,
    eval,
    generate,
    plan,
    remote,
    score,
    status,
    verify,
)
from coordinator.cli import run as run_module
from coordinator.cli.app import app
from coordinator.cluster.options import ClusterOptions
from coordinator.deploy import discovery
from tests.unit.cli.conftest import Command
from worker.config import ClusterConfig
from worker.errors import BrigadeError, ConfigError, InputError, StageLost

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
USING = "using ./cluster.yaml"


@pytest.fixture
def opened(brigade: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The options that a command would open its cluster with, and what it would ask a chain for."""
    found: list[tuple[ClusterOptions, Any]] = []

    def note(options: ClusterOptions, *more: Any, **others: Any) -> None:
        found.append((options, more[0] if more else None))

    for module, name in (
        *((generate, "run_generate"), (demo, "run_generate"), (server_module, "serve"), (batch, "run_batch")),
        *((bridge, "run_bridge"), (score, "run_score"), (plan, "run_plan"), (verify, "run_verify"), (chat, "loaded")),
        *(
            (eval, "loaded"),
            (bench, "run_bench"),
            (plan, "run_forecast"),
            (doctor, "run_doctor"),
            (doctor, "run_smoke"),
        ),
    ):
        monkeypatch.setattr(module, name, note)
    monkeypatch.setattr(chat, "run_chat", lambda *more: None)
    monkeypatch.setattr(eval, "run_eval", lambda *more, **others: None)
    monkeypatch.setattr(run_module, "run_async", lambda work, **more: work)

    def opened(arguments: str, *more: str) -> tuple[ClusterOptions, Any]:
        brigade(*arguments.split(), *more)
        return found.pop()

    return opened


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_one_default_per_flag(
    brigade: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "900")
    paragraphs = (typer.main.get_command(app).commands[command].help or "").split("\n\n")  # type: ignore[attr-defined]
    for flag in ("-h", "--help"):
        assert not brigade(command, flag)
        shown = capsys.readouterr().out
        assert f"{command} [OPTIONS]" in shown
        assert all(" ".join(each.split()) in shown for each in paragraphs), "the terminal alone breaks lines"
        assert all(entry.count("default:") <= 1 for entry in shown.split("--"))


def test_a_prompt_is_an_argument_a_flag_or_standard_input(opened: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("generate", "demo"):
        for flags in (["Hello there"], ["-p", "Hello there"], ["--prompt", "Hello there"]):
            assert opened(command, *flags, "--json")[1].prompt == "Hello there"
    for flags in (["-"], ["-p", "-"]):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("Zürich".encode())))
        assert opened("generate", *flags)[1].prompt == "Zürich"
    assert opened("generate a --stop x --stop y")[1].spec.stops == ("x", "y")
    assert "temperature" not in opened("generate a")[1].spec.sampling, "only what was chosen overrides the model"
    assert opened("generate a --temp 0")[1].spec.sampling["temperature"] == 0
    assert [opened(f"demo {flags} --json")[0].local for flags in ("", "--local 5")] == [2, 5]
    with pytest.raises(typer.BadParameter, match="greater than or equal to 1"):
        opened("demo --local 0")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("generate", ""),
        ("generate a -p b", ""),
        ("generate a --prompt-tokens 1", ""),
        ("generate -p a --prompt-tokens 1", ""),
        ("demo a -p b", ""),
        ("generate -p a --prompt b", "prompt"),
        ("worker --name a --name b", "name"),
        ("generate a --raw --system-prompt b", "system_prompt"),
        ("generate --prompt-tokens 1 --system-prompt b", "system_prompt"),
        ("generate a --stop=", "stop"),
        ("generate a --server http://here --local 2", "local"),
        ("generate a --server http://here --model demo", "model"),
        ("generate a --server http://here --trace file", "trace"),
        ("generate a --server http://here --journal file", "journal"),
        ("generate a --server http://here --prompt-cache file", "prompt_cache"),
        ("generate a --server http://here --logprobs 2", "logprobs"),
        ("generate a --server http://here --context 9", "context"),
        ("chat --server http://here --config cluster.yaml", "config"),
        ("generate a --logprobs 3", "logprobs"),
        ("generate a --decode ar --window 4", "window"),
        ("generate a --decode diffusion --num-draft-tokens 4", "num_draft_tokens"),
        ("generate a --api-key-file file", "api_key_file"),
        ("chat --api-key-file file", "api_key_file"),
        ("eval --questions facts --api-key-file file", "api_key_file"),
        ("status --watch --json", "watch"),
        ("bench --wide --json", "wide"),
        ("cache ls --config cluster.yaml", "config"),
        ("cache rm --all --config cluster.yaml", "config"),
        ("verify --window 4", "window"),
        ("verify --draft-model owner/small --window 4", "window"),
        ("eval --questions facts --decode ar,ngram --canvas-steps 2", "canvas_steps"),
        ("generate a --entropy-threshold 0.3", "entropy_threshold"),
        ("generate a --entropy-threshold some", "entropy_threshold"),
        ("generate a --entropy-threshold f:code --position-penalty 0.02", "position_penalty"),
        ("calibrate --questions facts --draft-model owner/small", "draft_model"),
        ("plan --simulate --stage-ms 1 --canvas 4 --canvas-steps 5", "canvas_steps"),
        ("plan --simulate --config cluster.yaml --canvas-steps 5", "canvas_steps"),
        ("generate a --decode ngram --draft-model owner/small", "draft_model"),
        ("verify --decode ar --draft-model owner/small", "draft_model"),
        ("eval --questions facts --decode ar --draft-model owner/small", "draft_model"),
        ("bench --draft-model owner/small", "draft_model"),
        ("generate a --xtc-threshold 0.2", "xtc_threshold"),
        ("chat --dry-sequence-breaker x", "dry_sequence_breaker"),
        ("generate a --dry-multiplier 1 --dry-sequence-breaker=", "dry_sequence_breaker"),
        ("chat --presence-context-size 5", "presence_context_size"),
        ("generate a --draft-model none --num-draft-tokens 3", "num_draft_tokens"),
        ("generate a --journal new --trace ./new", "trace"),
        ("calibrate --questions README.md --output tests/../README.md", "output"),
        ("plan --measure-again", "measure_again"),
        ("plan --config cluster.yaml --local 2 --measure-again", "measure_again"),
        ("chat --frequency-context-size 5 --presence-penalty 0.1", "frequency_context_size"),
        ("generate a --model nowhere --temp nan", "temperature"),  # before the model is read
        ("generate a --seed 18446744073709551616", "seed"),
        ("generate a --logit-bias=-1:2", "logit_bias"),
        ("generate a --logit-bias=5:nan", "logit_bias"),
        ("bench --local 1 -p 99999", "num_prompt"),
        ("bench --local 1 --plot nowhere/x.png", "plot"),
        ("bench --local 1 --plot x.txt", "plot"),
        ("bench --failover --layers 2,2", "layers"),
        ("bench --failover --local 0", "local"),
        ("bench --failover -p 8", "num_prompt"),
    ],
)
def test_contradictory_flags_and_impossible_values_are_refused(brigade: Command, arguments: str, field: str) -> None:
    with pytest.raises(InputError) as refusal:
        brigade(*arguments.split())
    assert refusal.value.field == field


def test_flags_that_change_nothing_beside_the_others_are_accepted(opened: Command) -> None:
    for arguments in (
        "generate a --raw --raw",
        "generate a --json --json --stats",
        "generate a --local 2 --local 2 -m 3 --max-tokens=3",
        "generate --prompt-tokens 1 --raw",
        "generate a --logprobs 3 --json",
        "generate a --logprobs 3 --journal nowhere",
        "generate a --window 4 --num-draft-tokens 2",
        "generate a --decode ngram --window auto",
        "generate a --entropy-threshold 0.4",
        "generate a --temp 0 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 1",
        "generate a --objective throughput",
        "generate a --local 1 --objective throughput",
        "generate a --system-prompt=",
        "generate a --logit-bias=",
        "verify --draft-model owner/small --num-draft-tokens 2",
        "generate a --decode ar --draft-model none --conditioning exact",
        "generate a --decode ngram --draft-model none --num-draft-tokens 3",
        "generate a --xtc-threshold 0.2 --xtc-probability 0.1",
        "eval --questions facts --decode ar,canvas --canvas 4 --draft-model none",
        "eval --questions facts --decode ar,diffusion,ngram --window 4 --num-draft-tokens 2",
    ):
        assert opened(arguments)[1], arguments


def test_verify_drafts_with_a_model_but_not_with_none(opened: Command, tmp_path: Path) -> None:
    for model, kind in (("owner/small", "draft"), ("none", "ar")):
        (tmp_path / "cluster.yaml").write_text(f"draft_model: {model}\n")
        for flags in ((f"--draft-model={model}",), ("--config", str(tmp_path / "cluster.yaml"))):
            assert opened("verify", *flags)[1].kind == kind


def test_a_file_of_thresholds_gives_its_numbers_to_a_model_and_to_a_server(
    brigade: Command, opened: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, rule = tmp_path / "t.json", {"entropy_threshold": 0.3, "position_penalty": 0.1}
    file.write_text(json.dumps({"model": "demo", "kinds": {"facts": rule}}))
    fast = ("--decode", "diffusion-fast", "--entropy-threshold", f"{file}:facts")
    decode = opened("generate a", *fast)[1].spec.decode
    assert (decode.entropy_threshold, decode.position_penalty, decode.calibrated_on) == (0.3, 0.1, "demo")
    bodies: list[dict[str, Any]] = []
    monkeypatch.setattr(remote, "run_remote", lambda given, body, asked: bodies.append(body))
    brigade("generate", "a", "--server", "http://here", *fast)
    assert bodies == [{"max_tokens": 256, "decode": "diffusion-fast"} | rule]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that a command is called in, with a configuration that no command can take for another."""
    monkeypatch.chdir(tmp_path)
    keys = "model: owner/of-this-folder\ncontext: 77\nworkers: [{name: mini, address: '127.0.0.1:1'}]\n"
    (tmp_path / "cluster.yaml").write_text(keys, encoding="utf-8")
    return tmp_path


OPENING = [
    *("generate a", "chat", "serve", "batch in.jsonl -o out.jsonl", "bridge", "score text", "verify", "bench", "plan"),
    *("plan --nodes macs.yaml", "plan --simulate", "doctor --json", "smoke"),
]


@pytest.mark.parametrize("command", OPENING)
def test_the_cluster_file_of_this_folder_is_taken_unless_another_is_named(
    opened: Command, folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (folder / "text").write_text("some text", encoding="utf-8")
    options, _ = opened(command)
    assert (options.model, [each.name for each in options.cluster.workers]) == ("owner/of-this-folder", ["mini"])
    assert options.context == 77
    out, err = capsys.readouterr()
    assert err.count("\n") == err.count(USING) == 1 and USING not in out, "a server's line is JSON"
    assert opened(command, "--model", "demo")[0].model == "demo"
    assert capsys.readouterr().err.count(USING) == 1
    if "--nodes" not in command:
        (folder / "other.yaml").write_text("model: owner/other", encoding="utf-8")
        assert opened(command, "--config", "other.yaml")[0].model == "owner/other"
        assert USING not in capsys.readouterr().err
    (folder / "cluster.yaml").unlink()
    options, _ = opened(f"{command} --stage-ms 1" if "--simulate" in command else command)
    assert options.model == "demo" and not options.cluster.workers, "the bundled model"


@pytest.mark.parametrize(
    "command", ["launch", "logs mini", "keys issue Mini", "status", "nodes", "worker --name other"]
)
def test_commands_that_open_no_cluster_take_it_too(
    brigade: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    def absent(server: str, key: str | None) -> Any:
        raise remote.NothingAnswers("nothing answers")

    monkeypatch.setattr(status, "ask_server", absent)

    async def look_around(for_s: float, cluster: ClusterConfig | None) -> discovery.Discovered:
        assert cluster and [worker.name for worker in cluster.workers] == ["mini"]
        return discovery.Discovered([], 0)

    monkeypatch.setattr(discovery, "look_around", look_around)
    if command == "nodes":
        brigade(command)
    else:
        with pytest.raises((ConfigError, StageLost), match=r"mini|cluster\.yaml"):
            brigade(*command.split())
    assert capsys.readouterr().err.count(USING) == 1


@pytest.mark.parametrize("command", ["plan", "worker --name mini"])
def test_a_cluster_file_that_cannot_be_read_is_refused(brigade: Command, folder: Path, command: str) -> None:
    (folder / "cluster.yaml").unlink()
    (folder / "cluster.yaml").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="does not exist"):
        brigade(*command.split())
    (folder / "cluster.yaml").unlink()
    (folder / "cluster.yaml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        brigade(*command.split())


@pytest.mark.parametrize("flags", [["--bind", "127.0.0.1:1"], ["--keys", "keys"]])
def test_a_worker_that_is_told_where_to_listen_or_who_it_is_takes_none(
    brigade: Command,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    def reached(*_: object) -> None:
        raise BrigadeError("its configuration was read")

    monkeypatch.setattr("worker.cli.split_address", reached)
    with pytest.raises(BrigadeError, match="was read"):
        brigade("worker", "--name", "other", *flags)
    assert USING not in capsys.readouterr().err


def test_a_server_gets_the_zeros_that_were_given(brigade: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, Any]] = []
    monkeypatch.setattr(remote, "run_remote", lambda given, body, asked: bodies.append(body))
    brigade("generate", "a", "--server", "http://here", "--temp", "0", "--seed", "0", "--top-p", "0")
    assert bodies == [{"max_tokens": 256, "temperature": 0.0, "seed": 0, "top_p": 0.0}], "the server has defaults"


@pytest.mark.parametrize("command", ["generate a", "serve", "batch in.jsonl -o out.jsonl", "bench --concurrency 2,5"])
def test_every_command_that_opens_a_chain_takes_an_objective(opened: Command, folder: Path, command: str) -> None:
    options, _ = opened(command, "--objective", "throughput")
    assert (options.objective, options.num_requests) == ("throughput", 5 if command.startswith("bench") else 8)


@pytest.mark.parametrize("names", [("one/x.jsonl", "two/x.jsonl"), ("x:y.jsonl",)], ids=str)
def test_files_that_name_no_kind_of_task_of_their_own_are_not_calibrated(
    brigade: Command, tmp_path: Path, names: tuple[str, ...]
) -> None:
    flags = []
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"prompt": "a", "answer": "b"}\n' * 2, encoding="utf-8")
        flags += ["--questions", str(path)]
    with pytest.raises(InputError) as refused:
        brigade("calibrate", *flags, "-o", str(tmp_path / "thresholds.json"))
    assert refused.value.field == "questions" and "rename" in refused.value.message
