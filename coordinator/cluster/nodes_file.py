"""Macs that are not there, for `plan --nodes FILE`: their memory, how fast they read it, and their links."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from coordinator.planning.plan import Node
from coordinator.planning.speeds import Link, Speed, Survey
from worker.config import Name, Size
from worker.errors import ConfigError
from worker.model.modelspec import ModelSpec
from worker.yaml_file import read_yaml

_MOST_NODES = 64
_Tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
_Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class _Link(_Section):
    """To the node before it in the file: there and back, and Gbit per second."""

    rtt_ms: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    gbit: _Positive | None = None

    def known(self) -> Link:
        return Link(self.rtt_ms, self.gbit * 1e9 / 8) if self.gbit else Link(self.rtt_ms)


class _Mac(_Section):
    """`memory` is what weights and caches may take of it, as in cluster.yaml; `gbps` GB/s at which it reads that."""

    name: Name
    memory: Size
    gbps: _Positive
    link: _Link = _Link()


class _File(_Section):
    nodes: Annotated[tuple[_Mac, ...], _Tuple, Field(min_length=1, max_length=_MOST_NODES)]
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
        """What follows for this model: nodes beside each other in the file have the link that it gives them.

        Between others it is the worse of the two that they have there; the coordinator's own end limits nothing.
        """
        ports = {mac.name: mac.link.known() for mac in self.macs[1:]}
        pairs = zip(self.macs, self.macs[1:], strict=False)
        links = {(before.name, mac.name): ports[mac.name] for before, mac in pairs}
        return Survey({mac.name: Speed.assumed(spec, mac.gbps) for mac in self.macs}, ports, links)


def read_nodes(path: Path) -> AssumedNodes:
    """Read the file.

    Raises:
        ConfigError: it cannot be read, or is wrong; one line per problem.
    """
    raw, problems = read_yaml(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected `nodes:`, a list of {{name, memory, gbps, link}}, found something else")
    try:
        file = _File.model_validate(raw)
    except ValidationError as error:
        problems += [_describe(detail) for detail in error.errors()]
    else:
        problems += _repeated([mac.name for mac in file.nodes])
    if problems:
        raise ConfigError("\n".join([f"{path} has {len(problems)} problem(s):", *(f"  {line}" for line in problems)]))
    return AssumedNodes(file.nodes, file.order == "fixed")


def _repeated(names: Sequence[str]) -> Iterator[str]:
    for i, name in enumerate(names):
        if (first := names.index(name)) < i:
            yield f"nodes[{i}].name: expected one that no other node has, found {name!r} at nodes[{first}].name too"


def _describe(detail: ErrorDetails) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).lstrip(".")
    if detail["type"] == "extra_forbidden":
        return f"{place}: unknown key"
    if detail["type"] == "too_short":
        return f"{place}: expected at least one node, found none"
    if detail["type"] == "missing":
        return f"{place}: expected a value, found nothing"
    expected = (
        detail["ctx"]["error"] if detail["type"] == "value_error" else detail["msg"][:1].lower() + detail["msg"][1:]
    )
    return f"{place}: expected {expected}, found {detail['input']!r:.60}".replace(
        "expected input should be", "expected"
    )
