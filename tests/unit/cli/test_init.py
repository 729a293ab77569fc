"""What `brigade init` asks, and what it does not take for granted."""

import io
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coordinator.cli import nodes
from coordinator.cli.app import app
from coordinator.deploy import cluster_file, discovery
from coordinator.deploy.cluster_file import draft as drafted
from tests.unit.deploy.test_cluster_file import CABLE, LOOPBACK, WIFI, node, plain
from worker.config import load_cluster
from worker.errors import InputError

OPEN = drafted([plain("mini", CABLE), plain("air", WIFI)], "coordinator")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions; all answered with their default."""
    questions: list[str] = []

    def answer(question: str, default: Any, **how: Any) -> Any:
        questions.append(question)
        return default

    monkeypatch.setattr(typer, "confirm", answer)
    monkeypatch.setattr(typer, "prompt", answer)
    return questions


def test_no_link_is_left_unencrypted_because_nobody_said_no(asked: list[str]) -> None:
    for yes in (True, False):
        asked.clear()
        found = nodes._encrypted_or_trusted(OPEN, yes=yes, insecure=False)
        assert not found.workers and len(found.left_out) == 2
        assert "links to it would not be encrypted" in found.left_out[0]
        assert len(asked) == (not yes)
    asked.clear()
    assert nodes._encrypted_or_trusted(OPEN, yes=False, insecure=True) == OPEN
    for whole in (drafted([plain("mini", LOOPBACK)], "coordinator"), drafted([node("mini", CABLE)], "coordinator")):
        assert nodes._encrypted_or_trusted(whole, yes=False, insecure=False) == whole
    assert not asked


def test_each_worker_and_the_model_are_asked_about_unless_all_is_wished(asked: list[str]) -> None:
    assert nodes._taken(OPEN, yes=True) == OPEN and nodes._model(None, yes=True) == "demo" and not asked
    assert nodes._taken(OPEN, yes=False) == OPEN and nodes._model(None, yes=False) == "demo"
    assert asked[0] == "Take mini at 169.254.10.2:1 by Thunderbolt (bridge0)?" and len(asked) == 3
    assert nodes._model("org/model", yes=False) == "org/model" and len(asked) == 3


def test_a_model_that_cannot_be_one_is_refused_before_anybody_is_looked_for_or_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "look_around", None)
    with pytest.raises(InputError) as refused:
        nodes.init(config=tmp_path / "cluster.yaml", model="nope", yes=True)
    assert refused.value.field == "model" and not list(tmp_path.iterdir())
    typed = io.StringIO("nope\norg/model\n")
    monkeypatch.setattr("sys.stdin", typed)
    assert nodes._model(None, yes=False) == "org/model" and not typed.read()


def test_who_is_not_taken_in_the_end_keeps_no_worker_of_this_machine_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look_around(timeout_s: float) -> discovery.Discovered:
        return discovery.Discovered([plain("mini", CABLE), plain("air", LOOPBACK)], 0)

    async def all_proven(*given: object) -> dict[str, str]:
        return {}

    monkeypatch.setattr(discovery, "look_around", look_around)
    monkeypatch.setattr(cluster_file, "unproven", all_proven)
    for flags, worker in ((["--yes"], "air"), (["--yes", "--insecure", "--force"], "mini")):
        path = tmp_path / "cluster.yaml"
        assert CliRunner().invoke(app, ["init", "--config", str(path), *flags]).exit_code == 0
        assert [each.name for each in load_cluster(path).workers] == [worker]


def test_who_has_certificates_already_is_not_to_get_a_second_authority(capsys: pytest.CaptureFixture[str]) -> None:
    nodes._say_next(Path("cluster.yaml"), Path("keys"), is_proven=False)
    said = capsys.readouterr().err.splitlines()
    assert said[1].startswith("next: copy the folder of keys of these workers' cluster to keys")
    assert said[2].startswith("only if it is lost: brigade keys init --config cluster.yaml")
