"""What an earlier version has written is read: journals, received layers, keys, installed services.

The bundled model was trained again since; the journals have its present fingerprint in the place of the former one.
"""

import json
import os
import plistlib
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.commands import answer_here, parse, run_here
from tests.cluster.conftest import start as start
from tests.cluster.processes import START_S, Running, Starter, write_cluster
from tests.fixtures.recipes import write_keys

FIXTURES = Path(__file__).parents[1] / "fixtures"
JOURNALS = sorted(path.stem for path in (FIXTURES / "journals").glob("*.json"))
DEMO = Path(__file__).parents[2] / "worker" / "demo"
RECEIVED_NS = 946_684_800 * 10**9  # the last change of received files: 2000-01-01


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def journal_of(name: str, folder: Path, *, is_cut: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was printed of a journal when it was written, and what is printed of it, whole or cut, today."""
    data = (FIXTURES / "journals" / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) * 4 // 5 + 3] if is_cut else data)
    found = answer_here("--model", "demo", "--local", "0", "--journal", folder / name)
    return json.loads((FIXTURES / "journals" / f"{name}.json").read_text()), found


def test_a_journal_of_every_decoder_is_its_answer(tmp_path: Path) -> None:
    for name in JOURNALS:
        written, found = journal_of(name, tmp_path, is_cut=False)
        assert {key: found[key] for key in written} == written
        assert found["stats"]["tokens_from_journal"] == len(written["tokens"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("diffusion-fast", "sampled") else pytest.mark.matrix)
        for name in JOURNALS
    ],
)
def test_a_journal_continues_where_it_was_cut_within_a_record(name: str, tmp_path: Path) -> None:
    written, rest = journal_of(name, tmp_path, is_cut=True)
    known = rest["stats"]["tokens_from_journal"]
    assert 0 < known < len(written["tokens"])
    assert rest["tokens"][:known] == written["tokens"][:known]
    assert len(rest["tokens"]) == len(written["tokens"]) and rest["finish_reason"] == "length"
    assert rest["seed"] == written["seed"] and rest["prompt_tokens"] == written["prompt_tokens"]


def test_received_layers_are_used_and_not_sent_again(cache: Path, start: Starter, tmp_path: Path) -> None:
    shards = Path(shutil.copytree(FIXTURES / "received" / "shards", cache / "brigade" / "shards"))
    files = sorted(path for path in shards.rglob("*") if path.is_file())
    for path in files:
        os.utime(path, ns=(time.time_ns(), RECEIVED_NS))
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in files if path.name != "called"}
    [listed] = parse(run_here("cache", "ls", "--json"))["models"]
    [folder] = shards.iterdir()
    assert (listed["key"], listed["model"], listed["layers"]) == (folder.name, "tiny", [1, 2])
    mini = start.worker("mini")
    config = write_cluster(tmp_path / "cluster.yaml", ("mini", mini.address), layers="[1, 2]")
    model = FIXTURES / "received" / "model"
    asked = ("--config", config, "--model", model, "--prompt-tokens", "5,6,7", "-m", "4", "--ignore-eos")
    found = answer_here(*asked, "--temp", "0")
    written = json.loads((FIXTURES / "received" / "answer.json").read_text())
    assert len(found["tokens"]) == len(written["tokens"])
    assert [(stage["node"], stage["start"], stage["end"]) for stage in found["stages"]] == [
        ("coordinator", 0, 1),
        ("mini", 1, 3),
    ]
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in before} == before, "nothing was received anew"
    assert {path.name for path in folder.iterdir()} == {path.name for path in files}


@pytest.mark.usefixtures("cache")
def test_keys_let_nodes_in_and_their_authority_issues_more(start: Starter, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", "studio", ["mini"])
    config = tmp_path / "cluster.yaml"
    config.write_text("tls: {keys: keys}\ncoordinator: {name: studio}\n")
    issued = run_here("keys", "issue", "air", "--config", config)
    assert issued.code == 0, issued.err
    workers = [start.worker(name, "--keys", tmp_path / "keys") for name in ("mini", "air")]
    entries = ", ".join(f"{{name: {each.name}, address: '{each.address}'}}" for each in workers)
    config.write_text(f"{config.read_text()}workers: [{entries}]\nlayers: [4, 2, 2]\n")
    found = answer_here("--config", config, "--model", "demo", "-m", "4", "Hi")
    assert [stage["node"] for stage in found["stages"]] == ["studio", "mini", "air"]


def test_the_command_of_an_installed_service_starts_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the configuration that was put beside it, but for the address, which a test cannot have."""
    services = FIXTURES / "services"
    unit, script = (services / name for name in ("brigade-worker-mini.service", "run.sh"))
    commands = [
        plistlib.loads((services / "brigade.worker.mini.plist").read_bytes())["ProgramArguments"],
        shlex.split(re.findall("^ExecStart=(.*)", unit.read_text(), re.MULTILINE)[0]),
        shlex.split(re.findall("^exec (.*)", script.read_text(), re.MULTILINE)[0]),
    ]
    for command in commands:
        assert re.fullmatch(r"/\w+/anna/\.brigade/versions/[0-9a-f]{16}/bin/python", command[0])
        place = command.index("--config") + 1
        assert re.fullmatch(r"/\w+/anna/\.brigade/worker-mini/cluster\.yaml", command[place])
        command[place] = str(tmp_path / "cluster.yaml")
    arguments = commands[0][1:]
    assert all(command[1:] == arguments for command in commands)
    write_keys(tmp_path / "keys", "studio", ["mini"])
    config = (services / "cluster.yaml").read_text().replace("192.0.2.1:50070", "127.0.0.1:1")
    (tmp_path / "cluster.yaml").write_text(config)
    monkeypatch.setenv("PYTHONPATH", str(DEMO.parents[1]))  # -P takes the working directory from the path
    running = Running(*arguments, "--bind", "127.0.0.1:0", "--no-announce")
    try:
        assert running.err.wait_match(r"worker mini listens on (\S+)\n", START_S)
    finally:
        running.end()
