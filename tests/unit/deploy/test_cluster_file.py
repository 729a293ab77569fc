"""Which announced nodes get into a cluster.yaml, the file that comes of them, and a plan's layers written into it."""

import resource
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.deploy import cluster_file
from coordinator.deploy.cluster_file import (
    Draft,
    check_target,
    cluster_text,
    draft,
    within_reach,
    write_cluster,
    write_layers,
)
from coordinator.deploy.discovery import Endpoint, FoundNode
from coordinator.planning.plan import Assignment, Plan
from protos.brigade_pb2 import MEDIUM_ETHERNET, MEDIUM_LOOPBACK, MEDIUM_THUNDERBOLT, MEDIUM_UNSPECIFIED, MEDIUM_WIFI
from worker.config import ClusterConfig, load_cluster
from worker.errors import ConfigError

CABLE = Endpoint("169.254.10.2:1", "bridge0", MEDIUM_THUNDERBOLT)
WIFI = Endpoint("192.168.1.7:1", "en0", MEDIUM_WIFI)
LAN = Endpoint("10.0.0.7:1", "en7", MEDIUM_ETHERNET)
LOOPBACK = Endpoint("127.0.0.1:1", "lo0", MEDIUM_LOOPBACK)
NOWHERE = Endpoint("172.17.0.1:1", "", MEDIUM_UNSPECIFIED)
SHOWN = "ab" * 32


def node(name: str, *endpoints: Endpoint, fingerprint: str | None = SHOWN) -> FoundNode:
    return FoundNode(name, "0.1.0", fingerprint, True, None, endpoints)


def plain(name: str, *endpoints: Endpoint) -> FoundNode:
    return node(name, *endpoints, fingerprint=None)


def drafted(*nodes: FoundNode) -> Draft:
    return draft(nodes, "coordinator")


def names(found: Draft) -> list[str]:
    return [worker.name for worker in found.workers]


def test_a_worker_is_called_by_all_that_leads_there_in_order() -> None:
    [mini] = drafted(node("mini", CABLE, WIFI, NOWHERE, LOOPBACK)).workers
    assert mini.addresses == ["169.254.10.2:1", "192.168.1.7:1"]
    assert str(mini) == "mini at 169.254.10.2:1 by Thunderbolt (bridge0), else at 192.168.1.7:1 by Wi-Fi (en0)"


def test_links_are_exposed_where_they_leave_the_machine_without_a_certificate() -> None:
    assert not drafted(node("mini", CABLE)).is_exposed and not drafted(plain("mini", LOOPBACK)).is_exposed
    assert drafted(plain("mini", CABLE)).is_exposed and drafted(node("mini", CABLE)).is_encrypted
    assert drafted(FoundNode("mini", None, None, False, True, [CABLE])) == Draft(()), "it did not announce itself"


def test_of_named_ones_only_they_are_taken_or_told_of() -> None:
    there = [node("mini", CABLE), node("max", LAN), plain("air", WIFI), node("coordinator", WIFI)]
    found = draft(there, "coordinator", ["mini", "air"])
    assert names(found) == ["mini"]
    assert [line.partition(" ")[0] for line in found.left_out] == ["air"]
    assert draft(there, "coordinator", []) == drafted(*there)
    there = [node("mini", CABLE), plain("air", WIFI), node("Mini", LAN)]  # one that is not wanted keeps no other out
    assert names(draft(there, "coordinator", ["air"])) == ["air"]
    assert "2 workers have this name" in draft(there, "coordinator", ["mini"]).left_out[0]


MINI = node("mini", CABLE, WIFI)
TEXT = cluster_text("demo", "coordinator", Draft((MINI,)))


def test_a_draft_is_written_as_a_file_that_says_it(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    write_cluster(path, cluster_text("org/model", "studio", Draft((MINI,))), force=False)
    cluster = load_cluster(path)
    assert (cluster.model, cluster.coordinator.name, cluster.insecure) == ("org/model", "studio", False)
    assert cluster.tls is not None and cluster.tls.keys == str(tmp_path / "keys")
    assert [(each.name, each.addresses) for each in cluster.workers] == [("mini", ("169.254.10.2:1", "192.168.1.7:1"))]
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.yaml"]
    for endpoint, is_insecure in ((CABLE, True), (LOOPBACK, False)):
        text = cluster_text("demo", "coordinator", Draft((plain("mini", endpoint),)))
        write_cluster(path, text, force=True)
        cluster = load_cluster(path)
        assert cluster.insecure is is_insecure and cluster.tls is None


def test_a_file_that_is_there_stays_unless_it_is_wished_away(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: mine\n")
    for refuse in (partial(write_cluster, path, TEXT), partial(check_target, path)):
        with pytest.raises(ConfigError, match=r"exists already and is not overwritten: give --force"):
            refuse(force=False)
    assert path.read_text() == "model: mine\n"
    check_target(path, force=True)
    check_target(tmp_path / "other.yaml", force=False)
    write_cluster(path, TEXT, force=True)
    assert path.read_text() == TEXT
    with pytest.raises(ConfigError, match="problem"):  # what would not load is not written
        write_cluster(path, cluster_text("demo", "coordinator", Draft((MINI, MINI))), force=True)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("cluster.yaml", TEXT)]


def test_a_disk_that_becomes_full_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there once it is known to load is the file: nothing is written any more."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def load(path: Path) -> ClusterConfig:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, most[1]))
        return load_cluster(path)

    monkeypatch.setattr(cluster_file, "load_cluster", load)
    try:
        write_cluster(tmp_path / "cluster.yaml", TEXT, force=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("cluster.yaml", TEXT)]


@pytest.mark.parametrize("force", [False, True])
def test_where_there_is_no_folder_it_is_said_before_and_after(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").touch()
    for folder, why in (("file", "Not a directory"), ("nowhere", "No such file or directory")):
        path = tmp_path / folder / "cluster.yaml"
        with pytest.raises(ConfigError, match=rf"the folder \S*{folder} does not exist; make it, or give another"):
            check_target(path, force=force)
        with pytest.raises(ConfigError, match=rf"cannot write {path}: {why}"):
            write_cluster(path, TEXT, force=force)
    for place in (".", "/"):
        with pytest.raises(ConfigError, match="is a folder"):
            check_target(Path(place), force=True)


# Generating and writing an example may take any time: this makes no claim about speed.
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(model=st.text(min_size=1, max_size=40), name=st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True))
def test_no_text_becomes_anything_but_text(tmp_path_factory: pytest.TempPathFactory, model: str, name: str) -> None:
    path = tmp_path_factory.mktemp("written") / "cluster.yaml"
    text = cluster_text(model, f"{name}-", Draft((plain(name, LOOPBACK),)))
    write_cluster(path, text, force=False)
    cluster = load_cluster(path)
    assert (cluster.model, cluster.workers[0].name, cluster.coordinator.name) == (model, name, f"{name}-")


FILE = """\
# two Macs on a desk
model: demo   # the bundled one
workers:
  - {name: mini, address: "127.0.0.1:50070"}  # by Thunderbolt"""


@pytest.mark.parametrize(
    ("nodes", "kept", "why"),
    [
        ([node("mini", CABLE), node("mini", WIFI)], [], "2 workers have this name"),
        ([node("mini", CABLE), node("Mini", WIFI)], [], "2 workers have this name"),
        ([node("Coordinator", CABLE)], [], "the coordinator has this name"),
        ([node("mi.ni.", CABLE)], [], "a certificate cannot carry this name"),
        ([node("mini", NOWHERE)], [], "no interface of this machine leads there"),
        ([node("mini", CABLE), plain("air", WIFI)], ["mini"], "it was started without a certificate"),
        ([node("mini", CABLE, WIFI), node("air", LAN, WIFI)], ["mini"], "mini announces 192.168.1.7:1, too"),
    ],
)
def test_a_node_that_cannot_take_part_is_left_out(nodes: list[FoundNode], kept: list[str], why: str) -> None:
    found = drafted(*nodes)
    assert names(found) == kept
    assert found.left_out and all(" is left out: " in line for line in found.left_out) and why in found.left_out[0]


def written(folder: Path, text: str, *names: str, prompt_end: int | None = None) -> str:
    """The file's text once a plan over these nodes was to be written into it."""
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o640)
    plan = Plan(
        tuple(Assignment(name, 4 * i, 4 * i + 4, 1, 1, 9) for i, name in enumerate(names)), 1, prompt_end=prompt_end
    )
    try:
        write_layers(path, load_cluster(path), plan)
    finally:
        assert [each.name for each in folder.iterdir()] == ["cluster.yaml"]
        assert path.stat().st_mode & 0o777 == 0o640
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("end", ["", "\n"])
def test_layers_are_added_and_comments_stay(tmp_path: Path, end: str) -> None:
    assert written(tmp_path, FILE + end, *HERE) == f"{FILE}\nlayers: [4, 4]  # as brigade plan says\n"
    assert load_cluster(tmp_path / "cluster.yaml").layers == (4, 4)


def test_a_link_to_a_file_with_other_ends_of_lines_keeps_both(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    file, link = tmp_path / "file.yaml", tmp_path / "here" / "cluster.yaml"
    file.write_bytes(FILE.replace("\n", "\r\n").encode())
    link.symlink_to(file)
    plan = Plan(tuple(Assignment(name, 4 * i, 4 * i + 4, 1, 1, 9) for i, name in enumerate(HERE)), 1)
    write_layers(link, load_cluster(link), plan)
    whole = f"{FILE}\nlayers: [4, 4]  # as brigade plan says\n"
    assert link.is_symlink() and file.read_bytes() == whole.replace("\n", "\r\n").encode()


def test_layers_of_prompts_are_added_to_a_file_of_that_objective_only(tmp_path: Path) -> None:
    for objective in ("auto", "latency"):
        with pytest.raises(ConfigError):
            written(tmp_path, f"{FILE}\nobjective: {objective}", *HERE, prompt_end=4)
    assert "\nlayers: [" in written(tmp_path, f"{FILE}\nobjective: prompt", *HERE, prompt_end=4)


HERE = ("coordinator", "mini")


@pytest.mark.parametrize(
    ("text", "names", "said"),
    [
        (FILE, HERE[:1], "expected a plan over coordinator, mini, in this order"),
        (FILE, HERE[::-1], "expected a plan over coordinator, mini, in this order"),
        ('{workers: [{name: mini, address: "127.0.0.1:50070"}]}', HERE, r"write there yourself: layers: \[4, 4\]"),
        (f"{FILE}\n...\n", HERE, r"write there yourself: layers: \[4, 4\]"),
    ],
)
def test_a_file_that_cannot_take_a_plan_stays(tmp_path: Path, text: str, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        written(tmp_path, text, *names)
    assert (tmp_path / "cluster.yaml").read_text(encoding="utf-8") == text


def test_a_worker_on_loopback_is_left_out_only_beside_those_that_are_taken() -> None:
    whole = drafted(node("mini", CABLE), node("air", LOOPBACK))
    assert names(whole) == ["mini", "air"]
    [said] = within_reach(whole).left_out
    assert said.startswith("air is left out: it listens on this machine's loopback") and "--bind 0.0.0.0:1" in said
    alone = whole.without({"mini": "as you said"})
    assert within_reach(alone) == alone and names(alone) == ["air"]
