"""The file of Macs that are not there: what it says, and what is wrong with it."""

from pathlib import Path

import pytest

from coordinator.cluster.nodes_file import read_nodes
from coordinator.planning.plan import Node
from coordinator.planning.speeds import LinkSpeed
from tests.unit.planning.test_planner import SEED_MODEL
from worker.errors import ConfigError

TWO = """\
nodes:                       # the first is the coordinator, the others in any order
  - {name: max, memory: 64GiB, gbps: 546}
  - {name: mini, memory: 24GiB, gbps: 120, link: {rtt_ms: 0.3, gbit: 20}}   # link to the node before it
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "nodes.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_memory_speed_and_link_are_read(tmp_path: Path) -> None:
    """Between nodes that are not neighbours the worse of their links counts; without a link a hop costs nothing."""
    found = read_nodes(written(tmp_path, TWO))
    survey = found.survey(SEED_MODEL)
    assert found.nodes == [Node("max", 64 * 2**30), Node("mini", 24 * 2**30)] and not found.is_order_fixed
    assert survey.link("max", "mini") == survey.link("mini", "max") == LinkSpeed(0.3, 2.5e9)
    assert survey.speeds["mini"].ms_up_to(SEED_MODEL, 1)[1] == pytest.approx(215 / 120)
    assert not survey.speeds["mini"].is_measured
    more = "  - {name: old, memory: 8GB, gbps: 60, link: {rtt_ms: 0.2, gbit: 1}}\norder: fixed\n"
    found = read_nodes(written(tmp_path, TWO + more))
    survey = found.survey(SEED_MODEL)
    assert found.is_order_fixed
    assert survey.link("mini", "old") == survey.link("max", "old") == LinkSpeed(0.2, 1.25e8)
    assert survey.link("old", "max") == LinkSpeed(0.2, 1.25e8)
    text = "nodes: [{name: a, memory: 1GiB, gbps: 100, tflops: 2.5}, {name: b, memory: 1GiB, gbps: 100}]"
    assert read_nodes(written(tmp_path, text)).survey(SEED_MODEL).link("a", "b") == LinkSpeed()
    speeds = read_nodes(written(tmp_path, text)).survey(SEED_MODEL).speeds
    assert speeds["a"].knows(512) and not speeds["b"].knows(512)
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist; expected a file of Macs such as `nodes: "):
        read_nodes(tmp_path / "none.yaml")


ONE = "name: a, memory: 1GiB, gbps: 1"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes: []", "nodes: expected a list of 1 to 64 nodes such as"),
        ("nodes: 5", "nodes: expected a list of 1 to 64 nodes such as"),
        (f"nodes: [{f'{{{ONE}}},' * 65}]", "nodes: expected a list of 1 to 64 nodes such as"),
        ("nodes: [hm]", "nodes[0]: "),
        ("nodes: [{name: a b, memory: 1GiB, gbps: 1}]", "nodes[0].name: "),
        ("nodes: [{name: 5, memory: 1GiB, gbps: 1}]", "nodes[0].name: "),
        ("nodes: [{name: a, memory: much, gbps: 1}]", "nodes[0].memory: "),
        *((f"nodes: [{{name: a, memory: 1GiB{gbps}}}]", "nodes[0].gbps: ")
          for gbps in ("", ", gbps: 0", ", gbps: .nan", ", gbps: 1e-300", ", gbps: 1.0e-300")),
        (f"nodes: [{{{ONE}, memo: 5}}]", "nodes[0].memo: unknown key; did you mean 'memory'?"),
        (f"nodes: [{{{ONE}, link: 5}}]", "nodes[0].link: "),
        (f"nodes: [{{{ONE}, link: {{mbit: 5}}}}]", "nodes[0].link.mbit: unknown key; did you mean 'gbit'?"),
        (f"nodes: [{{{ONE}, link: {{rtt_ms: -1}}}}]", "nodes[0].link.rtt_ms: "),
        (f"nodes: [{{{ONE}, link: {{gbit: .inf}}}}]", "nodes[0].link.gbit: "),
        (f"nodes: [{{{ONE}}}, {{{ONE}}}]", "nodes[1].name: "),
        (f"{{nodes: [{{{ONE}}}], order: any}}", "order: "),
        (f"{{nodes: [{{{ONE}}}], 5: any}}", "5: unknown key; expected one of nodes, order"),
        ("- a", "expected `nodes:`, a list of"),
        ("", "expected `nodes:`, a list of"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_its_place(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_nodes(written(tmp_path, text))
    said = str(caught.value)
    assert said.startswith(str(tmp_path / "nodes.yaml")) and problem in said
    assert "expected `nodes:`" in said or "nodes.yaml has 1 problem:\n" in said


def test_of_many_problems_the_first_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r" has 25 problems:(\n  nodes.*){20}\n  and 5 more$"):
        read_nodes(written(tmp_path, f"nodes: [{{{ONE}, {', '.join(f'memo{i}: 1' for i in range(25))}}}]"))
