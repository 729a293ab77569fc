"""What `brigade init` asks, and what it does not take for granted."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.deploy import cluster_file, discovery
from coordinator.deploy.discovery import FoundNode
from tests.unit.cli.conftest import Command
from tests.unit.deploy.test_cluster_file import CABLE, LOOPBACK, WIFI, node, plain
from worker.config import ClusterConfig, load_cluster
from worker.errors import InputError, StageLost

Init = Callable[..., tuple[ClusterConfig, str]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def init(brigade: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Init:
    """Runs `brigade init` where these nodes announce themselves and this is typed: the file, and what is said."""

    def init(
        there: list[FoundNode], *flags: str, typed: str = "", is_terminal: bool = True
    ) -> tuple[ClusterConfig, str]:
        async def look_around(timeout_s: float) -> discovery.Discovered:
            return discovery.Discovered(there, 0)

        async def all_proven(*given: object) -> dict[str, str]:
            return {}

        monkeypatch.setattr(discovery, "look_around", look_around)
        monkeypatch.setattr(cluster_file, "unproven", all_proven)
        monkeypatch.setattr("sys.stdin", Terminal(typed) if is_terminal else io.StringIO())
        path = tmp_path / "cluster.yaml"
        path.unlink(missing_ok=True)
        brigade("init", "--config", str(path), *flags)
        return load_cluster(path), capsys.readouterr().err

    return init


def names(cluster: ClusterConfig) -> list[str]:
    return [worker.name for worker in cluster.workers]


def test_no_link_is_left_unencrypted_unless_the_user_says_so(init: Init, capsys: pytest.CaptureFixture[str]) -> None:
    exposed = [plain("mini", CABLE), plain("air", WIFI)]
    for flags, typed in ((["--yes"], ""), ([], "\n")):
        with pytest.raises(StageLost, match="found no worker"):
            init(exposed, *flags, typed=typed)
        assert capsys.readouterr().err.count("links to it would not be encrypted") == 2
    assert names(init(exposed, "--yes", "--insecure")[0]) == ["mini", "air"]
    assert names(init(exposed, typed="y\n\n\n\n")[0]) == ["mini", "air"]
    assert names(init([plain("mini", LOOPBACK)], "--yes")[0]) == ["mini"]
    # workers with certificates have an authority: they are not to get a second one
    assert "next: copy the folder of keys" in init([node("mini", CABLE)], "--yes")[1]


def test_each_worker_and_the_model_are_asked_about(init: Init) -> None:
    cluster, said = init([node("mini", CABLE), node("air", WIFI)], typed="\nn\nnope\norg/model\n")
    assert names(cluster) == ["mini"] and cluster.model == "org/model"
    assert "Take mini at 169.254.10.2:1 by Thunderbolt (bridge0)?" in said


def test_an_odd_model_is_refused_at_once(brigade: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "look_around", None)
    with pytest.raises(InputError, match=r"^model: "):
        brigade("init", "--yes", "--model", "nope", "--config", str(tmp_path / "cluster.yaml"))
    assert not list(tmp_path.iterdir())


def test_without_a_terminal_yes_is_wanted_only_where_there_is_something_to_write(init: Init, tmp_path: Path) -> None:
    for there, kind, said in (
        ([node("mini", CABLE)], InputError, "^expected --yes: "),
        ([], StageLost, "^found no wor"),
    ):
        with pytest.raises(kind, match=said):
            init(there, is_terminal=False)
    assert not list(tmp_path.iterdir())


def test_without_the_worker_that_is_named_nothing_is_written(init: Init, tmp_path: Path) -> None:
    with pytest.raises(StageLost, match=r"^no worker 'nobody' announced itself"):
        init([plain("mini", LOOPBACK)], "nobody", "--yes")
    assert not list(tmp_path.iterdir())


def test_a_worker_that_is_not_taken_keeps_no_worker_of_this_machine_out(init: Init) -> None:
    there = [plain("mini", CABLE), plain("air", LOOPBACK)]
    assert names(init(there, "--yes")[0]) == ["air"]
    assert names(init(there, "--yes", "--insecure")[0]) == ["mini"]
