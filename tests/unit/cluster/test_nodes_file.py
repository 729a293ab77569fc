"""The file of Macs that are not there: what it says, and what is wrong with it."""

from pathlib import Path

import pytest

from coordinator.cluster.nodes_file import read_nodes
from coordinator.planning.plan import Node
from coordinator.planning.speeds import Link
from tests.unit.planning.test_fastest import SEED_MODEL
from worker.errors import ConfigError

TWO = """\
nodes:                       # the first is the coordinator, the others in any order
  - {name: max, memory: 64GiB, gbps: 546}
  - {name: mini, memory: 24GiB, gbps: 120, link: {rtt_ms: 0.3, gbit: 20}}   # link to the node before it
"""
THUNDERBOLT = Link(0.3, 2.5e9)


def written(folder: Path, text: str) -> Path:
    path = folder / "nodes.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_memory_speed_and_link_are_read(tmp_path: Path) -> None:
    found = read_nodes(written(tmp_path, TWO))
    survey = found.survey(SEED_MODEL)
    assert found.nodes == [Node("max", 64 * 2**30), Node("mini", 24 * 2**30)] and not found.is_order_fixed
    assert survey.link("max", "mini") == survey.link("mini", "max") == THUNDERBOLT
    assert survey.speeds["mini"].layers_ms(SEED_MODEL, 1)[0] == pytest.approx(215 / 120)
    assert not survey.speeds["mini"].is_measured


def test_between_nodes_that_are_not_neighbours_the_worse_of_their_links_counts(tmp_path: Path) -> None:
    more = "  - {name: old, memory: 8GB, gbps: 60, link: {rtt_ms: 0.2, gbit: 1}}\norder: fixed\n"
    found = read_nodes(written(tmp_path, TWO + more))
    survey = found.survey(SEED_MODEL)
    assert found.is_order_fixed
    assert survey.link("mini", "old") == survey.link("max", "old") == Link(0.2, 1.25e8)
    assert survey.link("old", "max") == Link(0.2, 1.25e8)


def test_without_a_link_a_hop_costs_nothing(tmp_path: Path) -> None:
    text = "nodes: [{name: a, memory: 1GiB, gbps: 100}, {name: b, memory: 1GiB, gbps: 100}]"
    assert read_nodes(written(tmp_path, text)).survey(SEED_MODEL).link("a", "b") == Link()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes: []", "nodes: expected at least one node, found none"),
        ("nodes: [{name: a, memory: 1GiB}]", "nodes[0].gbps: expected a value, found nothing"),
        ("nodes: [{name: a, memory: much, gbps: 1}]", "nodes[0].memory: expected a size such as 24GiB"),
        ("nodes: [{name: a, memory: 1GiB, gbps: 0}]", "nodes[0].gbps: expected greater than 0, found 0"),
        ("nodes: [{name: a, memory: 1GiB, gbps: .nan}]", "nodes[0].gbps: expected a finite number"),
        ("nodes: [{name: a, memory: 1GiB, gbps: 1, link: {mbit: 5}}]", "nodes[0].link.mbit: unknown key"),
        ("nodes: [{name: a, memory: 1GiB, gbps: 1, link: {rtt_ms: -1}}]", "nodes[0].link.rtt_ms: expected greater"),
        ("nodes: [{name: a, memory: 1GiB, gbps: 1}, {name: a, memory: 1GiB, gbps: 1}]", "nodes[1].name: expected one"),
        ("{nodes: [{name: a, memory: 1GiB, gbps: 1}], order: any}", "order: expected 'free' or 'fixed', found 'any'"),
        ("- a", "expected `nodes:`"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_nodes(written(tmp_path, text))
    assert problem in str(caught.value)
