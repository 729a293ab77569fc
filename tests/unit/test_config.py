"""cluster.yaml: every key typed, every mistake one line with its path, and links that have to be encrypted."""

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from worker.config import (
    ClusterConfig,
    CoordinatorConfig,
    TlsConfig,
    WorkerConfig,
    is_loopback,
    load_cluster,
    split_address,
)
from worker.errors import ConfigError

FULL = """
model: owner/name
models: [shelf, /volumes/models]
pull: hub
pull_limit: 200GiB
insecure: true
context: 8192
layers: [3, 2, 1]
coordinator: {name: studio, memory: 64GiB}
workers:
  - {name: mini, address: "mini.local:50070", memory: 16GB}
  - {name: air_2, address: "[fe80::1%en0]:50071", model: /models/copy}
"""


def load(tmp_path: Path, text: str) -> ClusterConfig:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return [line.strip() for line in str(caught.value).splitlines()][1:]


def one_worker(address: object = "[::1]:1", name: str = "w", **more: object) -> str:
    """As YAML; JSON is that."""
    return "workers: " + json.dumps([{"name": name, "address": address} | more], ensure_ascii=False)


def test_every_key_arrives_typed_and_is_optional(tmp_path: Path) -> None:
    expected = ClusterConfig(
        model="owner/name", models=(str(tmp_path / "shelf"), "/volumes/models"), pull="hub", pull_limit=200 * 2**30,
        insecure=True, context=8192, layers=(3, 2, 1), coordinator=CoordinatorConfig(name="studio", memory=64 * 2**30),
        workers=(WorkerConfig(name="mini", address=("mini.local:50070",), memory=16 * 10**9),
                 WorkerConfig(name="air_2", address=("[fe80::1%en0]:50071",), model="/models/copy")),
    )  # fmt: skip
    assert load(tmp_path, FULL).model_dump() == expected.model_dump()
    empty = load(tmp_path, "{}")
    assert empty.model_dump() == ClusterConfig().model_dump()
    assert (empty.model, empty.pull, empty.insecure, empty.context) == (None, "coordinator", False, None)
    assert (empty.coordinator.name, empty.workers) == ("coordinator", ())


def test_a_loaded_cluster_cannot_be_changed(tmp_path: Path) -> None:
    cluster = load(tmp_path, FULL)
    assert hash(cluster) == hash(load(tmp_path, FULL))
    for section, key in ((cluster, "model"), (cluster.coordinator, "name"), (cluster.workers[0], "name")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, "other")


def test_memory_sizes_become_bytes(tmp_path: Path) -> None:
    for size, num_bytes in (
        ("24GiB", 24 * 2**30), ("24 GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("512MiB", 2**29), ("3KB", 3000),
        ("2TiB", 2**41), (1, 1),
    ):  # fmt: skip
        assert load(tmp_path, one_worker(memory=size)).workers[0].memory == num_bytes
        assert load(tmp_path, f"coordinator: {{memory: {size}}}").coordinator.memory == num_bytes


UNIQUE = "expected one that no other node has"
COUNT = "expected a whole number above 0"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("memory: 5", "memory"),
        ("coordinator: {adress: x}", "coordinator.adress"),
        ("model: 5", "model"),
        ("model: [" + "x, " * 99 + "]", "model"),
        ("models: ['']", "models[0]"),
        ("pull: all", "pull"),
        ("insecure: 1", "insecure"),
        ("context: true", "context"),
        ("layers: [0]", "layers[0]"),
        ("layers: [6]\n" + one_worker(), "layers"),
        *((f"coordinator: {{memory: {size}}}", "coordinator.memory") for size in (0, "-1GB", "24G", 1.5, "0GiB")),
        ("workers:", "workers"),
        ("workers: {name: mini}\nlayers: [1, 2, 3]", "workers"),
        ("workers: [mini]", "workers[0]"),
        ("workers: [{name: w}]", "workers[0].address"),
        ("workers: [{address: '[::1]:1'}]", "workers[0].name"),
        *((one_worker(name=name), "workers[0].name") for name in ("", "a/2", "a\n", "ü", "coordinator")),
        *((one_worker(address), "workers[0].address") for address in ("mini", "localhost:0", [])),
        (one_worker(["localhost:5", "mini"]), "workers[0].address[1]"),
        (one_worker(["mini"]), "workers[0].address[0]"),
        (one_worker([f"localhost:{port}" for port in range(1, 10)]), "workers[0].address"),
        (one_worker(["localhost:5", "localhost:6", "LOCALHOST:5"]), "workers[0].address[2]"),
        ("model: demo\nmodel: other", "line 2"),
        ("tls:", "tls"),
        ("tls: {}", "tls.keys"),
        ('tls: {keys: "a\\0b"}', "tls.keys"),
        ("context: 0x" + "f" * 6000, "context"),
        ("tls: {keys: a}\ninsecure: true", "insecure"),
        ("tls: {keys: a}\ncoordinator: {name: 10.0.0.1}", "coordinator.name"),
        ("tls: {keys: a}\ncoordinator: {name: Mini}\n" + one_worker(name="mini"), "workers[0].name"),
    ],
)
def test_a_mistake_is_one_line_with_its_path(tmp_path: Path, text: str, path: str) -> None:
    [found] = problems(tmp_path, text)
    assert re.match(rf"{re.escape(path)}: (expected|unknown key)", found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("worker: []", "worker: unknown key; did you mean 'workers'?"),
        ("context: " + "x" * 99, f"context: {COUNT}, found '{'x' * 76}..."),
    ],
)
def test_a_mistake_is_told_with_what_was_expected_and_what_was_found(tmp_path: Path, text: str, problem: str) -> None:
    assert problems(tmp_path, text) == [problem]


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = """
context: none
insecure: false
layers: [3, 0]
coordinator: {name: mini}
workers:
  - {name: mini, address: "127.0.0.1:50070", memroy: 8GiB}
  - {name: pro, name: pro, address: "127.0.0.1:50070"}
  - {name: pro, address: "10.0.0.2:50070"}
"""
    assert problems(tmp_path, text) == [
        "line 8: expected each key once, found 'name' on line 8 too",
        f"context: {COUNT}, found 'none'",
        f"layers[1]: {COUNT}, found 0",
        "workers[0].memroy: unknown key; did you mean 'memory'?",
        f"workers[0].name: {UNIQUE}, found 'mini' at coordinator.name too",
        f"workers[2].name: {UNIQUE}, found 'pro' at workers[1].name too",
        f"workers[1].address: {UNIQUE}, found '127.0.0.1:50070' at workers[0].address too",
        "workers[2].address: expected a loopback address, found '10.0.0.2:50070': this link is not "
        "encrypted; see `brigade keys init`, or set `insecure: true` if you trust this network",
        "layers: expected 4 number(s), one per node, coordinator first, found 2",
    ]


def test_workers_elsewhere_need_insecure_or_tls_and_those_on_loopback_neither(tmp_path: Path) -> None:
    for host in ("10.0.0.2", "0.0.0.0", "mini.local", "[fe80::1%en0]", "[::]", "localhost.evil.org"):
        text = one_worker(f"{host}:50070")
        for listed in (text, one_worker(["localhost:5", f"{host}:50070"])):
            assert any(
                f"expected a loopback address, found '{host}:50070'" in each for each in problems(tmp_path, listed)
            )
        assert load(tmp_path, text + "\ninsecure: true").insecure
        assert load(tmp_path, "tls: {keys: keys}\n" + text).tls == TlsConfig(keys=str(tmp_path / "keys"))
    for host in ("127.0.0.1", "127.8.9.10", "[::1]", "[0:0::1]", "localhost", "LocalHost"):
        assert load(tmp_path, one_worker(f"{host}:50070")).workers[0].addresses == (f"{host}:50070",)


@pytest.mark.parametrize("trusted", ["insecure: true", "tls: {keys: keys}"])
def test_loopback_among_other_addresses_would_be_each_node_itself(tmp_path: Path, trusted: str) -> None:
    told = "expected an address by which every node reaches this worker, found '127.0.0.1:5' beside others"
    text = one_worker(["10.0.0.2:5", "127.0.0.1:5"]) + f"\n{trusted}"
    assert problems(tmp_path, text) == [f"workers[0].address[1]: {told}"]


def test_an_address_belongs_to_one_node_however_it_is_spelled(tmp_path: Path) -> None:
    def two_workers(one: object, other: object) -> str:
        return "workers: " + json.dumps([{"name": "a", "address": one}, {"name": "b", "address": other}])

    assert len(load(tmp_path, two_workers("localhost:5", "localhost:6")).workers) == 2
    for one, other in (("[::1]:5", "[0::1]:5"), ("localhost:5", "LOCALHOST:5"), ("[::1]:5", "[::1]:05")):
        told = f"workers[1].address: {UNIQUE}, found {other!r} at workers[0].address too"
        assert problems(tmp_path, two_workers(one, other)) == [told]
    told = f"workers[1].address[1]: {UNIQUE}, found 'localhost:5' at workers[0].address too"
    assert problems(tmp_path, two_workers("localhost:5", ["localhost:6", "localhost:5"])) == [told]


def test_addresses_keep_the_order_of_the_file_and_keys_may_be_anywhere(tmp_path: Path) -> None:
    text = one_worker(["169.254.10.2:5", "mini.local:5", "[fe80::1]:7"]) + "\ninsecure: true"
    assert load(tmp_path, text).workers[0].addresses == ("169.254.10.2:5", "mini.local:5", "[fe80::1]:7")
    for keys, folder in ((tmp_path / "own", tmp_path / "own"), ("~/own", Path.home() / "own")):
        assert load(tmp_path, f"tls: {{keys: {keys}}}").tls == TlsConfig(keys=str(folder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# nothing yet\n", "expected keys such as `workers:`, found nothing"),
        (b"- name: mini", "expected keys such as `workers:`, found a list"),
        (b"mini", "expected keys such as `workers:`, found a text"),
        (b"model: demo\nworkers: [", "line 2: not valid YAML: expected the node content, but found '<stream end>'"),
        (b"a: 1\n---\nb: 1", "line 2: not valid YAML: but found another document"),
        (b"model: !!python/object:os.system x", "line 1: not valid YAML: could not determine a constructor"),
        (b"model: 2026-13-45", "is not valid YAML: month must be in 1..12"),
        (b"model: \x07", "is not valid YAML: unacceptable character #x0007"),
        (b"model: caf\xe9", "utf-8"),
        (b"#" * (1 << 20) + b"\n", "has 1048577 bytes; expected at most 1048576"),
        (None, "does not exist"),
    ],
)
def test_a_file_of_no_mapping_or_unreadable_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


def test_an_address_splits_into_host_and_port_or_is_refused() -> None:
    for address, expected in (
        ("127.0.0.1:50070", ("127.0.0.1", 50070)), ("Mini-2.Local:65535", ("mini-2.local", 65535)),
        ("[::1]:50070", ("::1", 50070)), ("[FE80:0::1%en0]:7", ("fe80::1%en0", 7)), ("localhost:0", ("localhost", 0)),
        (f"{'a' * 63}.local:1", (f"{'a' * 63}.local", 1)),
    ):  # fmt: skip
        assert split_address(address) == expected
    for address in (
        "", "mini", "mini:", ":50070", "mini:x", "mini:65536", "mini:-1", "mini:1 ", " mini:1", "mini:1\n", "mini:٣",
        "::1:50070", "[::1]", "[::1:50070", "[mini]:1", "[127.0.0.1]:1", "[]:1", "10.0.0.256:1", "10.0.1:1", "a b:1",
        "-mini:1", "a..b:1", "http://mini:1", f"{'a.' * 127}a:1", f"{'a' * 64}.local:1",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            split_address(address)


def test_only_this_machine_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.255.255.254", "::1", "localhost", "LOCALHOST")))
    for host in ("128.0.0.1", "0.0.0.0", "::", "fe80::1", "127.0.0.1.example.org", "mini.local", ""):
        assert not is_loopback(host)


@pytest.mark.parametrize(
    ("first", "second", "met"), [(50070, 60070, 60070), (40070, 50070, 50070), (60070, 40070, 50070)]
)
def test_workers_of_one_host_whose_ports_meet_are_refused(tmp_path: Path, first: int, second: int, met: int) -> None:
    """Each takes its own, and one of its hops."""

    def second_at(address: str) -> str:
        workers = [{"name": "a", "address": f"127.0.0.1:{first}"}, {"name": "b", "address": address}]
        return "workers: " + json.dumps(workers)

    [line] = problems(tmp_path, second_at(f"127.0.0.1:{second}"))
    assert line.startswith("workers[1].address: ") and f"both need port {met}" in line
    assert load(tmp_path, second_at(f"127.0.0.2:{second}")) and load(tmp_path, second_at(f"127.0.0.1:{second + 1}"))
