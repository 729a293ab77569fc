"""cluster.yaml as frozen, typed objects. Reports everything that is wrong with it at once, each with its YAML path."""

import contextlib
import ipaddress
import os.path
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import ErrorDetails

from worker.errors import ConfigError
from worker.yaml_file import FROM_LIST, Section, errors_of, read_yaml, refuse, repeated, shown, unknown_key, yaml_path

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_IPV6 = r"[0-9A-Fa-f]{0,4}(:[0-9A-Fa-f]{0,4}){2,7}(%[A-Za-z0-9]+)?"
_SSH_PLACE = rf"([A-Za-z0-9_][A-Za-z0-9._+-]*@)?([A-Za-z0-9_][A-Za-z0-9._-]*|{_IPV6})"
NAME_RULE = "a name of letters, digits, '-', '_' and '.'"
SIZE_RULE = "a size such as 24GiB, 24GB, 512MiB or a whole number of bytes above 0"
KEYS_FOLDER = "keys"  # beside cluster.yaml, here and on workers that are launched
MOST_ADDRESSES = 8  # of one worker: all are dialled at once
_REQUIRED = {"name": NAME_RULE, "address": "HOST:PORT", "keys": "a folder"}
_LARGEST = 2**32 - 1
_HOP_PORTS = 10_000  # from a node's port to that of its hops
_EXPECTED = {  # by pydantic's type of error
    "bool_type": "true or false",
    "greater_than": "a whole number above 0",
    "int_type": "a whole number above 0",
    "less_than_equal": f"a whole number up to {_LARGEST}",
    "model_type": "keys and values",
    "string_too_short": "text",
    "string_type": "text (in quotes, if YAML takes it for something else)",
    "too_long": f"at most {MOST_ADDRESSES} addresses",
    "too_short": "HOST:PORT, or a list of such in the order in which they are tried",
    "tuple_type": "a list",
}


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT. An IPv6 host has brackets in an address and none here; port 0 means any.

    Raises:
        ConfigError: it is no such address.
    """
    match = re.fullmatch(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})", address)
    host = match and (_ip(match["v6"], 6) if match["v6"] else _ip(match["host"], 4) or _host_name(match["host"]))
    if not match or not host or int(match["port"]) > 65535:
        raise ConfigError(f"expected HOST:PORT ([HOST]:PORT for IPv6, ports up to 65535), found {address!r}")
    return host, int(match["port"])


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, as `split_address` splits it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def hop_port(port: int) -> int:
    """Return the port of a node's hops: PORT + 10000, or PORT - 10000 where there is no such port."""
    return port + _HOP_PORTS if port + _HOP_PORTS < 2**16 else port - _HOP_PORTS


def is_loopback(host: str) -> bool:
    """Return whether this host (without brackets) can only be this machine: 127.0.0.0/8, ::1 or localhost."""
    ip = _ip(host, 4) or _ip(host, 6)
    return ipaddress.ip_address(ip).is_loopback if ip else host.lower() == "localhost"


def is_here(address: str) -> bool:
    """Return whether this HOST:PORT can only be of this machine."""
    return is_loopback(split_address(address)[0])


def may_be_plaintext(host: str, *, insecure: bool) -> bool:
    """Return whether a link to this host need not be encrypted: it is loopback, or the user trusts the network."""
    return insecure or is_loopback(host)


def _ip(host: str, version: int) -> str | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return str(ip) if ip.version == version else None


def _host_name(host: str) -> str | None:
    """Return a host's name in lower case. A last label of digits only would be a mistyped IPv4 address."""
    is_name = re.fullmatch(rf"({_LABEL}\.)*{_LABEL}", host) and not host.rpartition(".")[2].isdigit()
    return host.lower() if is_name and len(host) <= 253 else None


def is_node_name(name: str) -> bool:
    """Return whether cluster.yaml could give a node this name."""
    return re.fullmatch(r"[A-Za-z0-9._-]+", name) is not None


def is_certifiable(name: str) -> bool:
    """Return whether a certificate can carry this name: it has the form of a host's name and is no address."""
    return _host_name(name) is not None


def _check_name(name: str) -> str:
    if not is_node_name(name):
        raise ValueError(NAME_RULE)
    return name


def _check_address(address: str) -> str:
    try:
        _, port = split_address(address)
    except ConfigError:
        port = 0
    if port == 0:
        raise ValueError("HOST:PORT with a port from 1 to 65535")
    return address


def _check_ssh_place(place: str) -> str:
    """Return the place. Raises ValueError for one that ssh could take for something else than an account."""
    if not re.fullmatch(_SSH_PLACE, place):
        raise ValueError("USER@HOST, or a host of your ssh configuration, which may hold a port too")
    return place


def _parse_size(value: Any) -> int:
    """Return the bytes of '24GiB', '24GB' or a plain number of bytes."""
    size = value if isinstance(value, int) and not isinstance(value, bool) else 0
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,15}) ?([KMGT])(i?)B", value)):
        size = int(match[1]) * (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2]))
    if not 0 < size < 2**63:
        raise ValueError(SIZE_RULE)
    return size


def _from_cluster_file(folder: str, info: ValidationInfo) -> str:
    """Resolve a folder that is relative to cluster.yaml, whose own folder is the validation's context."""
    if "\0" in folder:
        raise ValueError("a folder without a zero byte in its name")
    return str(info.context / os.path.expanduser(folder)) if info.context else folder


def _one_or_more(value: Any, validate_list: ValidatorFunctionWrapHandler) -> Any:
    """Accept a list of addresses or a single one, whose problems then have the path of the key."""
    return validate_list(tuple(value)) if isinstance(value, list | tuple) else (_ONE_ADDRESS.validate_python(value),)


Name = Annotated[str, AfterValidator(_check_name)]
Address = Annotated[str, AfterValidator(_check_address)]
_ONE_ADDRESS = TypeAdapter(Address, config=ConfigDict(strict=True))
Addresses = Annotated[tuple[Address, ...], Field(min_length=1, max_length=MOST_ADDRESSES), WrapValidator(_one_or_more)]
SshPlace = Annotated[str, AfterValidator(_check_ssh_place)]
Size = Annotated[int, BeforeValidator(_parse_size)]
Count = Annotated[int, Field(gt=0, le=_LARGEST)]
ModelPlace = Annotated[str, Field(min_length=1)]
CONFIG = Path("cluster.yaml")  # used where it exists, unless --config names another
USING_CONFIG = f"using ./{CONFIG} (--config names another)"
CLUSTER_FILE = "a cluster.yaml (`brigade init` makes one)"  # for messages
NO_DRAFTER = "none"  # as `draft_model`: not even the head in the model's own folder drafts
_Folder = Annotated[str, Field(min_length=1), AfterValidator(_from_cluster_file)]


class CoordinatorConfig(Section):
    """Stage 0. `memory` is its budget in bytes; None means what the machine has."""

    name: Name = "coordinator"
    memory: Size | None = None


class WorkerConfig(Section):
    """A node, dialled at the first of its addresses that answers.

    `memory` is its budget in bytes, `model` its own copy, which counts in its own cluster.yaml; `ssh` is where
    `brigade launch` finds it.
    """

    name: Name
    addresses: Addresses = Field(alias="address")
    memory: Size | None = None
    model: ModelPlace | None = None
    ssh: SshPlace | None = None


class TlsConfig(Section):
    """`keys` is the folder of this node's certificate file."""

    keys: _Folder


class ClusterConfig(Section):
    """cluster.yaml. Only `load_cluster` checks that its values agree with each other."""

    model: ModelPlace | None = None  # a folder, a hub repository (owner/name), or "demo"
    draft_model: ModelPlace | None = None  # a small model or a draft head; or NO_DRAFTER
    models: Annotated[tuple[_Folder, ...], FROM_LIST] = ()  # a worker's folders of models
    pull: Literal["coordinator", "hub", "none"] = "coordinator"  # where a worker gets missing parts of a model
    pull_limit: Size | None = None  # bytes that a worker keeps of what coordinators have sent
    cache_disk: Size | None = None  # bytes that prefixes take on each node's disk; None: they are kept in memory only
    announce: bool = True  # whether a worker announces itself in its network
    insecure: bool = False
    tls: TlsConfig | None = None
    context: Count | None = None  # tokens that the plan reserves cache for
    layers: Annotated[tuple[Count, ...], FROM_LIST] | None = None  # per node, coordinator first
    order: Literal["free", "fixed"] = "free"  # whether the plan may reorder the workers
    objective: Literal["latency", "throughput", "prompt", "auto"] = "latency"  # of a plan by speed
    coordinator: CoordinatorConfig = CoordinatorConfig()
    workers: Annotated[tuple[WorkerConfig, ...], FROM_LIST] = ()
    _file: str = PrivateAttr("cluster.yaml")

    @property
    def file(self) -> str:
        """The path that the user gave."""
        return self._file


_SECTIONS: dict[str, type[BaseModel]] = {
    "": ClusterConfig,
    "coordinator": CoordinatorConfig,
    "tls": TlsConfig,
    "workers": WorkerConfig,
}


def load_cluster(path: Path) -> ClusterConfig:
    """Read cluster.yaml, with its folders of keys and models resolved.

    Raises:
        ConfigError: it cannot be read, or is wrong; one line per problem.
    """
    raw, problems = read_yaml(path, CLUSTER_FILE)
    if not isinstance(raw, dict):
        found = "a text" if isinstance(raw, str) else shown(raw)  # which may be a key, if the wrong file was named
        raise ConfigError(f"{path}: expected keys such as `workers:`, found {found}")
    try:
        cluster = ClusterConfig.model_validate(raw, context=path.parent)
        cluster._file = str(path)
    except ValidationError as error:
        problems += map(_describe, errors_of(error))
    problems += _disagreements(raw)
    refuse(path, problems)
    return cluster


def _describe(detail: ErrorDetails) -> str:
    """Return the line for one of pydantic's errors. The text of our own ValueError is what was expected."""
    loc, kind, found = detail["loc"], detail["type"], detail["input"]
    if kind in ("extra_forbidden", "invalid_key"):
        section = _SECTIONS[str(loc[0]) if loc[1:] else ""]
        return f"{yaml_path(*loc[:-1], str(loc[-1]))}: {unknown_key(str(loc[-1]), section)}"
    if kind == "missing":
        expected, found = _REQUIRED[str(loc[-1])], None
    elif kind == "value_error":
        expected = str(detail["ctx"]["error"])
    elif kind == "literal_error":
        expected = detail["ctx"]["expected"].replace("'", "")
    else:
        expected = _EXPECTED.get(kind, detail["msg"])
    return f"{yaml_path(*loc)}: expected {expected}, found {shown(found)}"


def _disagreements(raw: dict[Any, Any]) -> Iterator[str]:
    """Yield contradictions between values, as far as these are readable: a field's own problem hides no other."""
    listed, layers = raw.get("workers", []), raw.get("layers")
    workers = [worker if isinstance(worker, dict) else {} for worker in listed] if isinstance(listed, list) else []
    own = raw["coordinator"] if isinstance(raw.get("coordinator"), dict) else {}
    given = {"coordinator.name": own.get("name", CoordinatorConfig().name)}
    given |= {f"workers[{i}].name": worker.get("name") for i, worker in enumerate(workers)}
    names = {path: name for path, name in given.items() if isinstance(name, str)}
    by_worker = [_places(f"workers[{i}].address", worker.get("address")) for i, worker in enumerate(workers)]
    is_encrypted, is_insecure = raw.get("tls") is not None, raw.get("insecure", False) is not False
    if "tls" in raw and not is_encrypted:
        yield "tls: expected keys and values, found nothing"
    yield from repeated({path: (name, name) for path, name in names.items()})
    yield from repeated({path: found for places in by_worker for path, found in places.items()})
    yield from _meeting({path: found for places in by_worker for path, found in places.items()})
    for places in by_worker:
        here = [path for path, (_, (host, _)) in places.items() if is_loopback(host)]
        for path in here if len(here) < len(places) else ():  # each node would take loopback for itself
            expected = "expected an address by which every node reaches this worker"
            yield f"{path}: {expected}, found {places[path][0]!r} beside others"
    if is_encrypted:
        yield from _not_certifiable(names)
    if is_encrypted and is_insecure:
        yield "insecure: expected nothing beside `tls:`, which encrypts every link"
    for path, (address, (host, _)) in (item for places in by_worker for item in places.items()):
        if not may_be_plaintext(host, insecure=is_insecure or is_encrypted):
            yield (
                f"{path}: expected a loopback address, found {address!r}: this link is not encrypted; "
                "see `brigade keys init`, or set `insecure: true` if you trust this network"
            )
    if isinstance(layers, list) and isinstance(listed, list) and len(layers) != 1 + len(workers):
        yield f"layers: expected {1 + len(workers)} number(s), one per node, coordinator first, found {len(layers)}"


def _places(path: str, addresses: Any) -> dict[str, tuple[str, tuple[str, int]]]:
    """Return a worker's readable addresses with their hosts and ports, by YAML path."""
    listed = [(f"{path}[{i}]", each) for i, each in enumerate(addresses)] if isinstance(addresses, list) else None
    found = {}
    for each, address in listed or [(path, addresses)]:
        with contextlib.suppress(ConfigError):
            if isinstance(address, str):
                found[each] = address, split_address(address)
    return found


def _meeting(places: Mapping[str, tuple[str, tuple[str, int]]]) -> Iterator[str]:
    """Yield addresses that take a port of another address of their host: each takes its own, and that of its hops."""
    used: dict[tuple[str, int], tuple[str, int]] = {}
    for path, (address, (host, port)) in places.items():
        for each in (port, hop_port(port)):
            first, other = used.setdefault((host, each), (path, port))
            if other != port:  # the same port is reported as a repeated address
                expected = f"expected a port that is not 10000 or 20000 from that of {first} on this host"
                yield f"{path}: {expected}, found {address!r}: both need port {each} (frames go to PORT + 10000)"
                break


def _not_certifiable(names: dict[str, str]) -> Iterator[str]:
    """Yield names that a certificate cannot carry, or that differ only in case."""
    for path, name in names.items():
        if is_node_name(name) and not is_certifiable(name):
            yield f"{path}: expected a name like that of a host, as certificates carry it, found {name!r}"
    counts = Counter(names.values())
    yield from repeated({path: (name, name.lower()) for path, name in names.items() if counts[name] == 1})
