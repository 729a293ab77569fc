"""Impossible commands are refused: exit code, one or two lines on standard error, nothing on standard output.

The messages here are those that users meet most; tests/surface holds the exit codes of all other commands.
"""

import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from tests.cluster.commands import run_here
from tests.cluster.models import CONTEXT, VOCAB, altered_copy, reconfigured_copy
from tests.cluster.processes import Outcome, run, write_cluster
from tools.worker_process import free_port

TOO_LONG = ",".join(["5"] * (CONTEXT + 1))
GENERATE = {  # what the message says, by flags
    "--model {nowhere}": "model folder {nowhere} does not exist",
    "--model {empty}": "{empty} has no config.json",
    "--model {cut_short}": "model.safetensors: ",
    "--model {no_tensor}": "model.layers.3.self_attn.q_proj.weight",
    "--model {unknown}": "'mamba9'",
    "--config {nowhere}": "{nowhere} does not exist",
    f"--prompt-tokens 1,{VOCAB}": "--prompt-tokens: ",
    f"--prompt-tokens {TOO_LONG}": f"--prompt-tokens: expected at most {CONTEXT - 1} tokens beside an answer",
    "--prompt go": "--prompt TEXT",
    "--no-such-flag": "No such option: --no-such-flag",
    "--decode diffusion": "mask_token_id",
}
OTHERS = {
    "generate --model {talker} --local 0 --prompt -": "--prompt: ",
    "serve --model {talker} --local 0 --host 0.0.0.0": "--host: 0.0.0.0 can be reached by others: ",
    "serve --model {talker} --local 0 --port {taken}": "in use; give another --port or --host",
    "worker --bind 127.0.0.1:{taken}": "cannot listen on 127.0.0.1:{taken}: in use",
    "worker --bind 0.0.0.0:0": "insecure",
}


@pytest.fixture(scope="module")
def places(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The files and ports of the tables, by name; nothing answers at the workers of `absent`."""
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "empty").mkdir()
    weights = Path(shutil.copytree(talker, folder / "cut_short")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    def drop_tensor(weights: dict[str, mx.array]) -> None:
        del weights["model.layers.3.self_attn.q_proj.weight"]

    altered_copy(talker, folder / "no_tensor", drop_tensor)
    reconfigured_copy(talker, folder / "unknown", model_type="mamba9")
    ghosts = [(name, f"127.0.0.1:{free_port()}") for name in ("ghost", "shade")]
    found = {path.name: str(path) for path in folder.iterdir()} | {
        "talker": str(talker),
        "nowhere": str(folder / "nowhere"),
        "absent": str(write_cluster(folder / "absent.yaml", *ghosts)),
    }
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield found | {"taken": str(other.getsockname()[1])}


def assert_refused(outcome: Outcome, said: str, max_lines: int = 2) -> None:
    assert outcome.err.startswith("error: ") and said in outcome.err, outcome.err
    assert (outcome.code, outcome.out) == (2, ""), outcome.err
    assert "Traceback" not in outcome.err and "internal error" not in outcome.err
    lines = outcome.err.splitlines()
    assert len(lines) <= max_lines and max(map(len, lines)) < 400, outcome.err


@pytest.mark.parametrize("flags", GENERATE, ids=lambda flags: flags[:40])
def test_generate_refuses_it_before_any_worker_is_asked(places: dict[str, str], flags: str) -> None:
    """A worker that was asked would be missing: exit code 3."""
    usual = {"--model": "{talker}", "--config": "{absent}", "--prompt-tokens": "1,2,3"}
    given = flags.split()
    more = [word for flag in usual.items() if flag[0] not in given for word in flag]
    arguments = [word.format_map(places) for word in (*given, *more)]
    assert_refused(run_here("generate", *arguments), GENERATE[flags].format_map(places))


@pytest.mark.parametrize("command", OTHERS)
def test_it_is_refused(places: dict[str, str], command: str) -> None:
    program, *arguments = command.format_map(places).split()
    outcome = run_here(*arguments, program="worker") if program == "worker" else run_here(program, *arguments)
    assert_refused(outcome, OTHERS[command].format_map(places))


def test_a_process_refuses_an_unknown_command() -> None:
    assert_refused(run("geenrate"), "No such command 'geenrate'")


def test_standard_input_that_is_no_text_is_refused(talker: Path) -> None:
    outcome = run_here("generate", "--model", talker, "--local", "0", "--prompt", "-", stdin="\udcff\udcfe")
    assert_refused(outcome, "--prompt: ")


def test_missing_workers_are_all_named_with_the_command_that_starts_them(places: dict[str, str]) -> None:
    outcome = run_here("verify", "--model", places["talker"], "--config", places["absent"])
    assert outcome.code == 3 and outcome.out == ""
    for name in ("ghost", "shade"):
        start = rf"brigade worker --config .* --name {name}\n"
        assert re.search(rf"worker {name}: nothing answers at 127.0.0.1:.*{start}", outcome.err)


def test_a_configuration_is_refused_with_its_file_and_each_problem_on_a_line(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("modle: demo\ncoordinator: {memory: lots}\n")
    outcome = run_here("generate", "--config", config, "--prompt", "go")
    assert_refused(outcome, f"{config} has 2 problem", max_lines=3)
    assert all(f"\n  {key}: " in outcome.err for key in ("modle", "coordinator.memory"))
