"""The file of `plan --nodes FILE`: assumed Macs with their memory, the speed of that memory, and their links."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from coordinator.planning.plan import Node
from coordinator.planning.speeds import LinkSpeed, NodeSpeed, Survey
from worker.config import NAME_RULE, SIZE_RULE, Name, Size
from worker.errors import ConfigError
from worker.model.model_spec import ModelSpec
from worker.yaml_file import FROM_LIST, Section, errors_of, read_yaml, refuse, repeated, shown, unknown_key, yaml_path

_MOST_NODES = 64
_LEAST, _MOST = 0.001, 1_000_000
_Rate = Annotated[float, Field(ge=_LEAST, le=_MOST, allow_inf_nan=False)]
_NODE = "{name: max, memory: 64GiB, gbps: 546}"
_WANTED = f"a file of Macs such as `nodes: [{_NODE}]`"
_EXPECTED = {  # by key
    "": f"a node such as {_NODE}",
    "nodes": f"a list of 1 to {_MOST_NODES} nodes such as {_NODE}",
    "order": "free or fixed",
    "name": NAME_RULE,
    "memory": SIZE_RULE,
    "tflops": f"a number of 10^12 operations per second from {_LEAST} to {_MOST} such as 30",
    "gbps": f"a number of GB/s from {_LEAST} to {_MOST} such as 546",
    "link": "keys and values such as {rtt_ms: 0.3, gbit: 20}",
    "rtt_ms": f"a number of milliseconds, there and back, from 0 to {_MOST} such as 0.3",
    "gbit": f"a number of Gbit/s from {_LEAST} to {_MOST} such as 20",
}


class _Link(Section):
    """The link to the node before it in the file: round trip, and Gbit per second."""

    rtt_ms: Annotated[float, Field(ge=0, le=_MOST, allow_inf_nan=False)] = 0.0
    gbit: _Rate | None = None

    def known(self) -> LinkSpeed:
        return LinkSpeed(self.rtt_ms, self.gbit * 1e9 / 8) if self.gbit else LinkSpeed(self.rtt_ms)


class _Mac(Section):
    """An assumed Mac. `memory` is the budget for weights and caches, as in cluster.yaml; `gbps` its speed in GB/s.

    `tflops` are its 10^12 operations per second in matrix products, which prompts take.
    """

    name: Name
    memory: Size
    gbps: _Rate
    tflops: _Rate | None = None
    link: _Link = _Link()


class _File(Section):
    nodes: Annotated[tuple[_Mac, ...], FROM_LIST, Field(min_length=1, max_length=_MOST_NODES)]
    order: Literal["free", "fixed"] = "free"


@dataclass(frozen=True)
class AssumedNodes:
    """The file's nodes, the coordinator first."""

    macs: Sequence[_Mac]
    is_order_fixed: bool

    @property
    def nodes(self) -> list[Node]:
        return [Node(mac.name, mac.memory) for mac in self.macs]

    def survey(self, spec: ModelSpec) -> Survey:
        """Return the speeds for this model. Neighbours in the file have the link that it gives them.

        Other pairs have the worse one of their two links; the coordinator's own end is unlimited.
        """
        ports = {mac.name: mac.link.known() for mac in self.macs[1:]}
        pairs = zip(self.macs, self.macs[1:], strict=False)
        links = {(before.name, mac.name): ports[mac.name] for before, mac in pairs}
        return Survey({mac.name: NodeSpeed.assumed(spec, mac.gbps, mac.tflops) for mac in self.macs}, ports, links)


def read_nodes(path: Path) -> AssumedNodes:
    """Read the file.

    Raises:
        ConfigError: it cannot be read, or is wrong; one line per problem.
    """
    raw, problems = read_yaml(path, _WANTED)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected `nodes:`, {_EXPECTED['nodes']}, found {shown(raw)}")
    if "workers" in raw and "nodes" not in raw:
        raise ConfigError(f"{path}: expected `nodes:`, {_EXPECTED['nodes']}, found a cluster.yaml: give it by --config")
    try:
        file = _File.model_validate(raw)
    except ValidationError as error:
        problems += map(_describe, errors_of(error))
    else:
        problems += repeated({f"nodes[{i}].name": (mac.name, mac.name) for i, mac in enumerate(file.nodes)})
    refuse(path, problems)
    return AssumedNodes(file.nodes, file.order == "fixed")


def _describe(detail: ErrorDetails) -> str:
    """Return one line for one of pydantic's findings, in the terms of YAML."""
    *before, last = loc = detail["loc"]
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        section = _Link if before and before[-1] == "link" else _Mac if before else _File
        return f"{yaml_path(*before, str(last))}: {unknown_key(str(last), section)}"
    found = shown(None if detail["type"] == "missing" else detail["input"])
    if detail["type"] in ("too_long", "too_short"):
        found = f"{len(detail['input'])} of them"
    return f"{yaml_path(*loc)}: expected {_EXPECTED['' if isinstance(last, int) else last]}, found {found}"
