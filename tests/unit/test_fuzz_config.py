"""cluster.yaml at random, nearly right or extreme: a configuration, or a ConfigError; little memory, no hang."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fuzz import ODD_NUMBERS, fuzzed, nearly, within
from worker.config import load_cluster
from worker.errors import ConfigError
from worker.node.configuration import configuration_of

SOUND = b"""\
model: mlx-community/Qwen3-30B-4bit
context: 4096
layers: [2, 1, 1]
insecure: true
coordinator: {name: max, memory: 48GiB}
workers:
  - {name: mini, address: "192.168.1.7:50070", memory: 12GB, model: ~/models/qwen}
  - {name: air, address: "[fe80::1]:50070"}
"""
KEYS = ["model", "context", "layers", "insecure", "tls", "coordinator", "workers", "name", "address", "memory", "keys"]
ODD = st.recursive(
    ODD_NUMBERS | st.none() | st.booleans() | st.sampled_from(["", "a:1", "24GiB", "x" * 500, "\n", "\u2028", "1:2:3"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | ODD_NUMBERS, inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "cluster.yaml"


def written(content: Any) -> bytes:
    """As YAML, with numbers of any length, which Python writes in hex only."""
    if isinstance(content, dict):
        return b"{" + b", ".join(written(key) + b": " + written(value) for key, value in content.items()) + b"}"
    if isinstance(content, list):
        return b"[" + b", ".join(map(written, content)) + b"]"
    if isinstance(content, int) and abs(content) > 10**300:
        return hex(content).encode()
    return yaml.safe_dump(content, default_flow_style=True, width=10**9).removesuffix("...\n").strip().encode()


TEXTS = st.text("[]{}&*!|>-?:,#'\"\\ \nab<0", max_size=40).map(str.encode)
MAPPINGS = st.dictionaries(st.sampled_from(KEYS) | ODD_NUMBERS, ODD, max_size=5).map(written)


@fuzzed(80)
@given(nearly(SOUND) | st.binary(max_size=40) | TEXTS | MAPPINGS)
def test_whatever_a_file_holds_is_read_or_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with within(16 << 20):
        try:
            cluster = load_cluster(path)
        except ConfigError as error:
            assert len(str(error)) < 20 * len(content) + 1000
        else:
            configuration_of(cluster)  # what can be read can be told to other nodes


def test_extreme_files_are_refused_in_few_words(path: Path) -> None:
    for content in (
        "a: &a [*a]\nworkers: *a\nlayers: *a\n", "context: 4294967296", "layers: [4294967296]",
        "memory: " + "9" * 5000, "coordinator: {memory: 999999999999999TB}", "[" * 200, "- " * 10_000,
        "{a: " * 5_000, "context: " + "1:" * 2000 + "1.5", "!!python/object:os.system {}",
        "workers: [" + "{}, " * 1000 + "]", "? " * 10_000,
    ):  # fmt: skip
        path.write_text(content)
        with within(64 << 20), pytest.raises(ConfigError) as refused:
            load_cluster(path)
        assert len(str(refused.value)) < 2000, content[:20]
