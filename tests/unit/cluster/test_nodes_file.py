"""The file of Macs that are not there: what it says, and what is wrong with it."""

from pathlib import Path

import pytest

from coordinator.cluster.nodes_file import read_nodes
from coordinator.planning.plan import Node
from coordinator.planning.speeds import LinkSpeed
from tests.unit.planning.test_planner import SEED_MODEL
from worker.config import NAME_RULE, SIZE_RULE
from worker.errors import ConfigError

TWO = """\
nodes:                       # the first is the coordinator, the others in any order
  - {name: max, memory: 64GiB, gbps: 546}
  - {name: mini, memory: 24GiB, gbps: 120, link: {rtt_ms: 0.3, gbit: 20}}   # link to the node before it
"""
NODE = "{name: max, memory: 64GiB, gbps: 546}"
A_LIST = f"a list of 1 to 64 nodes such as {NODE}"
LINKED = "{name: a, memory: 1GiB, gbps: 1, link"
GBPS = "a number of GB/s from 0.001 to 1000000 such as 546"
GBIT = "a number of Gbit/s from 0.001 to 1000000 such as 20"
MS = "a number of milliseconds, there and back, from 0 to 1000000 such as 0.3"
THUNDERBOLT = LinkSpeed(0.3, 2.5e9)


def written(folder: Path, text: str) -> Path:
    path = folder / "nodes.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_memory_speed_and_link_are_read(tmp_path: Path) -> None:
    """Between nodes that are not neighbours the worse of their links counts; without a link a hop costs nothing."""
    found = read_nodes(written(tmp_path, TWO))
    survey = found.survey(SEED_MODEL)
    assert found.nodes == [Node("max", 64 * 2**30), Node("mini", 24 * 2**30)] and not found.is_order_fixed
    assert survey.link("max", "mini") == survey.link("mini", "max") == THUNDERBOLT
    assert survey.speeds["mini"].ms_up_to(SEED_MODEL, 1)[1] == pytest.approx(215 / 120)
    assert not survey.speeds["mini"].is_measured
    more = "  - {name: old, memory: 8GB, gbps: 60, link: {rtt_ms: 0.2, gbit: 1}}\norder: fixed\n"
    found = read_nodes(written(tmp_path, TWO + more))
    survey = found.survey(SEED_MODEL)
    assert found.is_order_fixed
    assert survey.link("mini", "old") == survey.link("max", "old") == LinkSpeed(0.2, 1.25e8)
    assert survey.link("old", "max") == LinkSpeed(0.2, 1.25e8)
    text = "nodes: [{name: a, memory: 1GiB, gbps: 100}, {name: b, memory: 1GiB, gbps: 100}]"
    assert read_nodes(written(tmp_path, text)).survey(SEED_MODEL).link("a", "b") == LinkSpeed()
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist; expected a file of Macs such as `nodes: "):
        read_nodes(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes: []", f"nodes: expected {A_LIST}, found 0 of them"),
        ("nodes: 5", f"nodes: expected {A_LIST}, found 5"),
        (f"nodes: [{'{name: a, memory: 1GiB, gbps: 1},' * 65}]", f"nodes: expected {A_LIST}, found 65 of them"),
        ("nodes: [hm]", f"nodes[0]: expected a node such as {NODE}, found 'hm'"),
        ("nodes: [{name: a b, memory: 1GiB, gbps: 1}]", f"nodes[0].name: expected {NAME_RULE}, found 'a b'"),
        ("nodes: [{name: 5, memory: 1GiB, gbps: 1}]", f"nodes[0].name: expected {NAME_RULE}, found 5"),
        ("nodes: [{name: a, memory: much, gbps: 1}]", f"nodes[0].memory: expected {SIZE_RULE}, found 'much'"),
        ("nodes: [{name: a, memory: 1GiB}]", f"nodes[0].gbps: expected {GBPS}, found nothing"),
        ("nodes: [{name: a, memory: 1GiB, gbps: 0}]", f"nodes[0].gbps: expected {GBPS}, found 0"),
        ("nodes: [{name: a, memory: 1GiB, gbps: .nan}]", f"nodes[0].gbps: expected {GBPS}, found nan"),
        ("nodes: [{name: a, memory: 1GiB, gbps: 1e-300}]", f"nodes[0].gbps: expected {GBPS}, found '1e-300'"),
        ("nodes: [{name: a, memory: 1GiB, gbps: 1.0e-300}]", f"nodes[0].gbps: expected {GBPS}, found 1e-300"),
        ("nodes: [{name: a, memory: 1GiB, gbps: 1, memo: 5}]", "nodes[0].memo: unknown key; did you mean 'memory'?"),
        (f"nodes: [{LINKED}: 5}}]", "nodes[0].link: expected keys and values such as {rtt_ms: 0.3, gbit: 20}, found 5"),
        (f"nodes: [{LINKED}: {{mbit: 5}}}}]", "nodes[0].link.mbit: unknown key; did you mean 'gbit'?"),
        (f"nodes: [{LINKED}: {{rtt_ms: -1}}}}]", f"nodes[0].link.rtt_ms: expected {MS}, found -1"),
        (f"nodes: [{LINKED}: {{gbit: .inf}}}}]", f"nodes[0].link.gbit: expected {GBIT}, found inf"),
        ("nodes: [{name: a, memory: 1GiB, gbps: 1}, {name: a, memory: 1GiB, gbps: 1}]", "nodes[1].name: expected one"),
        ("{nodes: [{name: a, memory: 1GiB, gbps: 1}], order: any}", "order: expected free or fixed, found 'any'"),
        ("{nodes: [{name: a, memory: 1GiB, gbps: 1}], 5: any}", "5: unknown key; expected one of nodes, order"),
        ("- a", f"expected `nodes:`, {A_LIST}, found a list"),
        ("", f"expected `nodes:`, {A_LIST}, found nothing"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_nodes(written(tmp_path, text))
    assert str(caught.value).startswith(str(tmp_path / "nodes.yaml"))
    assert problem in str(caught.value)
